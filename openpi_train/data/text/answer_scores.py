"""Scores of completions against a reference: pure functions of (prompt, completion, reference) that return a number.

    exact_match           1 if both texts are equal, apart from white space at the ends and its kind and length
    number_match          1 if both give the same number (`answer_numbers.py`)
    file.py:function      a function of the user's, called the same way

1 is a right answer, 0 a wrong one; a function of the user's may return any finite number.
Read next: `evaluation/text_evaluations.py`.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

from openpi_train.data.text.answer_numbers import number_of
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.own_file import import_file

_SHOWN = 80  # characters of a prompt in a message


def exact_match(prompt: str, completion: str, reference: str) -> float:
    """1 if the completion is the reference, apart from white space, else 0."""
    del prompt
    return float(words_of(completion) == words_of(reference))


def number_match(prompt: str, completion: str, reference: str) -> float:
    """1 if the completion gives the number of the reference, else 0; also 0 if the reference has none."""
    del prompt
    wanted = number_of(reference)
    return float(wanted is not None and number_of(completion) == wanted)


def words_of(text: str) -> str:
    """The text with one space wherever it has white space, and none at its ends."""
    return " ".join(text.split())


@dataclasses.dataclass(frozen=True)
class AnswerScore:
    """A score by the name of its metric.

    `answer` is what equal answers have in common, which completions vote with; None: nothing is known of it.
    `compares`: it says nothing without a reference.
    """

    name: str
    function: Callable[[str, str, str], float]
    answer: Callable[[str], Hashable | None] | None = None
    compares: bool = False

    def __call__(self, prompt: str, completion: str, reference: str) -> float:
        """The score. Raises UsageError if a function of the user's fails, or does not return a finite number."""
        try:
            value = float(self.function(prompt, completion, reference))
        except Exception as error:
            raise UsageError(f"{self._told(prompt)}: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise UsageError(f"{self._told(prompt)}: it returned {value}; needed is a finite number")
        return value

    def _told(self, prompt: str) -> str:
        return f"the score {self.name} of a completion of {prompt[:_SHOWN]!r}"


_KNOWN = {
    "exact_match": AnswerScore("exact_match", exact_match, words_of, compares=True),
    "number_match": AnswerScore("number_match", number_match, number_of, compares=True),
}


def known_scores() -> Mapping[str, AnswerScore]:
    """The scores that have a name."""
    return _KNOWN


def score_named(name: str) -> AnswerScore:
    """The score of this name, or the function `file.py:function`. Raises ValueError or FileNotFoundError."""
    if name in _KNOWN:
        return _KNOWN[name]
    file, separator, function = name.rpartition(":")
    if not (separator and file.endswith(".py")):
        close = difflib.get_close_matches(name, _KNOWN, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{name!r} is no score: allowed are {', '.join(_KNOWN)} and file.py:function{meant}")
    found: Any = getattr(import_file(Path(file), "the file of the score"), function, None)
    if not isinstance(found, Callable):
        raise ValueError(f"{name}: {file} has no function {function!r} of (prompt, completion, reference)")
    return AnswerScore(function, found)
