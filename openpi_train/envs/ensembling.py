"""Temporal ensembling: each executed action is a weighted mean of all actions predicted for this step.

Zhao et al. 2023, "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware" (ACT), section IV-A: the weights
are w_i = exp(-m i), with w_0 for the oldest chunk; a smaller m incorporates new chunks faster. Read next: `rollout.py`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Float, Key

from openpi_train.envs.env import EnvObservation
from openpi_train.envs.rollout import Policy


def ensemble(
    plans: Sequence[Float[np.ndarray, "b h a"]], ages: Sequence[int], rate: float
) -> Float[np.ndarray, "b h a"]:
    """The newest plan, with each action replaced by the weighted mean over all plans that cover its step.

    Args: `plans` of equal length, oldest first, made `ages` control steps ago (the newest now: 0); `rate` is m.
    """
    horizon = plans[-1].shape[1]
    total, weights = np.zeros_like(plans[-1], np.float64), np.zeros((horizon, 1))
    met = np.zeros((horizon, 1))  # number of older plans that cover this step
    for plan, age in zip(plans, ages, strict=True):
        reach = max(horizon - age, 0)
        weight = np.exp(-rate * met[:reach])
        total[:, :reach] += weight * plan[:, age:]
        weights[:reach] += weight
        met[:reach] += 1
    return (total / weights).astype(plans[-1].dtype)


class Ensembled:
    """A policy for one batch of episodes that executes the ensemble of its chunks, `execute` actions of each."""

    def __init__(self, policy: Policy, rate: float, execute: int):
        self._policy, self._rate, self._execute = policy, rate, execute
        self._plans: list[np.ndarray] = []

    def __call__(self, observation: EnvObservation, keys: Key[Array, " b"]) -> np.ndarray:
        """The ensemble's plan from now on."""
        self._plans.append(np.asarray(self._policy(observation, keys)))
        reach = -(-self._plans[-1].shape[1] // self._execute)  # number of chunks until one is used up
        self._plans = self._plans[-reach:]
        ages = [self._execute * number for number in reversed(range(len(self._plans)))]
        return ensemble(self._plans, ages, self._rate)
