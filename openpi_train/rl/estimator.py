"""`AdvantageEstimator`: which advantages rollouts get. Read next: `advantages.py`, which computes them."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float

from openpi_train.fields import at_least
from openpi_train.rl.advantages import (
    MOST_ERROR,
    Groups,
    Mask,
    Rewards,
    Scale,
    Units,
    adapted_weight,
    generalised,
    group_relative,
    leave_one_out,
    returns_to_go,
    whitened,
)

# TRL's, in rollouts.
_HORIZON = 10_000

Estimate = Literal["grpo", "rloo", "reinforce_plus_plus", "gae"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decisions:
    """What rollouts earned at each of their decisions, where one is of several units: the queries of a robot policy.

    The units of a decision are beside each other, and there are equally many of each.

    Attributes:
        rewards: what came between a decision and the next; their sum is the rollout's reward.
        last_values: what the critic expects after the end; 0 where nothing follows.
    """

    rewards: Float[np.ndarray, "n q"]
    last_values: Float[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """How rewards become advantages.

    With a weight of the divergence from the reference, every unit also earns minus its log-ratio (policy over
    reference) times this weight. `grpo` and `rloo` take the sum of a rollout's, as TRL's RLOO does; the others take it
    where it arises, and the rollout's own reward at its last unit, as TRL's PPO does. For a robot gae goes from
    query to query instead, with what was earned between them, and all units of a query have its advantage, as in RLinf.
    """

    # The baseline. grpo: the group's mean; rloo: the mean of the others in the group; reinforce_plus_plus: none, and
    # all advantages are whitened; gae: the value head's, by generalised advantage estimation.
    kind: Estimate = "grpo"
    # Whose standard deviation grpo divides by.
    scale: Scale = "group"
    # Discount per unit; of a robot's gae per query.
    gamma: float = 1.0
    # How far gae looks beyond the next value.
    lam: float = 0.95
    # Advantages of reinforce_plus_plus and gae get mean 0 and variance 1 over all units of the iteration.
    whiten: bool = True
    # What the units earn in reinforce_plus_plus and gae gets variance 1 over all units of the iteration, and keeps its
    # mean (TRL's whiten_rewards).
    whiten_rewards: bool = False
    # Weight of the divergence from the reference in the reward; with `kl_target` that of the first iteration.
    kl_weight: float = at_least(0, 0.0)
    # The divergence of a rollout that the weight is adapted to reach: it rises above this, and falls below. None: the
    # weight is constant.
    kl_target: float | None = None
    # Rollouts over which an adapted weight changes by about a fifth at most; None: 10,000, TRL's.
    kl_horizon: int | None = at_least(1, None)

    def check(self, num_rollouts: int) -> list[str]:
        """Invalid values, as sentences; `num_rollouts` are those of an iteration."""
        limited = {"gamma": self.gamma, "lam": self.lam}
        problems = [f"{name} {value} must be from 0 to 1" for name, value in limited.items() if not 0 <= value <= 1]
        if self.whiten_rewards and self.needs_groups:
            problems.append(
                "whiten_rewards is for kinds whose units earn something each, gae and reinforce_plus_plus; the kind is "
                f"{self.kind}, which scales by --rl.advantages.scale, if at all"
            )
        return problems + self._check_target(num_rollouts)

    def _check_target(self, num_rollouts: int) -> list[str]:
        if self.kl_target is None:
            if self.kl_horizon is None:
                return []
            return [f"kl_horizon {self.kl_horizon} has no effect on a constant weight: give kl_target, too"]
        problems = []
        if not 0 < self.kl_target < float("inf"):
            problems.append(f"kl_target {self.kl_target} must be above 0 and finite")
        if not self.kl_weight:
            problems.append(
                f"kl_target {self.kl_target} adapts kl_weight, which is 0 and would stay 0: give a start above 0, such "
                "as 0.05"
            )
        if num_rollouts * MOST_ERROR >= self.horizon:
            problems.append(
                f"kl_horizon {self.horizon} is too short for the {num_rollouts} rollouts of an iteration: the weight "
                f"could become 0 in one. Give more than {int(num_rollouts * MOST_ERROR)}, better {10 * num_rollouts}"
            )
        return problems

    @property
    def horizon(self) -> int:
        """`kl_horizon` with its default filled in."""
        return _HORIZON if self.kl_horizon is None else self.kl_horizon

    def next_kl_weight(self, weight: float, divergences: Float[np.ndarray, " n"]) -> float:
        """The weight of the next iteration after this one's, from the divergences of its rollouts."""
        if self.kl_target is None or not len(divergences):
            return weight
        return adapted_weight(
            weight,
            float(divergences.mean()),
            target=self.kl_target,
            horizon=self.horizon,
            num_rollouts=len(divergences),
        )

    @property
    def needs_values(self) -> bool:
        """Whether it needs the values of a critic."""
        return self.kind == "gae"

    @property
    def needs_groups(self) -> bool:
        """Whether it compares the rollouts of a group."""
        return self.kind in ("grpo", "rloo")

    def __call__(
        self,
        rewards: Rewards,
        groups: Groups,
        mask: Mask,
        log_ratios: Units | None,
        values: Units | None,
        kl_weight: float | None = None,
        decisions: Decisions | None = None,
    ) -> tuple[Units, Units]:
        """Advantages and returns of every unit; 0 where a unit does not count.

        Args:
            rewards: of rollouts; NaN for none: the rollout then has no advantage, and its values as returns.
            log_ratios: of policy over reference; needed with a `kl_weight`.
            values: before each unit; needed by gae.
            kl_weight: the weight of the divergence at present; None: the config's.
            decisions: what gae goes by; None: every unit is a decision, after the last of which nothing follows.
        """
        kl_weight = self.kl_weight if kl_weight is None else kl_weight
        shape, mask_of_known = mask.shape, mask & ~np.isnan(rewards)[:, None]
        costs = np.zeros(shape)
        if kl_weight:
            assert log_ratios is not None
            costs = np.where(mask, kl_weight * log_ratios, 0.0)
        if self.needs_groups:
            whole = rewards - costs.sum(axis=1)
            one = leave_one_out(whole, groups) if self.kind == "rloo" else group_relative(whole, groups, self.scale)
            return np.where(mask, one[:, None], 0.0), np.zeros(shape)
        if self.kind == "gae" and decisions is not None:
            assert values is not None
            return self._of_decisions(decisions, mask, mask_of_known, costs, values)
        earned = np.where(mask_of_known, _at_last(rewards, mask) - costs, 0.0)
        if self.whiten_rewards:
            earned = whitened(earned, mask_of_known, keeps_mean=True)
        if self.kind == "gae":
            assert values is not None
            advantages, returns = generalised(earned, values, mask_of_known, self.gamma, self.lam)
            returns = np.where(mask & ~mask_of_known, values, returns)
        else:
            advantages, returns = returns_to_go(earned, mask_of_known, self.gamma), np.zeros(shape)
        return whitened(advantages, mask_of_known) if self.whiten else advantages, returns

    def _of_decisions(
        self, decisions: Decisions, mask: Mask, mask_of_known: Mask, costs: Units, values: Units
    ) -> tuple[Units, Units]:
        """Advantages and returns of units, each those of its decision."""
        n, queries = decisions.rewards.shape
        in_queries = (n, queries, -1)
        counts = mask_of_known.reshape(in_queries).any(axis=2)
        earned = np.where(counts, decisions.rewards - costs.reshape(in_queries).sum(axis=2), 0.0)
        if self.whiten_rewards:
            earned = whitened(earned, counts, keeps_mean=True)
        expected = values.reshape(in_queries)[:, :, 0]
        found = generalised(earned, expected, counts, self.gamma, self.lam, decisions.last_values)
        advantages = whitened(found[0], counts) if self.whiten else found[0]
        of_units = (np.repeat(one, mask.shape[1] // queries, axis=1) for one in (advantages, found[1]))
        advantages, returns = (np.where(mask_of_known, one, 0.0) for one in of_units)
        return advantages, np.where(mask & ~mask_of_known, values, returns)


def _at_last(rewards: Rewards, mask: Mask) -> Float[np.ndarray, "n u"]:
    """Each reward at its rollout's last unit that counts."""
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    placed = np.zeros(mask.shape)
    placed[np.arange(len(rewards)), last] = rewards
    return placed
