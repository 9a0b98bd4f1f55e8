"""`AdvantageEstimator`: which advantages attempts get. Read next: `advantages.py`, which computes them."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float

from openpi_train.fields import at_least
from openpi_train.practice.advantages import (
    Groups,
    Mask,
    Rewards,
    Scale,
    Units,
    generalised,
    group_relative,
    leave_one_out,
    returns_to_go,
    whitened,
)

Estimate = Literal["grpo", "rloo", "reinforce_plus_plus", "gae"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """How rewards become advantages.

    With a weight of the divergence from the reference, every unit also earns minus its log-ratio (policy over
    reference) times this weight. `grpo` and `rloo` take the sum of an attempt's, as TRL's RLOO does; the others take it
    where it arises, and the attempt's own reward at its last unit, as TRL's PPO does.
    """

    # The baseline. grpo: the group's mean; rloo: the mean of the others in the group; reinforce_plus_plus: none, and
    # all advantages are whitened; gae: the value head's, by generalised advantage estimation.
    kind: Estimate = "grpo"
    # Whose standard deviation grpo divides by.
    scale: Scale = "group"
    # Discount per unit.
    gamma: float = 1.0
    # How far gae looks beyond the next value.
    lam: float = 0.95
    # Advantages of reinforce_plus_plus and gae get mean 0 and variance 1 over all units of the iteration.
    whiten: bool = True
    # Weight of the divergence from the reference in the reward.
    kl_weight: float = at_least(0, 0.0)

    def check(self) -> list[str]:
        """Invalid values, as sentences."""
        limited = {"gamma": self.gamma, "lam": self.lam}
        return [f"{name} {value} must be from 0 to 1" for name, value in limited.items() if not 0 <= value <= 1]

    @property
    def needs_values(self) -> bool:
        """Whether it needs the values of a critic."""
        return self.kind == "gae"

    @property
    def needs_groups(self) -> bool:
        """Whether it compares the attempts of a group."""
        return self.kind in ("grpo", "rloo")

    def __call__(
        self, rewards: Rewards, groups: Groups, mask: Mask, log_ratios: Units | None, values: Units | None
    ) -> tuple[Units, Units]:
        """Advantages and returns of every unit; 0 where a unit does not count.

        Args:
            rewards: of attempts; NaN for none: the attempt then has no advantage, and its values as returns.
            log_ratios: of policy over reference; needed with a `kl_weight`.
            values: before each unit; needed by gae.
        """
        shape, mask_of_known = mask.shape, mask & ~np.isnan(rewards)[:, None]
        costs = np.zeros(shape)
        if self.kl_weight:
            assert log_ratios is not None
            costs = np.where(mask, self.kl_weight * log_ratios, 0.0)
        if self.needs_groups:
            whole = rewards - costs.sum(axis=1)
            one = leave_one_out(whole, groups) if self.kind == "rloo" else group_relative(whole, groups, self.scale)
            return np.where(mask, one[:, None], 0.0), np.zeros(shape)
        earned = np.where(mask_of_known, _at_last(rewards, mask) - costs, 0.0)
        if self.kind == "gae":
            assert values is not None
            advantages, returns = generalised(earned, values, mask_of_known, self.gamma, self.lam)
            returns = np.where(mask & ~mask_of_known, values, returns)
        else:
            advantages, returns = returns_to_go(earned, mask_of_known, self.gamma), np.zeros(shape)
        return whitened(advantages, mask_of_known) if self.whiten else advantages, returns


def _at_last(rewards: Rewards, mask: Mask) -> Float[np.ndarray, "n u"]:
    """Each reward at its attempt's last unit that counts."""
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    placed = np.zeros(mask.shape)
    placed[np.arange(len(rewards)), last] = rewards
    return placed
