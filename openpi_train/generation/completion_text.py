"""The text of a completion while its tokens come: only what later tokens cannot change, and nothing from a stop on.

Read next: `text_generator.py`.
"""

import dataclasses
from collections.abc import Sequence

from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer
from openpi_train.generation.generator import NewTokens, joined

# What a decoder writes for bytes that are not a character yet.
_INCOMPLETE = "\ufffd"
# Tokens that are decoded again before new ones: a decoder may write a text's first token otherwise than later ones.
_CONTEXT = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewText:
    """More text of a completion, and the tokens whose text starts in it; `tokens.finish_reason` after the last one.

    `num_made` is how many tokens were made for it, those of a stop included, as vLLM counts those of a completion.
    """

    text: str
    tokens: NewTokens
    num_made: int


def whole(parts: Sequence[NewText]) -> NewText:
    """Everything that a completion got, in order."""
    return NewText(
        text="".join(one.text for one in parts),
        tokens=joined([one.tokens for one in parts]),
        num_made=sum(one.num_made for one in parts),
    )


class CompletionText:
    """Makes text of the tokens of one completion.

    Args: `prompt` are the tokens before it; `stops` are the texts that end it.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens = list(prompt[-_CONTEXT:])
        self._num_decoded = len(self._tokens)
        self._text, self._num_told = "", 0
        # Of each token that was not told: the step it came in, its index there, and where its text starts.
        self._held: list[tuple[NewTokens, int, int]] = []

    def add(self, new: NewTokens) -> NewText:
        """The text that is certain with these tokens. If a stop is in it, the completion ends before that."""
        for index, token in enumerate(new.tokens):
            self._held.append((new, index, len(self._text)))
            self._tokens.append(token)
            self._decode()
            if (stop := self._first_stop()) is not None:
                return self._tell(dataclasses.replace(new, finish_reason="stop", ending=None), stop, index + 1)
        num_made = len(new.tokens) + (new.ending is not None)
        if new.finish_reason is None:
            return self._tell(new, len(self._text) - self._begun_stop(), num_made)
        self._decode(even_incomplete=True)
        return self._tell(new, len(self._text) + 1, num_made)

    def _decode(self, *, even_incomplete: bool = False) -> None:
        start = max(0, self._num_decoded - _CONTEXT)
        before, both = (
            self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
            for end in (self._num_decoded, None)
        )
        if even_incomplete or not both.endswith(_INCOMPLETE):
            self._text += both[len(before) :]
            self._num_decoded = len(self._tokens)

    def _first_stop(self) -> int | None:
        """Where the first stop begins: never in text that was told, which does not end with the beginning of one."""
        places = [self._text.find(stop, self._num_told) for stop in self._stops]
        return min((place for place in places if place >= 0), default=None)

    def _begun_stop(self) -> int:
        """The length of the longest end of the text with which a stop begins."""
        lengths = range(len(self._text) - self._num_told, 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._text[-n:]) for stop in self._stops)), 0)

    def _tell(self, new: NewTokens, end: int, num_made: int) -> NewText:
        """The text that was not told up to `end`, and the tokens whose text starts before it."""
        text, self._num_told = self._text[self._num_told : end], min(end, len(self._text))
        told = [one for one in self._held if one[2] < end]
        self._held = self._held[len(told) :]
        return NewText(
            text=text,
            num_made=num_made,
            tokens=dataclasses.replace(
                new,
                tokens=[step.tokens[index] for step, index, _ in told],
                log_probs=[step.log_probs[index] for step, index, _ in told],
                top=[step.top[index] for step, index, _ in told],
            ),
        )
