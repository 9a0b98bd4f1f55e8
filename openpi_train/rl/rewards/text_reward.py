"""`TextReward`: what a completion is rewarded for, by name; the rewards that are computed in this process.

    exact_match, number_match   as in evaluations (`data/text/answer_scores.py`)
    math_verify                 1 if the answer equals the reference as mathematics, else 0 (`math_answers.py`)
    regex:PATTERN               1 if the whole text, without white space at its ends, has this form, else 0
    overlong:N                  0 for a completion that leaves N tokens of those allowed, and then down to -1 (DAPO)
    model:CHECKPOINT            the score of a reward model (`reward_model.py`)
    file.py:function            a function of the user's (`reward_form.py`), in a process of its own

A reward is a number, or None for none: a completion that no reward says anything of is in no baseline.
Read next: `judge.py`.
"""

import abc
import dataclasses
import importlib.util
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from openpi_train.data.text.answer_scores import AnswerScore, known_scores, regex_match, score_named
from openpi_train.data.text.prompt_records import PromptRecord, trl_arguments
from openpi_train.data.text.reward_form import TrlForm
from openpi_train.rl.rewards.function_reward import FunctionReward, file_problem, trl_form
from openpi_train.rl.rewards.reward_process import PACKAGED
from openpi_train.runtime.exits import DataError
from openpi_train.runtime.preempt import stop_noticed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
    """A completion: texts without special tokens, and the tokens of prompt and completion with them."""

    prompt: str
    text: str
    reference: str
    tokens: tuple[int, ...]
    num_new_tokens: int
    most_new_tokens: int
    # Completions of one prompt beside each other have the same.
    group: int = 0
    # Its prompt's record, for functions of TRL's form.
    record: PromptRecord | None = None


class RewardFunction(abc.ABC):
    """One reward of a completion.

    Processes share out the completions; those of a `together` term are given to all processes, which compute together.
    One that is `in_groups` is given all completions of a prompt, with its record.
    """

    together: ClassVar[bool] = False
    in_groups: bool = False

    @abc.abstractmethod
    def __call__(self, completed: Sequence[Completed]) -> list[float | None]:
        """The rewards of these completions. Raises any exception if one cannot be rewarded."""

    def close(self) -> None:  # noqa: B027
        """End processes."""


class AnswerTerm(RewardFunction):
    """A score of evaluations."""

    def __init__(self, score: AnswerScore):
        self._score = score

    def __call__(self, completed: Sequence[Completed]) -> list[float | None]:
        return [self._score(one.prompt, one.text, one.reference) for one in completed]


class OverlongTerm(RewardFunction):
    """Minus the share of the last `margin` tokens that a completion uses (Yu et al. 2025, DAPO, equation 13)."""

    def __init__(self, margin: int):
        self._margin = margin

    def __call__(self, completed: Sequence[Completed]) -> list[float | None]:
        return [
            -min(max(one.num_new_tokens - (one.most_new_tokens - self._margin), 0) / self._margin, 1.0)
            for one in completed
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextReward:
    """One term of the reward."""

    # exact_match, number_match, math_verify, regex:PATTERN, overlong:TOKENS, model:CHECKPOINT of a reward model, or a
    # function file.py:function(prompt, completion, reference) that returns a number or None, or one written for TRL.
    name: str
    # The term is multiplied by this.
    weight: float = 1.0

    @property
    def compares(self) -> bool:
        """Whether it says nothing without a reference."""
        return self.name in known_scores() or self.name in PACKAGED

    @property
    def trl_form(self) -> TrlForm | None:
        """The form of a function of the user's if it is TRL's, as far as can be seen without running its file."""
        return trl_form(self.name) if self.name.partition(":")[0].endswith(".py") else None

    def check(self, number: int) -> list[str]:
        """Why it is no reward, as sentences."""
        flag, (kind, _, argument) = f"--rl.rewards.{number}", self.name.partition(":")
        if not abs(self.weight) < float("inf"):
            return [f"{flag}.weight {self.weight} must be a finite number"]
        if kind == "regex":
            try:
                regex_match(argument)
            except ValueError as error:
                return [f"{flag}.name {self.name}: {error}"]
        elif kind == "overlong":
            if not argument.isdecimal() or int(argument) == 0:
                return [f"{flag}.name {self.name}: needed is overlong:TOKENS, such as overlong:64"]
        elif kind == "model":
            return [f"{flag}.name {self.name}: {problem}" for problem in model_problem(argument)]
        elif kind.endswith(".py"):
            return [f"{flag}.name {self.name}: {problem}" for problem in file_problem(self.name)]
        elif self.name in PACKAGED:
            return [f"{flag}.name {self.name}: {problem}" for problem in package_problem(self.name)]
        elif self.name not in known_scores():
            others = ("regex:PATTERN", "overlong:TOKENS", "model:CHECKPOINT", "file.py:function")
            names = ", ".join([*known_scores(), *PACKAGED, *others])
            return [f"{flag}.name {self.name!r} is no reward: allowed are {names}"]
        return []

    def term(
        self, running: object, *, timeout_s: float, on_timeout: str, memory_gib: float, environment: Sequence[str]
    ) -> RewardFunction:
        """What computes it in this run. Every process must call it. Raises UsageError if it cannot be used."""
        kind, _, argument = self.name.partition(":")
        if kind == "regex":
            return AnswerTerm(score_named(self.name))
        if kind == "overlong":
            return OverlongTerm(int(argument))
        if kind == "model":
            return ModelTerm(argument, running)
        if kind.endswith(".py") or self.name in PACKAGED:
            function = FunctionReward(
                self.name,
                timeout_s=timeout_s,
                on_timeout=on_timeout,
                memory_gib=memory_gib,
                environment=environment,
                is_stopping=stop_noticed,
            )
            return FunctionTerm(function)
        return AnswerTerm(known_scores()[self.name])


class FunctionTerm(RewardFunction):
    """A function of the user's, or a packaged one that may hang."""

    def __init__(self, function: FunctionReward):
        self._function = function
        function.start()  # before anything is compiled: the file may be of no use
        self.in_groups = function.form is not None

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if the function takes what a dataset with these columns has not."""
        form = self._function.form
        if form is not None and (problem := form.problem(columns)):
            raise DataError(f"the reward {self._function.name}: {problem}")

    def __call__(self, completed: Sequence[Completed]) -> list[float | None]:
        if self.in_groups:
            groups = itertools.groupby(completed, key=lambda one: one.group)
            return [value for _, group in groups for value in self._of_group(list(group))]
        return self._function([(one.prompt, one.text, one.reference) for one in completed])

    def _of_group(self, group: Sequence[Completed]) -> list[float | None]:
        record = group[0].record
        assert record is not None, "TextActor reads them"
        ids = [one.tokens[len(one.tokens) - one.num_new_tokens :] for one in group]
        return self._function.of_group(group[0].prompt, trl_arguments(record, [one.text for one in group], ids))

    def close(self) -> None:
        self._function.close()


class ModelTerm(RewardFunction):
    """The score of a reward model."""

    together = True

    def __init__(self, where: str, running: Any):
        from openpi_train.rl.rewards.reward_model import ModelReward  # which imports this module

        self._model = ModelReward(where, running)

    def __call__(self, completed: Sequence[Completed]) -> list[float | None]:
        return self._model(completed)


def package_problem(package: str) -> list[str]:
    """Why a package that a reward needs cannot be used, as far as can be seen without importing it."""
    if importlib.util.find_spec(package) is not None:
        return []
    return [f"the package {package.replace('_', '-')} is not installed: pip install 'openpi_train[math]'"]


def model_problem(where: str) -> list[str]:
    """Why there can be no reward model, as far as can be seen without opening it."""
    if not where:
        return ["needed is model:CHECKPOINT"]
    is_path = "://" not in where and not where.startswith("hub:")
    return [f"there is no {where} (looked in {Path.cwd()})"] if is_path and not Path(where).exists() else []
