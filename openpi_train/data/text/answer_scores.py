"""Scores of completions against a reference: pure functions of (prompt, completion, reference) that return a number.

    exact_match           1 if both texts are equal, apart from white space at the ends and its kind and length
    number_match          1 if both give the same number (`answer_numbers.py`)
    regex:PATTERN         1 if the whole completion, without white space at its ends, has this form, else 0
    file.py:function      a function of the user's, called the same way, or one of TRL's form (`reward_form.py`)

1 is a right answer, 0 a wrong one; a function of the user's may return any finite number, or None for none.
Read next: `evaluation/text_evaluations.py`.
"""

import asyncio
import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.data.text.answer_numbers import number_of
from openpi_train.data.text.reward_form import GIVEN, TrlForm, form_of
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.own_file import import_file

_SHOWN = 80  # characters of a prompt in a message
_REGEX = "regex:"


def exact_match(prompt: str, completion: str, reference: str) -> float:
    """1 if the completion is the reference, apart from white space, else 0."""
    del prompt
    return float(words_of(completion) == words_of(reference))


def number_match(prompt: str, completion: str, reference: str) -> float:
    """1 if the completion gives the number of the reference, else 0; also 0 if the reference has none."""
    del prompt
    wanted = number_of(reference)
    return float(wanted is not None and number_of(completion) == wanted)


def regex_match(pattern: str) -> Callable[[str, str, str], float]:
    """A function that is 1 for a completion that matches as a whole, else 0. Raises ValueError for no pattern."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return lambda prompt, completion, reference: float(compiled.fullmatch(completion.strip()) is not None)


def words_of(text: str) -> str:
    """The text with one space wherever it has white space, and none at its ends."""
    return " ".join(text.split())


@dataclasses.dataclass(frozen=True)
class AnswerScore:
    """A score by the name of its metric.

    `answer` is what equal answers have in common, which completions vote with; None: nothing is known of it.
    `compares`: it says nothing without a reference. `form`: it is called in TRL's form, with all completions of a
    prompt.
    """

    name: str
    function: Callable[..., Any]
    answer: Callable[[str], Hashable | None] | None = None
    compares: bool = False
    form: TrlForm | None = None

    def __call__(self, prompt: str, completion: str, reference: str) -> float | None:
        """The score. Raises UsageError if a function of the user's fails, or returns no finite number, nor None."""
        return self._checked(prompt, lambda: [self.function(prompt, completion, reference)], 1)[0]

    def of_prompt(
        self, prompt: str, reference: str, completions: Sequence[str], arguments: Mapping[str, Sequence[object]]
    ) -> list[float | None]:
        """The scores of a prompt's completions; `arguments` are those of TRL's form. Raises as `__call__`."""
        form = self.form
        if form is None:
            return [self(prompt, completion, reference) for completion in completions]
        given = form.arguments({name: arguments[name] for name in GIVEN}, arguments)
        return self._checked(prompt, lambda: self.function(**given), len(completions))

    def _checked(self, prompt: str, call: Callable[[], object], count: int) -> list[float | None]:
        told = f"the score {self.name} of a completion of {prompt[:_SHOWN]!r}"
        try:
            found: Any = call()
            if inspect.iscoroutine(found):
                found = asyncio.run(found)
            values = [None if value is None else float(value) for value in found]
        except Exception as error:
            raise UsageError(f"{told}: {type(error).__name__}: {error}") from error
        if len(values) != count:
            raise UsageError(f"{told}: it returned {len(values)} scores, and there are {count} completions")
        if wrong := [value for value in values if value is not None and not math.isfinite(value)]:
            raise UsageError(f"{told}: it returned {wrong[0]}; needed is a finite number, or None for no score")
        return values


_KNOWN = {
    "exact_match": AnswerScore("exact_match", exact_match, words_of, compares=True),
    "number_match": AnswerScore("number_match", number_match, number_of, compares=True),
}


def known_scores() -> Mapping[str, AnswerScore]:
    """The scores that have a name."""
    return _KNOWN


def score_named(name: str) -> AnswerScore:
    """The score of this name, `regex:PATTERN`, or the function `file.py:function`.

    Raises ValueError or FileNotFoundError.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    if name.startswith(_REGEX):
        return AnswerScore(name, regex_match(name.removeprefix(_REGEX)))
    file, separator, function = name.rpartition(":")
    if not (separator and file.endswith(".py")):
        close = difflib.get_close_matches(name, _KNOWN, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"{name!r} is no score: allowed are {', '.join(_KNOWN)}, regex:PATTERN and file.py:function{meant}"
        )
    found: Any = getattr(import_file(Path(file), "the file of the score"), function, None)
    if not isinstance(found, Callable):
        raise ValueError(f"{name}: {file} has no function {function!r} of (prompt, completion, reference)")
    try:
        form = form_of(inspect.signature(found))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return AnswerScore(function, found, form=form)
