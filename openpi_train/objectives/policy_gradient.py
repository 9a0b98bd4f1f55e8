"""Policy gradients from recorded rollouts: PPO (Schulman et al. 2017), GRPO, RLOO, REINFORCE++, DAPO, GSPO, RIPT.

They differ in their advantages (`rl/estimator.py`) and in the settings here. Formulas as in TRL's
`GRPOTrainer`, `RLOOTrainer` and `PPOTrainer` (at f2cd577); denominators are those of the whole optimizer batch.
Read next: `sampling/distribution.py`, which gives the log-probabilities, and `rl/rollout_feed.py` for the batches.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.fields import at_least
from openpi_train.objectives.objective import Metrics, Norms
from openpi_train.objectives.policy_objective import PolicyObjective
from openpi_train.sampling.action_sampler import ActionSampler
from openpi_train.sampling.distribution import Distribution
from openpi_train.sampling.token_distribution import TokenDistribution
from openpi_train.types import RolloutBatch

# A larger logarithm of a ratio has no gradient: its exponential would overflow.
_LARGEST = 20.0
# A larger share of clipped units says that the learning rate is too high.
_MANY_CLIPPED = 0.2
# So does a larger divergence from the acting policy, in nats per unit, which may be spent on units that cannot be
# clipped: those whose advantage is 0. At 1 nat a ratio is typically 4, or a quarter.
_FAR_NATS = 1.0
# The sampler is far from the policy that it samples for where the ratio of their probabilities is above 2 or below 1/2
# (verl's `rollout_is_threshold`).
_FAR_SAMPLED = math.log(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradient(PolicyObjective):
    """Makes what went better than expected more probable, as far as the clipped ratio to the acting policy allows.

    With the ratio r of the probabilities of a unit under the policy that learns and the one that acted, its advantage A
    and the bounds l = 1 - clip_low and h = 1 + clip_high, the loss of a unit is -min(r A, clip(r, l, h) A). Where the
    policy acted with the very parameters that it learns with, r is 1, the loss is the mean of -A, which may be 0, and
    its gradient is that of REINFORCE.
    """

    scores_rollouts: ClassVar[bool] = True

    # How actions are drawn; rollouts are made and scored by it.
    distribution: Distribution = dataclasses.field(default_factory=TokenDistribution)
    # What a ratio is of: each unit; or all units of a rollout, as the geometric mean of their ratios (GSPO) or as
    # their product (RLOO).
    ratio: Literal["unit", "mean", "product"] = "unit"
    # What counts the same: every unit (DAPO), every rollout (GRPO), or every unit with rollouts counted as if each had
    # `max_units` (Dr. GRPO). Rollouts from which nothing is learnt, since they were cut, count in the last two, as in
    # TRL.
    average: Literal["units", "rollouts", "constant"] = "units"
    # Units of a rollout for `average constant`.
    max_units: int | None = at_least(1, None)
    # How far below 1 a ratio still has an effect: 0.2 is the default of Schulman et al. 2017, TRL and verl for tokens,
    # and RLinf's for flows whose distribution sums over actions. With one that takes their mean, DPPO's is 0.01.
    clip_low: float = at_least(0, 0.2)
    # How far above 1 (DAPO: 0.28).
    clip_high: float = at_least(0, 0.2)
    # The largest ratio also for what went worse than expected: dual clip (Ye et al. 2020, who take 3; verl's
    # `clip_ratio_c`, TRL's `delta`). None: no limit.
    clip_most: float | None = at_least(1, None)
    # Truncated importance sampling: a unit's policy loss is weighed by the probability that training computes for the
    # policy that acted, over the one that its sampler drew the unit with, but at most by this. None: it is not, as by
    # default in verl, and in TRL without vLLM. Usual bounds are 2 (verl) and 3 (TRL).
    sampling_clip: float | None = at_least(0, None)
    # Weight of the divergence from the reference.
    kl_weight: float = at_least(0, 0.0)
    # Its estimate, with d = log(reference / policy): k1 is -d, k2 is d^2 / 2, k3 is exp(d) - d - 1.
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    # Weight of the entropy, which is raised: its mean over all units, whatever `average` is (TRL's `entropy_coef`).
    entropy_weight: float = 0.0
    # Weight of the critic's squared error; 0: there is no critic.
    value_weight: float = at_least(0, 0.0)
    # A value may leave what the critic said before by this much; None: no limit.
    value_clip: float | None = at_least(0, 0.2)

    def check(self) -> list[str]:
        """Invalid settings, as sentences that name the flag to change."""
        problems = [f"--objective.distribution: {problem}" for problem in self.distribution.check()]
        if (self.average == "constant") != (self.max_units is not None):
            problems.append(
                f"--objective.average {self.average} with --objective.max-units {self.max_units}: give both constant "
                "and the number of units, such as the longest completion's tokens, or neither"
            )
        if self.clip_low > 1:
            problems.append(f"--objective.clip-low {self.clip_low} must be at most 1")
        if self.sampling_clip == 0:
            problems.append("--objective.sampling-clip 0 must be above 0, or nothing is learnt; 2 and 3 are usual")
        if self.clip_most is not None and self.clip_most <= 1 + self.clip_high:
            problems.append(
                f"--objective.clip-most {self.clip_most} must be above 1 + clip_high, {1 + self.clip_high}, or the "
                "other clip has no effect"
            )
        return problems

    @property
    def has_reference(self) -> bool:
        return bool(self.kl_weight)

    @property
    def has_critic(self) -> bool:
        return bool(self.value_weight)

    @property
    def needed(self) -> frozenset[str]:
        """What the distribution needs, a reference to stay close to, and a critic to train."""
        reference = {"reference"} if self.has_reference else set()
        return self.distribution.needed | reference | ({"value"} if self.has_critic else set())

    @property
    def draws_per_row(self) -> int:
        return self.distribution.draws_per_row

    @property
    def action_sampler(self) -> ActionSampler:
        return self.distribution.action_sampler

    def norms(self, batch: RolloutBatch) -> Norms:
        """The number of units that count, and of rollouts, with those that have none."""
        return {
            "units": jnp.maximum(batch.mask.sum(), 1).astype(jnp.float32),
            "rollouts": jnp.maximum(batch.is_rollout.sum(), 1).astype(jnp.float32),
        }

    @jax.named_scope("loss")
    def loss(
        self, model: nnx.Module, batch: RolloutBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the loss, and of the metrics, which are means over units."""
        del keys, train
        found = self.distribution.scores(model, batch.traces)
        mask, lengths = batch.mask.astype(jnp.float32), batch.mask.sum(axis=1, keepdims=True)
        weights = self._weights(mask, jnp.maximum(lengths, 1), norms)
        acting = jnp.where(batch.is_fresh[:, None], jax.lax.stop_gradient(found.log_prob), batch.log_probs)
        log_ratio = jnp.where(batch.mask, found.log_prob - acting, 0.0)
        ratio = jnp.exp(self._limited(self._of_rollouts(log_ratio, jnp.maximum(lengths, 1))))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        bounded = ratio if self.clip_most is None else jnp.minimum(ratio, self.clip_most)
        gap = jnp.where(batch.mask, acting - batch.sampling_log_probs, 0.0)
        sampled = jnp.exp(self._limited(gap))
        correction = 1.0 if self.sampling_clip is None else jnp.minimum(sampled, self.sampling_clip)
        policy = (weights * correction * jnp.maximum(-batch.advantages * bounded, -batch.advantages * clipped)).sum()

        def mean(values: Array) -> Array:
            return (mask * values).sum() / norms["units"]

        is_low = (ratio < 1 - self.clip_low) & (batch.advantages < 0)
        is_high = (ratio > 1 + self.clip_high) & (batch.advantages > 0)
        is_most = (ratio > bounded) & (batch.advantages < 0)
        metrics = {
            "policy_loss": policy,
            "ratio": mean(ratio),
            "clip_fraction": mean(is_low | is_high | is_most),
            "clip_fraction_low": mean(is_low),
            "clip_fraction_high": mean(is_high),
            "approx_kl": mean(0.5 * jnp.square(log_ratio)),
            "entropy": (entropy := mean(found.entropy)),
            "sampling_difference": mean(jnp.abs(gap)),
            "sampling_ratio": mean(sampled),
            "sampling_far": mean(jnp.abs(gap) > _FAR_SAMPLED),
        }
        loss = policy - self.entropy_weight * entropy
        if self.kl_weight:
            kl = self.divergence(found.log_prob, batch.reference_log_probs)
            loss += self.kl_weight * (weights * kl).sum()
            metrics["kl"] = mean(kl)
        if self.value_weight:
            values = self.distribution.values(model, batch.traces)
            error = (mask * self._value_error(values, batch)).sum() / norms["units"]
            loss += self.value_weight * error
            metrics |= {"value_loss": error, "value": mean(values), "return": mean(batch.returns)}
        return loss, {"loss": loss, **metrics}

    def divergence(self, log_probs: Float[Array, "b u"], reference: Float[Array, "b u"]) -> Float[Array, "b u"]:
        """The estimate of the divergence from the reference at every unit."""
        d = reference - log_probs
        if self.kl_kind == "k1":
            return -d
        return 0.5 * jnp.square(d) if self.kl_kind == "k2" else jnp.exp(self._limited(d)) - d - 1

    def warnings(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Warnings if many units are clipped, or the policy leaves the acting one by much."""
        said = []
        if (metrics.get("clip_fraction") or 0.0) > _MANY_CLIPPED:
            said.append(
                f"more than {_MANY_CLIPPED:g} of the units are clipped (clip_fraction): the policy moves too far on "
                "one collection. Lower --lr-schedule.peak-lr, or --rl.epochs"
            )
        if (metrics.get("approx_kl") or 0.0) > _FAR_NATS:
            said.append(
                f"the policy is more than {_FAR_NATS:g} nats per unit from the one that acted (approx_kl): it moves "
                "too far on one collection. Lower --lr-schedule.peak-lr; in the first steps of a run raise "
                "--lr-schedule.warmup-steps, since Adam's first steps are its largest"
            )
        return said

    def _weights(self, mask: Float[Array, "b u"], lengths: Array, norms: Norms) -> Float[Array, "b u"]:
        """How much each unit counts."""
        if self.average == "units":
            return mask / norms["units"]
        units: Any = lengths if self.average == "rollouts" else self.max_units
        return mask / (norms["rollouts"] * units)

    def _of_rollouts(self, log_ratio: Float[Array, "b u"], lengths: Array) -> Array:
        if self.ratio == "unit":
            return log_ratio
        total = jnp.sum(log_ratio, axis=1, keepdims=True)
        return jnp.broadcast_to(total if self.ratio == "product" else total / lengths, log_ratio.shape)

    def _value_error(self, values: Float[Array, "b u"], batch: RolloutBatch) -> Float[Array, "b u"]:
        """Half of the squared error; of a value that leaves its bounds, that at the bound if it is larger."""
        error = jnp.square(values - batch.returns)
        if self.value_clip is not None:
            near = batch.values + jnp.clip(values - batch.values, -self.value_clip, self.value_clip)
            error = jnp.maximum(error, jnp.square(near - batch.returns))
        return 0.5 * error

    @staticmethod
    def _limited(logarithm: Array) -> Array:
        return jnp.clip(logarithm, -_LARGEST, _LARGEST)
