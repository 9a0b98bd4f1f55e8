"""`ActionDistribution`: how a robot policy draws a chunk of actions, what is kept of it, and which units it has.

Read next: `chain_distribution.py`, `action_token_distribution.py`, `rl/robot_actor.py`, which acts by one.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.nn.augment import Augmentation, NoAugmentation
from openpi_train.sampling.distribution import Distribution
from openpi_train.types import Network, Observation, Tree

# An array on devices or on the host, or what one will be.
AnyArray = Array | np.ndarray | jax.ShapeDtypeStruct
# What is kept of the chunks of some queries, by name; queries on the first axis.
Kept = Mapping[str, Any]
# The entry of it with the sampler's log-probabilities, which is no part of the traces.
LOG_PROBS = "log_probs"


class Critic(Protocol):
    """A policy that provides `value`."""

    def value(self, observation: Observation, /) -> Float[Array, " b"]:
        """What it expects to earn from these observations on, float32."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionDistribution(Distribution):
    """A distribution of chunks."""

    # The augmentation that the policy was trained with; it sees its fixed form.
    augmentation: Augmentation = dataclasses.field(default_factory=NoAugmentation)

    @property
    @abc.abstractmethod
    def num_units(self) -> int:
        """The most units of a chunk."""

    @abc.abstractmethod
    def drawn(
        self, model: Network, observation: Observation, keys: Key[Array, " b"], chunk: tuple[int, int]
    ) -> tuple[Float[Array, "b h a"], Kept]:
        """Normalised chunks of shape (h, a), with one key per row, and what is kept of each, with `LOG_PROBS`."""

    @abc.abstractmethod
    def kept_spec(self, chunk: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """What is kept of one chunk of this shape for the traces."""

    @abc.abstractmethod
    def lengths(self, kept: Kept) -> Int[np.ndarray, " b"]:
        """How many units each of these chunks has; on the host."""

    @abc.abstractmethod
    def sampling_log_probs(self, kept: Kept, is_executed: Bool[np.ndarray, "b h a"]) -> Float[np.ndarray, "b u"]:
        """The log-probabilities of these chunks' units, as the sampler computed them; on the host.

        `is_executed` marks the values that the robot executed.
        """

    @abc.abstractmethod
    def traces(
        self,
        observation: Observation,
        kept: Kept,
        is_executed: AnyArray,
        row: AnyArray,
    ) -> Tree:
        """The traces that `scores` takes, of q queries in every row: all leaves but `row` are [b, q, ...]."""

    @jax.named_scope("distribution")
    def values(self, model: Network, traces: Tree) -> Float[Array, "b u"]:
        """What the critic expects at each query, float32, beside each of its units."""
        b, queries = traces.observation.state.shape[:2]
        values = self.value(model, by_query(traces.observation)).reshape(b, queries)
        return jnp.repeat(values, self.num_units, axis=1)

    def value(self, model: Network, observation: Observation) -> Float[Array, " b"]:
        """What the critic in `model` expects from these observations on, float32."""
        critic: Critic = model
        return critic.value(self.seen(observation))

    def seen(self, observation: Observation) -> Observation:
        """The observation as the policy sees it."""
        return self.augmentation(observation, None)


def by_query(tree: Tree) -> Tree:
    """Leaves [b, q, ...] as [b * q, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree)
