"""Tokens of an example, and which of them are targets. Targets are found by position, never by the value of a token.

So the token that ends a text is a target also where it is the tokenizer's pad token. Read next: `token_store.py`.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from openpi_train.data.text.chat_template import ChatTemplate, Span, built_in
from openpi_train.data.text.conversation_faults import fault_of, template_fault
from openpi_train.data.text.examples import Example, Text
from openpi_train.data.tokenizers.text_tokenizer import Pieces, TextTokenizer, end_tokens

# Which tokens are targets: those of the completion, if there is a prompt, else all; the completion's; those that the
# assistant wrote, in the completion if there is a prompt; all.
Targets = Literal["auto", "completion", "assistant", "all"]


class UnfitSettingsError(ValueError):
    """The settings of the run do not fit the type of an example: no record of its dataset can be encoded."""


@dataclasses.dataclass(frozen=True)
class EncodedText:
    """The tokens of one text, int32 [t], and which of them are targets, bool [t]."""

    tokens: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """Encodes examples. `templates` are chat templates by name; conversations need the one called `default`."""

    tokenizer: TextTokenizer
    templates: dict[str, ChatTemplate]
    targets: Targets = "auto"

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a completion (`end_tokens`)."""
        return end_tokens(self.tokenizer)

    @property
    def digest(self) -> str:
        """Digest of everything besides the example that the result depends on."""
        templates = {name: [one.source, one.special_tokens, str(one.today)] for name, one in self.templates.items()}
        parts = [self.tokenizer.digest, templates, self.targets, list(self.ends)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, example: Example) -> list[EncodedText]:
        """One text for every completion of the example, each with the prompt before it; or the prompt, if it is alone.

        Raises ValueError if it cannot be encoded, UnfitSettingsError if none of its type can; both say what to do.
        """
        self._check(example)
        if example.type.kind == "prompt only":
            return [self._prompt(example)]
        if example.type.conversational:
            return [self._conversation(example, number) for number in range(len(example.completions))]
        if example.prompt is None:
            return [self._whole(text) for text in example.completions]
        return self._continued(example.prompt, example.completions)

    def _check(self, example: Example) -> None:
        kind, given = example.type, self.targets
        if given != "auto" and kind.kind == "prompt only":
            raise UnfitSettingsError(f"--data.targets {given}: prompts have no targets; leave it out")
        if given == "completion" and example.prompt is None:
            raise UnfitSettingsError(f"--data.targets completion needs a prompt and a completion; the type is {kind}")
        if given == "assistant" and not kind.conversational:
            raise UnfitSettingsError(f"--data.targets assistant needs conversations; the type is {kind}")
        if given in ("assistant", "all") and kind.kind in ("preference", "unpaired preference"):
            raise UnfitSettingsError(
                f"--data.targets {given}: the targets of preferences are their completions; leave it out"
            )
        if kind.conversational and not self.templates:
            raise UnfitSettingsError(
                f"the tokenizer {self.tokenizer.name} has no chat template, which conversations need: give one with "
                "--data.chat-template, or the tokenizer of a model that was trained on conversations"
            )

    def _prompt(self, example: Example) -> EncodedText:
        """What an answer is generated from: a conversation ends with the header of an assistant's message."""
        if isinstance(example.prompt, str):
            (pieces,) = self.tokenizer.encode([example.prompt])
            tokens = self.tokenizer.begun(pieces.tokens)
        else:
            template, variables = self._template(example)
            text = template.render(example.prompt or [], variables, add_generation_prompt=True)
            (pieces,) = self.tokenizer.encode([text])
            tokens = pieces.tokens
        return _encoded(tokens, np.zeros(len(tokens), bool))

    def _whole(self, text: Text) -> EncodedText:
        assert isinstance(text, str)
        (pieces,) = self.tokenizer.encode([text])
        tokens = self.tokenizer.begun(self._ended(pieces.tokens))
        return _encoded(tokens, np.ones(len(tokens), bool))

    def _continued(self, prompt: Text, completions: Sequence[Text]) -> list[EncodedText]:
        """The prompt's tokens are those of the prompt alone, as when an answer is generated.

        The completion's are those that follow them in the tokens of both together. Where the prompt's tokens are not
        the beginning of these, because a token spans the border, the completion is encoded by itself.
        """
        assert isinstance(prompt, str)
        texts = [text for text in completions if isinstance(text, str)]
        first, *both = self.tokenizer.encode([prompt, *(prompt + text for text in texts)])
        start = self.tokenizer.begun(first.tokens)
        encoded = []
        for text, joined in zip(texts, both, strict=True):
            rest = joined.tokens[len(first.tokens) :]
            if joined.tokens[: len(first.tokens)] != first.tokens or not rest:
                rest = self.tokenizer.encode([text])[0].tokens
            tokens = [*start, *self._ended(rest)]
            encoded.append(_encoded(tokens, (np.arange(len(tokens)) >= len(start)) | (self.targets == "all")))
        return encoded

    def _conversation(self, example: Example, number: int) -> EncodedText:
        """The tokens of the whole conversation with a completion, which is rendered and encoded in one piece."""
        completion = example.completions[number]
        assert not isinstance(completion, str) and not isinstance(example.prompt, str)
        prompt, (template, variables) = example.prompt or [], self._template(example)
        messages, border = [*prompt, *completion], 0
        try:
            if self.targets == "assistant":
                text, spans = template.with_assistant_spans(messages, variables)
            else:
                text = template.render(messages, variables)
                spans = [(0, len(text))]
            if example.prompt is not None and self.targets != "all":
                border = template.prefix(prompt, text, variables)
        except ValueError as error:
            raise ValueError(f"{fault_of(example, number) or template_fault(error, example, self.targets)}") from error
        (pieces,) = self.tokenizer.encode([text])
        targets = inside(pieces, spans) & inside(pieces, [(border, len(text))])
        if not targets.any():
            raise ValueError("no token of the conversation is the assistant's: there is nothing to learn from it")
        return _encoded(pieces.tokens, targets)

    def _template(self, example: Example) -> tuple[ChatTemplate, dict[str, Any]]:
        """The chat template for an example, and its variables."""
        variables = dict(example.variables)
        named = "tool_use" if variables.get("tools") and "tool_use" in self.templates else "default"
        return self.templates.get(named) or next(iter(self.templates.values())), variables

    def _ended(self, tokens: list[int]) -> list[int]:
        eos = self.tokenizer.eos
        if eos is None:
            raise UnfitSettingsError(
                f"the tokenizer {self.tokenizer.name} names no eos_token in tokenizer_config.json: a model could not "
                "learn where texts end. Add it there"
            )
        return tokens if self._is_ended(tokens) else [*tokens, eos]

    def _is_ended(self, tokens: Sequence[int]) -> bool:
        """Whether a text ends with a token that ends completions, or with white space after one.

        Chat templates write a line break there, which texts that were rendered beforehand have, too.
        """
        for token in reversed(tokens):
            if token in self.ends:
                return True
            if self.tokenizer.decode([token]).strip():
                return False
        return False


def templates_of(tokenizer: TextTokenizer, given: str | None, today: str) -> dict[str, ChatTemplate]:
    """The tokenizer's chat templates by name, or the one in the file `given`, as `default`.

    Args: `today` is the date that they write, YYYY-MM-DD. Raises as `ChatTemplate.read`.
    """
    about: Any = {"special_tokens": tokenizer.special_tokens, "today": datetime.date.fromisoformat(today)}
    if given is not None:
        return {"default": ChatTemplate.read(given, **about)}
    sources = tokenizer.chat_templates.items()
    return {name: ChatTemplate(source, name=f"of {tokenizer.name}", **about) for name, source in sources}


def built_in_template(tokenizer: TextTokenizer, today: str) -> ChatTemplate | None:
    """The template for conversations where the tokenizer has none; None if it names no token that ends a text."""
    if tokenizer.eos is None:
        return None
    return ChatTemplate(
        built_in(tokenizer.decode(tokenizer.begin)),
        name="built in",
        special_tokens=tokenizer.special_tokens,
        today=datetime.date.fromisoformat(today),
    )


def inside(pieces: Pieces, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens stand for a character in one of the spans, bool [t].

    A token without characters of its own, as of spaces that the tokenizer does not count, is where it starts.
    """
    starts, ends = np.array(pieces.spans, np.int64).reshape(-1, 2).T
    ends = np.maximum(ends, starts + 1)
    found = np.zeros(len(starts), bool)
    for start, end in spans:
        found |= (starts < end) & (ends > start)
    return found


def _encoded(tokens: Sequence[int], targets: np.ndarray) -> EncodedText:
    return EncodedText(np.array(tokens, np.int32), targets)
