"""Forecast of an iteration of RL: how long it acts, scores what it did, and learns from it, and what it keeps.

Pure arithmetic, like `forecast.py`. Read next: `rollout_cost.py`.
"""

import dataclasses
from typing import Any

from openpi_train.planning.forecast import Forecast, Machine
from openpi_train.planning.rollout_cost import RolloutCost, TokenSteps
from openpi_train.runtime.device_kinds import GIB

# Share of the memory's nominal rate at which parameters and cache are read to make a token.
DECODING_MEMORY_SHARE = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iteration:
    """An iteration under one strategy: seconds of each part, one after the other, and bytes of host memory."""

    cost: RolloutCost
    acting_s: float
    scoring_s: float
    learning_s: float
    experience_bytes_per_host: int

    @property
    def seconds(self) -> float:
        """All of it, without simulators."""
        return self.acting_s + self.scoring_s + self.learning_s

    def as_json(self) -> dict[str, Any]:
        """All numbers, bytes and seconds."""
        return {
            "rollouts": self.cost.num_rollouts,
            "optimizer_steps": self.cost.num_steps,
            "control_steps": self.cost.num_rollouts * self.cost.control_steps,
            "acting_s": self.acting_s,
            "scoring_s": self.scoring_s,
            "learning_s": self.learning_s,
            "iteration_s": self.seconds,
            "experience_bytes_per_host": self.experience_bytes_per_host,
        }

    def words(self) -> str:
        """One sentence, for the text of a plan."""
        cost = self.cost
        simulated = ""
        if cost.control_steps:
            count = cost.num_rollouts * cost.control_steps
            simulated = f", and whatever {count:,} control steps take in the environment"
        steps = "one optimizer step" if cost.num_steps == 1 else f"{cost.num_steps} optimizer steps"
        return (
            f"an iteration: {cost.num_rollouts} rollouts made in {self.acting_s:.3g} s{simulated}, scored in "
            f"{self.scoring_s:.3g} s, learnt from in {self.learning_s:.3g} s ({steps}); "
            f"{self.experience_bytes_per_host / GIB:.2f} GiB of them in the memory of each host"
        )


def forecast_iteration(cost: RolloutCost, chosen: Forecast) -> Iteration:
    """The iteration of a run whose step is `chosen`, on devices that are in the table.

    All rollouts are as long as is allowed, and no group is made again.
    """
    machine, tensor_devices = chosen.machine, chosen.layout.tensor_devices
    flops = machine.flops(chosen.policy.product_rate)
    rate = machine.num_devices * flops
    acting_s = cost.acting_flops * cost.num_rollouts / rate
    if cost.tokens is not None:
        acting_s += _making_tokens_s(cost.tokens, cost.num_rollouts, machine, flops * tensor_devices, tensor_devices)
    held_at = machine.num_hosts if cost.is_local else 1
    return Iteration(
        cost=cost,
        acting_s=acting_s,
        scoring_s=cost.scoring_flops * cost.num_rollouts / rate,
        learning_s=cost.num_steps * chosen.step_s,
        experience_bytes_per_host=cost.experience_bytes * cost.num_rollouts * cost.most_waves // held_at,
    )


def _making_tokens_s(
    tokens: TokenSteps, num_rollouts: int, machine: Machine, flops: float, tensor_devices: int
) -> float:
    """Seconds for the tokens of all rollouts: each step reads parameters and cache, and computes.

    `flops` are those of a tensor group, per second.
    """
    groups = machine.num_devices // tensor_devices
    rounds = -(-num_rollouts // (groups * tokens.rows))
    reading_s = tokens.bytes_per_step / (machine.kind.memory_gb_s * 1e9 * DECODING_MEMORY_SHARE)
    computing_s = tokens.flops_per_row * tokens.rows / flops
    return rounds * tokens.steps_per_rollout * max(reading_s, computing_s)
