"""Advantages of stored control steps by a value function, and which of them are better than expected: RECAP.

Physical Intelligence 2025, "pi*0.6: a VLA that learns from experience". Plain numpy. Read next: `advantages.py`, for
own rollouts; `tools/label_advantages.py`, the caller.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


def lookahead_advantages(
    returns: np.ndarray, values: np.ndarray, episode_ends: np.ndarray, lookahead: int | None
) -> np.ndarray:
    """The advantage of each step t, float64 [steps]: r_t + ... + r_(t+n-1) + V_(t+n) - V_t, with n = `lookahead`.

    Rewards are the differences of successive `returns` [steps], which end with each episode. Where the episode ends
    within n steps, and everywhere with `lookahead` None, it is the rest of the return, minus V_t.

    Args: `episode_ends` [episodes] is the step after each episode's last one.
    """
    returns, values = returns.astype(np.float64), values.astype(np.float64)
    if lookahead is None:
        return returns - values
    lengths = np.diff(episode_ends, prepend=0)
    later = np.arange(len(returns)) + lookahead
    goes_on = later < np.repeat(episode_ends, lengths)
    later = np.where(goes_on, later, 0)
    return returns - values + np.where(goes_on, values[later] - returns[later], 0.0)


@dataclasses.dataclass(frozen=True)
class Better:
    """Which steps of a dataset are better than expected, bool [steps], and by task the advantage above which they
    are."""

    is_better: np.ndarray
    thresholds: dict[str, float]


def better_steps(
    advantages: Sequence[np.ndarray], tasks: Sequence[np.ndarray], always: Sequence[np.ndarray], share: float
) -> list[Better]:
    """Of each task about the `share` of the steps with the greatest advantages, and all that `always` marks.

    The threshold is the (1 - `share`) quantile of the task's advantages, over the steps of all datasets that are not
    marked. Every argument has an array [steps] for each dataset; `tasks` are instructions.
    """
    every, names, marked = (np.concatenate(arrays) for arrays in (advantages, tasks, always))
    thresholds = {}
    for task in np.unique(names).tolist():
        judged = every[(names == task) & ~marked]
        thresholds[task] = float(np.quantile(judged, 1 - share)) if len(judged) else 0.0
    found = []
    for of_steps, of_tasks, of_marks in zip(advantages, tasks, always, strict=True):
        limits = np.array([thresholds[task] for task in of_tasks.tolist()])
        found.append(
            Better((of_steps > limits) | of_marks, {task: thresholds[task] for task in np.unique(of_tasks).tolist()})
        )
    return found
