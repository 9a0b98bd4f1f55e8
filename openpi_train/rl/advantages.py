"""Advantages of recorded rollouts, on the host in float64: how much better each was than expected.

    leave_one_out      RLOO (Ahmadian et al. 2024): the other rollouts of the group are the baseline
    group_relative     GRPO (Shao et al. 2024); without scaling Dr. GRPO's (Liu et al. 2025)
    returns_to_go      REINFORCE++ (Hu 2025) before `whitened`: what each unit still earns
    generalised        GAE (Schulman et al. 2016) from the values of a critic
    explained_variance how much of the returns a critic knew
    adapted_weight     the weight of the divergence for the next iteration (Ziegler et al. 2019)

A rollout is a row of `u` units: tokens, denoising steps. Rollouts at the same prompt are a group. Groups are told by
their ids, in any order and of any sizes. A reward that is NaN stands for none: the rollout is in no baseline and its
advantage is 0. Every process computes all of it from the same gathered rewards. Read next: `estimator.py`.
"""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

Rewards = Float[np.ndarray, " n"]
Groups = Int[np.ndarray, " n"]
Units = Float[np.ndarray, "n u"]
Mask = Bool[np.ndarray, "n u"]
Scale = Literal["group", "batch", "none"]

_GROUP_EPS, _WHITEN_EPS = 1e-4, 1e-8  # TRL's
# The largest relative error of the divergence that `adapted_weight` reacts to.
MOST_ERROR = 0.2


def leave_one_out(rewards: Rewards, groups: Groups) -> Rewards:
    """Each reward minus the mean of the others in its group; 0 where there are no others."""
    known, inverse, counts, sums = _by_group(rewards, groups)
    others = counts[inverse] - 1
    baseline = (sums[inverse] - np.where(known, rewards, 0.0)) / np.maximum(others, 1)
    return np.where(known & (others > 0) & ~_uniform(rewards, inverse), rewards - baseline, 0.0)


def group_relative(rewards: Rewards, groups: Groups, scale: Scale = "group") -> Rewards:
    """Each reward minus its group's mean, divided by a standard deviation (n - 1 in its denominator) plus 1e-4.

    `scale` is whose deviation it is: the group's, that of all rewards, or none. A group of equal rewards, or of one,
    has exactly 0.
    """
    known, inverse, counts, sums = _by_group(rewards, groups)
    centred = np.where(known, rewards - (sums / np.maximum(counts, 1))[inverse], 0.0)
    if scale == "group":
        squares = np.bincount(inverse, centred**2, minlength=len(counts))
        centred = centred / (np.sqrt(squares / np.maximum(counts - 1, 1))[inverse] + _GROUP_EPS)
    elif scale == "batch":
        centred = centred / (np.std(rewards[known], ddof=1) + _GROUP_EPS if known.sum() > 1 else 1.0)
    return np.where(known & ~_uniform(rewards, inverse), centred, 0.0)


def returns_to_go(rewards: Units, mask: Mask, gamma: float = 1.0) -> Units:
    """The discounted sum of the rewards from each unit on; units that do not count are skipped and have 0."""
    return generalised(rewards, np.zeros_like(rewards), mask, gamma, 1.0)[0]


def generalised(
    rewards: Units, values: Units, mask: Mask, gamma: float, lam: float, last_values: Rewards | None = None
) -> tuple[Units, Units]:
    """Advantages and returns (advantage plus value); `values` are those before each unit.

    Units that do not count are skipped: the unit before one is followed by the unit after it. They have 0.

    Args:
        last_values: what is expected after each rollout's last unit: 0 where it is over, the critic's value of what
            was seen last where it was cut. None: 0.
    """
    advantages = np.zeros_like(rewards)
    next_value = np.zeros(len(rewards)) if last_values is None else last_values
    next_advantage = np.zeros(len(rewards))
    for unit in reversed(range(rewards.shape[1])):
        counts = mask[:, unit]
        surprise = rewards[:, unit] + gamma * next_value - values[:, unit]
        advantage = surprise + gamma * lam * next_advantage
        advantages[:, unit] = np.where(counts, advantage, 0.0)
        next_value = np.where(counts, values[:, unit], next_value)
        next_advantage = np.where(counts, advantage, next_advantage)
    return advantages, np.where(mask, advantages + values, 0.0)


def whitened(values: Units, mask: Mask, *, keeps_mean: bool = False) -> Units:
    """The values with variance 1 (n - 1 in its denominator) over all units that count; others are 0.

    Their mean becomes 0; with `keeps_mean` it stays, as of TRL's `whiten_rewards`: mean + (value - mean) / deviation.
    """
    count = mask.sum()
    if count < 2:
        return np.where(mask, values, 0.0) if keeps_mean else np.zeros_like(values)
    mean = values[mask].mean()
    centred = np.where(mask, values - mean, 0.0)
    scaled = centred / np.sqrt((centred**2).sum() / (count - 1) + _WHITEN_EPS)
    return np.where(mask, scaled + mean, 0.0) if keeps_mean else scaled


def explained_variance(values: Units, returns: Units, mask: Mask) -> float:
    """1 - Var(returns - values) / Var(returns) over units that count (Stable-Baselines3); NaN for equal returns.

    1: the critic knew all returns; 0: as good as a constant; below: worse than that.
    """
    spread = float(returns[mask].var()) if mask.any() else 0.0
    return 1 - float((returns - values)[mask].var()) / spread if spread > 0 else float("nan")


def adapted_weight(weight: float, divergence: float, *, target: float, horizon: int, num_rollouts: int) -> float:
    """The weight of the divergence for the next iteration (Ziegler et al. 2019, section 2.2, as TRL computes it).

    It is multiplied by 1 + error * num_rollouts / horizon, where the error is divergence / target - 1, limited to 0.2
    on both sides. The paper's 0.1 per iteration is num_rollouts / horizon.

    Args:
        divergence: that of this iteration, summed over the units of a rollout, mean of its `num_rollouts` rollouts.
    """
    error = min(max(divergence / target - 1, -MOST_ERROR), MOST_ERROR)
    return weight * (1 + error * num_rollouts / horizon)


def mixed(rewards: Rewards, groups: Groups) -> Bool[np.ndarray, " n"]:
    """Whether each rollout is in a group whose rewards differ: from the others nothing can be learnt."""
    return ~_uniform(rewards, np.unique(groups, return_inverse=True)[1])


def _by_group(rewards: Rewards, groups: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Which rewards there are; the number of each rollout's group; of each group, how many rewards and their sum."""
    known = ~np.isnan(rewards)
    _, inverse = np.unique(groups, return_inverse=True)
    counts = np.bincount(inverse, known)
    return known, inverse, counts, np.bincount(inverse, np.where(known, rewards, 0.0))


def _uniform(rewards: Rewards, inverse: np.ndarray) -> np.ndarray:
    """Whether each rollout is in a group without two different rewards. Rounded means of equal numbers may differ."""
    low, high = np.full(inverse.max(initial=-1) + 1, np.inf), np.full(inverse.max(initial=-1) + 1, -np.inf)
    known = ~np.isnan(rewards)
    np.minimum.at(low, inverse[known], rewards[known])
    np.maximum.at(high, inverse[known], rewards[known])
    return (low >= high)[inverse]
