"""What the policy that acted, its reference and its critic say of rollouts, before anything is learnt from them.

Read next: `rollout_feed.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openpi_train.objectives.policy_objective import PolicyObjective
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.params import ParamLeaves, Params, merge_module
from openpi_train.rl.rollouts import RLConfig
from openpi_train.sampling.distribution import Distribution
from openpi_train.types import Network, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutLogProbs:
    """Of every unit, float32 [n, u]: log-probabilities under the policy and the reference, and the critic's values."""

    log_probs: np.ndarray
    reference_log_probs: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeededScores:
    """What an iteration needs of its rollouts before it learns from them."""

    is_compared: bool
    with_reference: bool
    with_values: bool

    @classmethod
    def of(cls, objective: PolicyObjective, rl: RLConfig, num_steps: int) -> "NeededScores":
        """Those of an iteration of so many optimizer steps."""
        return cls(
            # What is learnt from in one step is always fresh.
            is_compared=objective.scores_rollouts and num_steps > 1,
            with_reference=objective.has_reference or bool(rl.advantages.kl_weight),
            with_values=objective.has_critic,
        )

    @property
    def any(self) -> bool:
        """Whether anything is needed."""
        return self.is_compared or self.with_reference or self.with_values


def scores_of(distribution: Distribution, model: Network, traces: Tree, needed: NeededScores) -> dict[str, Any]:
    """The fields of `RolloutLogProbs` of these traces; what is not needed is 0, but for the policy's own."""
    log_probs = distribution.scores(model, traces).log_prob
    none = jnp.zeros_like(log_probs)
    return {
        "log_probs": log_probs,
        "reference_log_probs": distribution.scores(model.reference, traces).log_prob if needed.with_reference else none,
        "values": distribution.values(model, traces) if needed.with_values else none,
    }


class RecordedScores:
    """Scores rollouts with the program of the training step's forward pass, in the same micro-batches.

    A sampler's own log-probabilities would not do: it computes token by token, perhaps in another dtype.

    Args: `devices` is a `training.devices.Devices`.
    """

    def __init__(self, devices: Devices, distribution: Distribution, needed: NeededScores, *, num_micros: int):
        self._devices = devices

        def of_rows(params: ParamLeaves, traces: Tree, _: None) -> dict[str, Any]:
            return scores_of(distribution, merge_module(devices.graphdef, params), traces, needed)

        def score(params: Params, traces: Tree) -> Any:
            found = devices.rows(of_rows, params, traces, None, num_micros)
            return jax.lax.with_sharding_constraint(found, devices.plan.replicated)

        self._score = jax.jit(score)

    def __call__(self, params: Params, batches: list[Tree]) -> RolloutLogProbs:
        """The scores of these batches of traces, joined, on every process. Every process must call it."""
        with jax.set_mesh(self._devices.plan.real_mesh):
            parts = [jax.device_get(self._score(params, traces)) for traces in batches]
        return RolloutLogProbs(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
