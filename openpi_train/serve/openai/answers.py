"""Answers in OpenAI's form: whole ones, and the chunks of a stream. Read next: `token_texts.py`."""

import abc
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from openpi_train.generation.completion_text import NewText
from openpi_train.generation.generator import NewTokens, joined
from openpi_train.serve.openai.token_texts import TokenTexts

# What OpenAI's interface gives for a token that is almost impossible; JSON has no infinity.
_LEAST_LOG_PROB = -9999.0

Json = dict[str, Any]


class Answers(abc.ABC):
    """Makes the answers of one request.

    Args: `fingerprint` names what the answers depend on besides the request; `num_top` is the number of alternatives
    of each token, None: no log-probabilities; `include_usage`: a stream ends with the numbers of tokens.
    """

    def __init__(self, tokens: TokenTexts, *, model: str, fingerprint: str, num_top: int | None, include_usage: bool):
        self._tokens, self._num_top, self._include_usage = tokens, num_top, include_usage
        self._common: Json = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

    def whole(self, choices: Sequence[Sequence[NewText]], usage: Json) -> Json:
        """The answer of a request that is not a stream. Args: for each choice, everything that it got."""
        made = []
        for index, parts in enumerate(choices):
            tokens = joined([part.tokens for part in parts])
            text = "".join(part.text for part in parts)
            made.append({"index": index, **self._said(text, tokens), "finish_reason": tokens.finish_reason})
        return {**self._named(), "choices": made, "usage": usage}

    def chunk(self, index: int, new: NewText, num_characters: int) -> Json:
        """A chunk of a stream. Args: the choice, what it got, and the length of its text before."""
        delta = self._said_more(new.text, new.tokens, num_characters)
        return self._chunk([{"index": index, **delta, "finish_reason": new.tokens.finish_reason}])

    def opening(self, num_choices: int) -> list[Json]:
        """The chunks before the first text."""
        del num_choices
        return []

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk after the last text, if the client asked for it."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: Sequence[Json]) -> Json:
        chunk = {**self._named(is_part=True), "choices": list(choices)}
        return {**chunk, "usage": None} if self._include_usage else chunk

    @abc.abstractmethod
    def _named(self, *, is_part: bool = False) -> Json:
        """The answer's fields besides its choices."""

    @abc.abstractmethod
    def _said(self, text: str, tokens: NewTokens) -> Json:
        """The text and log-probabilities of a whole choice."""

    @abc.abstractmethod
    def _said_more(self, text: str, tokens: NewTokens, num_characters: int) -> Json:
        """Those of a part of a choice after so many characters."""


class CompletionAnswers(Answers):
    """The answers of `/v1/completions`."""

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self._common["id"] = f"cmpl-{uuid.uuid4().hex}"

    def _named(self, *, is_part: bool = False) -> Json:
        return {**self._common, "object": "text_completion"}

    def _said(self, text: str, tokens: NewTokens) -> Json:
        return self._said_more(text, tokens, 0)

    def _said_more(self, text: str, tokens: NewTokens, num_characters: int) -> Json:
        return {"text": text, "logprobs": self._log_probs(tokens, num_characters)}

    def _log_probs(self, new: NewTokens, num_characters: int) -> Json | None:
        if self._num_top is None:
            return None
        offsets = []
        for token in new.tokens:
            found = self._tokens.bytes_of(token)
            begun = sum(not _continues(byte) for byte in found)
            offsets.append(num_characters - bool(found and _continues(found[0]) and num_characters))
            num_characters += begun
        return {
            "tokens": [self._tokens.text_of(token) for token in new.tokens],
            "token_logprobs": [_finite(value) for value in new.log_probs],
            "top_logprobs": [{self._tokens.text_of(token): _finite(value) for token, value in top} for top in new.top]
            if self._num_top
            else None,
            "text_offset": offsets,
        }


class ChatAnswers(Answers):
    """The answers of `/v1/chat/completions`."""

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self._common["id"] = f"chatcmpl-{uuid.uuid4().hex}"

    def opening(self, num_choices: int) -> list[Json]:
        delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index, **delta}]) for index in range(num_choices)]

    def _named(self, *, is_part: bool = False) -> Json:
        return {**self._common, "object": "chat.completion.chunk" if is_part else "chat.completion"}

    def _said(self, text: str, tokens: NewTokens) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._log_probs(tokens)}

    def _said_more(self, text: str, tokens: NewTokens, num_characters: int) -> Json:
        return {"delta": {"content": text} if text else {}, "logprobs": self._log_probs(tokens)}

    def _log_probs(self, new: NewTokens) -> Json | None:
        if self._num_top is None:
            return None
        content = []
        for place, (token, value) in enumerate(zip(new.tokens, new.log_probs, strict=True)):
            top = [self._one(*one) for one in new.top[place]] if self._num_top else []
            content.append({**self._one(token, value), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, value: float) -> Json:
        return {
            "token": self._tokens.text_of(token),
            "logprob": _finite(value),
            "bytes": list(self._tokens.bytes_of(token)),
        }


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 continues a character."""
    return byte & 0xC0 == 0x80


def _finite(log_prob: float) -> float:
    """Raises ValueError for NaN, which a damaged model gives."""
    if math.isnan(log_prob):
        raise ValueError("the model's log-probabilities hold NaN")
    return max(log_prob, _LEAST_LOG_PROB)
