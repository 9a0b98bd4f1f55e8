"""The loss of reward models: the chosen completion of a pair should have the higher reward (Bradley and Terry 1952).

Read next: `models/language/reward.py`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.objectives.completions import CHOSEN, REJECTED, is_pair
from openpi_train.objectives.objective import Metrics, Norms, Objective
from openpi_train.types import PreferenceBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardPairs(Objective):
    """-log sigmoid(chosen reward - rejected reward - margin), averaged over pairs.

    The loss does not depend on a constant in all rewards. `centering` adds the mean of
    (chosen + rejected reward)^2, which pins that constant (Eisenstein et al. 2023).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})
    text_kinds: ClassVar[tuple[str, ...]] = ("preferences",)
    uses_margins: ClassVar[bool] = True

    # Weight of the squared sum of a pair's rewards; 0.01 is usual.
    centering: float = 0.0

    def __post_init__(self):
        if self.centering < 0:
            raise ValueError(f"centering {self.centering} must be at least 0")

    def norms(self, batch: PreferenceBatch) -> Norms:
        """The number of pairs."""
        return {"pairs": jnp.maximum(is_pair(batch.texts).sum().astype(jnp.float32), 1.0)}

    @jax.named_scope("loss")
    def loss(
        self, model: nnx.Module, batch: PreferenceBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the mean loss, and of the metrics. A tie counts as wrong in `pair_accuracy`."""
        del keys, train
        counts = is_pair(batch.texts)
        scorer: Any = model
        rewards = scorer.rewards(batch.texts.tokens, batch.texts.positions, batch.texts.segments)  # b 2
        chosen, rejected = rewards[:, CHOSEN], rewards[:, REJECTED]

        def mean(values: Array) -> Array:
            return jnp.where(counts, values, 0.0).sum() / norms["pairs"]

        difference = chosen - rejected
        loss = mean(-jax.nn.log_sigmoid(difference - batch.margin))
        if self.centering:
            loss = loss + self.centering * mean(jnp.square(chosen + rejected))
        return loss, {
            "loss": loss,
            "pair_accuracy": mean(difference > 0),
            "reward_margin": mean(difference),
            "mean_reward": mean((chosen + rejected) / 2),
        }
