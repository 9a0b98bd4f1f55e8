"""Flow matching on a policy's own chunks, weighted by how good they were: learning from rollouts by regression.

    positive      what went better than expected is imitated; of rewards as advantages, filtered behaviour cloning
    exponential   advantage-weighted regression (Peng et al. 2019): exp(advantage / temperature), at most `most_weight`

There is no ratio and no likelihood, so what acts may have no noise but the initial one. Read next: `flow_matching.py`,
`indicator_flow.py`, `rl/robot_rl.py`.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.fields import at_least
from openpi_train.keys import of_parts
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.objective import Metrics, Norms
from openpi_train.objectives.policy_objective import PolicyObjective
from openpi_train.sampling.action_distribution import by_query
from openpi_train.sampling.action_sampler import ActionSampler
from openpi_train.sampling.chain_distribution import ChainDistribution
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.types import ActionBatch, RolloutBatch, tree_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedFlow(PolicyObjective):
    """The weighted mean over queries of the squared error of the velocity, towards the chunk that was drawn there.

    Weights depend on rollouts alone, so their sum is a denominator like any other.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"velocity"})

    # How chunks are drawn while acting.
    distribution: ChainDistribution = dataclasses.field(default_factory=FlowDistribution)
    # How advantages become weights.
    weights: Literal["positive", "exponential"] = "positive"
    # The advantage over which an exponential weight grows by a factor of e.
    temperature: float = 1.0
    # The largest exponential weight.
    most_weight: float = at_least(0, 20.0)
    # Steps of a chunk that are imitated: those that are executed; None: all.
    num_imitated: int | None = at_least(1, None)
    # Draws of noise and time per query.
    num_flow_draws: int = at_least(1, 4)

    def check(self) -> list[str]:
        """Invalid settings, as sentences that name the flag to change."""
        if self.temperature > 0:
            return []
        return [
            f"--objective.temperature {self.temperature} must be above 0: the lower, the more the best rollouts count"
        ]

    @property
    def draws_per_row(self) -> int:
        return self.num_flow_draws

    @property
    def action_sampler(self) -> ActionSampler:
        return self.distribution.action_sampler

    def query_weights(self, batch: RolloutBatch) -> Float[Array, "b q"]:
        """The weight of every query; 0 of those that do not count."""
        b, queries = batch.traces.noisy.shape[:2]
        advantages, counts = (one.reshape(b, queries, -1)[..., 0] for one in (batch.advantages, batch.mask))
        if self.weights == "positive":
            return ((advantages > 0) & counts).astype(jnp.float32)
        # Limited before, or a large advantage would be infinite.
        exponent = jnp.minimum(advantages / self.temperature, jnp.log(jnp.float32(self.most_weight)))
        return jnp.where(counts, jnp.exp(exponent), 0.0)

    def norms(self, batch: RolloutBatch) -> Norms:
        """The elements that count, times their weight and the draws; and the queries that count."""
        weights, (*_, horizon, dims) = self.query_weights(batch), batch.traces.noisy.shape
        elements = min(self.num_imitated or horizon, horizon) * dims * self.num_flow_draws
        return {
            "elements": elements * jnp.maximum(weights.sum(), 1e-6),
            "units": jnp.maximum(batch.mask.sum(), 1).astype(jnp.float32),
        }

    @jax.named_scope("loss")
    def loss(
        self, model: nnx.Module, batch: RolloutBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the weighted error."""
        del train
        assert keys is not None, "flow matching draws noise: it needs one key per row"
        network: Any = model
        b, queries = batch.traces.noisy.shape[:2]
        observation, noisy = by_query((batch.traces.observation, batch.traces.noisy))
        flow, chunks = FlowMatching(num_flow_draws=self.num_flow_draws, augment=False), noisy[:, -1]
        noise, time = flow.draw(tree_of(ActionBatch, actions=chunks), of_parts(keys, queries))
        position, wanted = flow.path(chunks, noise, time)
        velocity = network.velocity(self.distribution.seen(observation), position, time).astype(jnp.float32)
        error = jnp.square(velocity - wanted)[:, :, : self.num_imitated].sum(axis=(1, 2, 3)).reshape(b, queries)
        weights = self.query_weights(batch)
        loss = (weights * error).sum() / norms["elements"]
        units_per_query = batch.mask.shape[1] // queries
        return loss, {"loss": loss, "weight": units_per_query * weights.sum() / norms["units"]}
