"""Flow matching on own chunks and demonstrations, told how good each was: CFGRL, RECAP, and the loss of RIPT for pi0.

    dropped   a draw is told whether its chunk was better or worse than expected, or with probability `drop` nothing
              (CFGRL: Frans et al. 2025; RECAP: Physical Intelligence 2025)
    both      w |v(better) - u|^2 + a |v(none) - u|^2 with the same noise and time, where w is 1 for what was better
              than expected, else 0, and a is `unconditional_weight` (the RIPT trainers for pi0)

The policy is not made better by training alone: it acts by guidance towards `better` (`sampling/indicator.py`), in
RL with `distribution.guidance`, in evaluations and where it is served with `guidance`. Read next: `weighted_flow.py`;
`advantage_conditioned_flow.py`, which learns from stored episodes.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.fields import at_least
from openpi_train.keys import for_purpose, of_parts
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.objective import Metrics, Norms
from openpi_train.objectives.policy_objective import PolicyObjective
from openpi_train.sampling.action_distribution import by_query
from openpi_train.sampling.action_sampler import ActionSampler
from openpi_train.sampling.flow import FlowSampler
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.sampling.indicator import BETTER, NONE, WORSE, check_drop, check_guidance, dropped
from openpi_train.types import ActionBatch, Network, Observation, RolloutBatch, tree_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndicatorFlow(PolicyObjective):
    """The mean squared error of the velocity towards the chunk of each query, and of each demonstration.

    A query is better than expected if its advantage is above 0, worse if it is below, and nothing is told of one whose
    advantage is 0: its group has no other outcome. Demonstrations are better than expected, always.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"velocity", "indicator"})
    uses_demonstrations: ClassVar[bool] = True

    # How chunks are drawn while acting, with its `guidance`.
    distribution: FlowDistribution = dataclasses.field(default_factory=lambda: FlowDistribution(guidance=1.0))
    # Guidance in evaluations, and where the policy is served: 0 tells it nothing, 1 `better`, more goes beyond.
    guidance: float = 1.0
    # Which velocities are trained on a chunk.
    form: Literal["dropped", "both"] = "dropped"
    # How often `dropped` tells nothing (RECAP: 0.3).
    drop: float = 0.1
    # Weight of the velocity that is told nothing, in `both`.
    unconditional_weight: float = at_least(0, 0.1)
    # Steps of an own chunk that are imitated: those that are executed; None: all.
    num_imitated: int | None = at_least(1, None)
    # Draws of noise and time per chunk.
    num_flow_draws: int = at_least(1, 4)

    def check(self) -> list[str]:
        """Invalid settings, as sentences that name the flag to change."""
        problems = check_guidance("--objective.guidance", self.guidance)
        problems += check_guidance("--objective.distribution.guidance", self.distribution.guidance)
        if self.distribution.guidance is None:
            problems.append(
                "--objective.distribution.guidance is not given: what acts is told nothing that it learns from. Give "
                "1, or more"
            )
        if self.form == "dropped":
            problems += check_drop("--objective.drop", self.drop)
        if self.form == "both" and not self.unconditional_weight:
            problems.append(
                "--objective.unconditional-weight 0: nothing trains the velocity that guidance begins from; give a "
                "weight above 0, such as 0.1"
            )
        return problems

    @property
    def draws_per_row(self) -> int:
        return self.num_flow_draws * (2 if self.form == "both" else 1)

    @property
    def action_sampler(self) -> ActionSampler:
        return FlowSampler(augmentation=self.distribution.augmentation, guidance=self.guidance)

    def told(self, batch: RolloutBatch) -> tuple[Int[Array, "b q"], Bool[Array, "b q"]]:
        """What is known of each query, and which queries count."""
        b, queries = batch.traces.noisy.shape[:2]
        advantages, counts = (one.reshape(b, queries, -1)[..., 0] for one in (batch.advantages, batch.mask))
        return jnp.where(advantages > 0, BETTER, jnp.where(advantages < 0, WORSE, NONE)), counts

    def norms(self, batch: RolloutBatch) -> Norms:
        """The elements of the chunks that count, times the draws; and the queries that count."""
        *_, horizon, dims = batch.traces.noisy.shape
        queries = self.told(batch)[1].sum()
        steps = queries * min(self.num_imitated or horizon, horizon)
        if batch.demonstrations is not None:
            steps += batch.demonstrations.action_mask.sum()
        return {
            "elements": jnp.maximum(steps, 1).astype(jnp.float32) * dims * self.num_flow_draws,
            "queries": jnp.maximum(queries, 1).astype(jnp.float32),
        }

    @jax.named_scope("loss")
    def loss(
        self, model: nnx.Module, batch: RolloutBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the error."""
        del train
        assert keys is not None, "flow matching draws noise: it needs one key per row"
        known, counts = self.told(batch)
        observation, noisy = by_query((batch.traces.observation, batch.traces.noisy))
        chunks = noisy[:, -1]
        steps = counts.reshape(-1, 1) & (jnp.arange(chunks.shape[1]) < (self.num_imitated or chunks.shape[1]))
        own = of_parts(keys, counts.shape[1])
        error = self._error(model, observation, chunks, steps, known.reshape(-1), own)
        if (shown := batch.demonstrations) is not None:
            count = shown.actions.shape[1]
            shown = by_query(shown)
            of_shown = of_parts(for_purpose(keys, "demonstrations"), count)
            better = jnp.full(len(of_shown), BETTER)
            error += self._error(model, shown.observation, shown.actions, shown.action_mask, better, of_shown)
        loss = error / norms["elements"]
        shares = {"better": BETTER, "worse": WORSE}
        told = {name: ((known == value) & counts).sum() / norms["queries"] for name, value in shares.items()}
        return loss, {"loss": loss, **told}

    def _error(
        self,
        model: Network,
        observation: Observation,
        chunks: Float[Array, "n h a"],
        steps: Bool[Array, "n h"],
        known: Int[Array, " n"],
        keys: Key[Array, " n"],
    ) -> Float[Array, ""]:
        """The sum of the weighted squared errors of these chunks, over the steps that count."""
        flow = FlowMatching(num_flow_draws=self.num_flow_draws, augment=False)
        noise, time = flow.draw(tree_of(ActionBatch, actions=chunks), keys)
        if self.form == "both":
            noise, time = (jnp.concatenate([one, one], axis=1) for one in (noise, time))
            told = jnp.repeat(jnp.array([[BETTER, NONE]]), self.num_flow_draws, axis=1)
            weights = jnp.where(told == NONE, self.unconditional_weight, known[:, None] == BETTER)
            told = jnp.broadcast_to(told, time.shape)
        else:
            is_dropped = dropped(keys, self.num_flow_draws, self.drop)
            told, weights = jnp.where(is_dropped, NONE, known[:, None]), jnp.ones_like(time)
        position, wanted = flow.path(chunks, noise, time)
        velocity = model.velocity(self.distribution.seen(observation), position, time, told).astype(jnp.float32)
        error = (jnp.square(velocity - wanted) * steps[:, None, :, None]).sum(axis=(2, 3))
        return (weights * error).sum()
