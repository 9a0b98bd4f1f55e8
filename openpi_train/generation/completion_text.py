"""The text of a completion while its tokens come: only what later tokens cannot change, and nothing from a stop on.

Read next: `text_generator.py`.
"""

from collections.abc import Sequence

from openpi_train.data.text.text_tokenizer import TextTokenizer
from openpi_train.generation.generator import NewTokens

# What a decoder writes for bytes that are no character yet.
_INCOMPLETE = "\ufffd"
# Tokens that are decoded again with new ones: the first of a text may be written otherwise than in its middle.
_CONTEXT = 6


class CompletionText:
    """Collects the tokens of one completion.

    Args: `prompt` are the tokens before it; `stops` the texts that end it.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens = [*prompt[-_CONTEXT:]]
        self._known = len(self._tokens)  # tokens whose text is in `_text`
        self._text, self._told = "", 0  # what is decoded so far, and how much of it was told
        # Tokens that were not told: index in the completion, and where their text starts.
        self._held: list[tuple[NewTokens, int, int]] = []

    def add(self, new: NewTokens) -> tuple[str, NewTokens, bool]:
        """The text that is certain now, the tokens that it is of, and whether a stop ended the completion.

        A stop is not part of the text, nor are tokens that start in it or later.
        """
        for index, token in enumerate(new.tokens):
            self._held.append((new, index, len(self._text)))
            self._tokens.append(token)
            is_last = new.finish_reason is not None and index == len(new.tokens) - 1
            self._decode(flush=is_last)
            if (cut := self._first_stop()) is not None:
                self._text = self._text[:cut]
                return *self._told_until(cut, new, ended=True), True
        certain = len(self._text) if new.finish_reason is not None else len(self._text) - self._open_stop()
        return *self._told_until(certain, new, ended=new.finish_reason is not None), False

    def _decode(self, *, flush: bool) -> None:
        """Append the text of the tokens that are not in `_text` yet, if they are whole characters."""
        start = max(0, self._known - _CONTEXT)
        before = self._tokenizer.decode(self._tokens[start : self._known], skip_special_tokens=True)
        after = self._tokenizer.decode(self._tokens[start:], skip_special_tokens=True)
        if flush or not after.endswith(_INCOMPLETE):
            self._text += after[len(before) :]
            self._known = len(self._tokens)

    def _first_stop(self) -> int | None:
        # A stop that ends in the new text starts at most its length before it.
        places = [
            at for stop in self._stops if (at := self._text.find(stop, self._told)) >= 0
        ]  # what was told contains no beginning of a stop
        return min(places, default=None)

    def _open_stop(self) -> int:
        """The length of the longest end of the text with which a stop begins."""
        most = min(max(map(len, self._stops), default=1) - 1, len(self._text) - self._told)
        return next(
            (n for n in range(most, 0, -1) if any(stop.startswith(self._text[-n:]) for stop in self._stops)), 0
        )

    def _told_until(self, until: int, new: NewTokens, *, ended: bool) -> tuple[str, NewTokens]:
        text, self._told = self._text[self._told : until], until
        # A token is told with the first character of its text, one without text with the next text or at the end.
        ready = [one for one in self._held if one[2] < until or (ended and one[2] == until == len(self._text))]
        if ended and until < len(self._text):
            ready = [one for one in ready if one[2] < until]
        self._held = self._held[len(ready) :]
        return text, NewTokens(
            id=new.id,
            tokens=[one.tokens[index] for one, index, _ in ready],
            log_probs=[one.log_probs[index] for one, index, _ in ready],
            top=[one.top[index] for one, index, _ in ready],
            finish_reason=new.finish_reason,
            ending=new.ending,
        )
