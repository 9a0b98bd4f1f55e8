"""`RewardComputer`: the rewards of completions, shared out over the processes, gathered and added.

Read next: `text_reward.py`.
"""

import dataclasses
from collections.abc import Collection, Sequence

import jax
import numpy as np

from openpi_train.rl.rewards.function_reward import InterruptedReward
from openpi_train.rl.rewards.text_reward import Completed, FunctionTerm, RewardFunction, TextReward
from openpi_train.runtime import agree
from openpi_train.runtime.exits import DataError
from openpi_train.runtime.preempt import StoppedError

_SHOWN = 80  # characters of a prompt in a message
# The largest size of a reward: the square of one is a float64.
_LARGEST = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewards:
    """Of every completion, float64 [n]: the weighted sum of all terms, the first term alone, and each by name.

    NaN stands for none. A term that has none leaves the sum to the others.
    """

    total: np.ndarray
    outcomes: np.ndarray
    parts: dict[str, np.ndarray]


class RewardComputer:
    """Rewards completions in a run. Each process computes its share of them.

    Args: `timeout_s`, `on_timeout`, `memory_gib` and `environment` are those of `FunctionReward`.
    """

    def __init__(
        self,
        rewards: Sequence[TextReward],
        running: object,
        *,
        timeout_s: float,
        on_timeout: str,
        memory_gib: float = 64.0,
        environment: Sequence[str] = (),
    ):
        self._rewards = tuple(rewards)
        self._terms = [
            reward.term(
                running, timeout_s=timeout_s, on_timeout=on_timeout, memory_gib=memory_gib, environment=environment
            )
            for reward in rewards
        ]

    @property
    def reads_records(self) -> bool:
        """Whether a completion needs its `record`."""
        return any(term.in_groups for term in self._terms)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if a reward takes what a dataset with these columns has not."""
        for term in self._terms:
            if isinstance(term, FunctionTerm):
                term.check_columns(columns)

    def __call__(self, completed: Sequence[Completed]) -> Rewards:
        """The rewards of these completions, equal on all processes. Every process must call it with the same ones.

        Raises DataError on all processes if a reward fails, or is no finite number, on one; StoppedError if the run is
        asked to stop meanwhile.
        """
        count = jax.process_count()
        alone = [number for number, term in enumerate(self._terms) if not term.together]
        values = np.full((len(self._terms), len(completed)), np.nan)
        for process, found in enumerate(self._shares(alone, completed)):
            for number, part in zip(alone, found, strict=True):
                share = _share(self._terms[number], completed, process, count)
                values[number, share] = np.array(part, np.float64)  # None becomes NaN
        for number, term in enumerate(self._terms):
            if term.together:
                values[number] = np.array(self._checked(number, completed), np.float64)
        weights = np.array([reward.weight for reward in self._rewards])
        known = ~np.isnan(values)
        total = np.where(known.any(axis=0), (weights[:, None] * np.where(known, values, 0.0)).sum(axis=0), np.nan)
        named = zip(self._rewards, values, strict=True)
        return Rewards(
            total=total,
            outcomes=values[0],
            parts={f"reward/{number}_{label_of(reward.name)}": one for number, (reward, one) in enumerate(named)},
        )

    def try_functions(self, completed: Sequence[Completed]) -> None:
        """Have functions of users reward these completions, so that a fault in one ends a run before it trains.

        Every process must call it with the same completions. Raises as `__call__`, and then all processes of functions
        have ended.
        """
        try:
            self._shares([n for n, term in enumerate(self._terms) if isinstance(term, FunctionTerm)], completed)
        except StoppedError:
            self.close()
            raise
        except DataError as error:
            self.close()
            raise DataError(f"before training, a trial of the reward: {error}") from error

    def close(self) -> None:
        """End processes of reward functions."""
        for term in self._terms:
            term.close()

    def _shares(self, numbers: Sequence[int], completed: Sequence[Completed]) -> list[list[list[float | None]]]:
        """What every process computes of the terms of these numbers: its share of the completions."""
        index, count = jax.process_index(), jax.process_count()
        mine: list[list[float | None]] = []
        problem, stopping = None, False
        try:
            for number in numbers:
                share = _share(self._terms[number], completed, index, count)
                mine.append(self._checked(number, [completed[place] for place in share]))
        except InterruptedReward:
            stopping = True
        except Exception as error:
            problem = f"{error}" if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        parts = agree.gather("rewards of completions", {"values": mine, "problem": problem, "stopping": stopping})
        if problems := [f"process {n}: {part['problem']}" for n, part in enumerate(parts) if part["problem"]]:
            raise DataError(problems[0])
        if any(part["stopping"] for part in parts):
            raise StoppedError
        return [part["values"] for part in parts]

    def _checked(self, number: int, completed: Sequence[Completed]) -> list[float | None]:
        values = self._terms[number](completed)
        for one, value in zip(completed, values, strict=True):
            if value is not None and not abs(value) < _LARGEST:
                raise DataError(
                    f"the reward {self._rewards[number].name} of a completion of {one.prompt[:_SHOWN]!r} is {value}; "
                    f"needed is a finite number, below {_LARGEST:g}, or None for no reward"
                )
        return values


def _share(term: RewardFunction, completed: Sequence[Completed], process: int, count: int) -> list[int]:
    """The places of the completions that a process computes this term of."""
    if not term.in_groups:
        return list(range(process, len(completed), count))
    order = {group: number for number, group in enumerate(dict.fromkeys(one.group for one in completed))}
    return [place for place, one in enumerate(completed) if order[one.group] % count == process]


def label_of(name: str) -> str:
    """The part of a metric's name that stands for a reward: the function of a file, or what is before a colon."""
    first, _, rest = name.partition(":")
    return rest if first.endswith(".py") else first
