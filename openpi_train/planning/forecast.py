"""Forecast of memory and time of a step per strategy and rematerialisation policy, and the recommendation.

Pure arithmetic on the results of `memory.py`, `costs.py` and `links.py`. Read next: `tools/plan.py`, the caller.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from openpi_train.parallel.strategy import Strategy
from openpi_train.planning.costs import RematCost
from openpi_train.planning.links import Flow
from openpi_train.planning.memory import Memory
from openpi_train.planning.rollout_cost import RolloutCost
from openpi_train.runtime.device_kinds import GIB, DeviceKind

# Steps whose times differ by less count as equal, of two policies and of two strategies; then lower memory wins, in
# units of this share of the memory.
_EQUAL, _ALIKE, _UNIT = 0.005, 0.02, 0.01
# Share of the memory that jax may use which a run may plan with: the rest is for the allocator and the collectives.
USABLE = 0.9
# Share of a link's nominal rate that rings reach, and of a memory's rate that kernels do.
LINK_SHARE, MEMORY_SHARE = 0.8, 0.9
# Share of the shorter of products and what is sent beside them that overlaps. Over a network, which may be slow, none
# is counted on.
HIDDEN = 0.75
# Share of the usable memory up to which a step is small.
SMALL = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices to plan for. `available_bytes` is the memory that jax may use on each.

    `network_gb_s`: GB/s out of one host; `efficiency`: share of the peak while they compute.
    """

    kind: DeviceKind
    num_devices: int
    num_hosts: int
    available_bytes: int
    network_gb_s: float = 50.0
    efficiency: float = 0.5

    @property
    def devices_per_host(self) -> int:
        """Every host has as many."""
        return self.num_devices // self.num_hosts

    def flops(self, product_rate: float) -> float:
        """FLOP/s of one device while it computes, in products of this rate, a share of bfloat16's."""
        return product_rate * self.kind.peak_flops * self.efficiency

    @property
    def usable_bytes(self) -> int:
        """The part of it that the run may plan with; the rest is workspace."""
        return int(USABLE * self.available_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """A strategy's cost by the number of micro-batches: `memory` without activations, `flows`, the traffic, and
    `beside`, the part of it that is sent beside products (in bytes of one device: `beside_bytes`).

    `flows` also depends on the bytes that a tensor group sums per row. `uncut_share` of the parameters should be
    sharded but stays whole (`Plan.uncut_share`). `rl` is what own rollouts cost, of a run that makes some.
    """

    strategy: Strategy
    fsdp_devices: int
    tensor_devices: int = 1
    memory: Callable[[int], Memory]
    flows: Callable[[int, float], Sequence[Flow]]
    beside: Callable[[int], Sequence[Flow]] = lambda num_micros: ()
    beside_bytes: Callable[[int], float] = lambda num_micros: 0.0
    uncut_share: float = 0.0
    rl: RolloutCost | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """One strategy with one policy, at the least accumulation with which it fits (or else needs least memory)."""

    layout: LayoutCost
    policy: RematCost
    machine: Machine
    batch_size: int
    grad_accum: int
    rows: int  # on one device at a time
    most_rows: int
    memory: Memory
    flows: Sequence[Flow]
    beside: Sequence[Flow] = ()
    moved_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it fits the usable memory of the device."""
        return self.memory.total <= self.machine.usable_bytes

    @property
    def is_small(self) -> bool:
        """Whether it needs so little of the device that no estimate is off by the rest."""
        return self.memory.total <= SMALL * self.machine.usable_bytes

    @property
    def flops_per_step(self) -> float:
        """Executed by all devices together."""
        return self.policy.flops_per_row * self.batch_size

    @property
    def compute_s(self) -> float:
        """Computing alone."""
        return self.flops_per_step / (self.machine.flops(self.policy.product_rate) * self.machine.num_devices)

    @property
    def moving_s(self) -> float:
        """Writing and reading what is as large as the parameters: state, gradients, copies, and what layers send; and
        writing what the backward pass computes again."""
        return self.moved_bytes / (MEMORY_SHARE * self.machine.kind.memory_gb_s * 1e9)

    @property
    def sending_s(self) -> float:
        """Sending alone."""
        return self._sending_s(self.flows)

    def _sending_s(self, flows: Sequence[Flow]) -> float:
        machine = self.machine
        rates = machine.kind.link_gb_s * LINK_SHARE, machine.network_gb_s * LINK_SHARE
        return sum(flow.seconds(*rates) for flow in flows)

    @property
    def step_s(self) -> float:
        """Step time in which products hide what is sent beside them within hosts; used to compare candidates."""
        hidden_s = HIDDEN * min(self._sending_s([one for one in self.beside if not one.between]), self.compute_s)
        return self.compute_s + self.moving_s + self.sending_s - hidden_s + self.memory.host_link_s

    @property
    def overlapped_s(self) -> float:
        """Step time with full overlap, except for transfers of host memory."""
        return max(self.compute_s + self.moving_s, self.sending_s) + self.memory.host_link_s

    def as_json(self) -> dict[str, Any]:
        """All numbers, bytes and seconds."""
        workspace = self.machine.available_bytes - self.machine.usable_bytes
        return {
            "strategy": self.layout.strategy,
            "fsdp_devices": self.layout.fsdp_devices,
            "tensor_devices": self.layout.tensor_devices,
            "remat": self.policy.remat,
            "grad_accum": self.grad_accum,
            "rows_per_device_at_a_time": self.rows,
            "most_rows_per_device_at_a_time": self.most_rows,
            "fits": self.fits,
            "bytes_per_device": {**self.memory.as_json(), "workspace_kept_free": workspace},
            "flops_per_sample": self.policy.flops_per_row,
            "flops_per_step": self.flops_per_step,
            "sent_within_host_bytes_per_device": sum(flow.within for flow in self.flows),
            "sent_between_hosts_bytes_per_host": sum(flow.between for flow in self.flows),
            **(self._times() if self.machine.kind.is_known else {}),
        }

    def _times(self) -> dict[str, float]:
        return {
            "compute_s": self.compute_s,
            "moving_s": self.moving_s,
            "sending_s": self.sending_s,
            "host_link_s": self.memory.host_link_s,
            "step_s": self.step_s,
            "step_s_if_overlapped": self.overlapped_s,
            "samples_per_s": self.batch_size / self.step_s,
            "samples_per_s_if_overlapped": self.batch_size / self.overlapped_s,
        }

    @property
    def name(self) -> str:
        """Strategy and policy."""
        remat = f", remat {self.policy.remat}" if self.policy.remat else ""
        groups = self.machine.num_devices // self.layout.tensor_devices
        over = f" over {self.layout.fsdp_devices}" if 1 < self.layout.fsdp_devices < groups else ""
        return f"{self.layout.strategy}{over}{remat}"

    def words(self) -> str:
        """Strategy, policy and needs, for a log line."""
        sent = sum(max(flow.within, flow.between) for flow in self.flows)
        needs = f"{self.memory.total / GIB:.1f} GiB, {sent / 1e9:.3g} GB sent"
        needs += f", {self.memory.host / GIB:.1f} GiB in host memory" if self.memory.host else ""
        times = f", {self.step_s:.3g} s per step" if self.machine.kind.is_known else ""
        return f"{self.name}, grad_accum {self.grad_accum} ({needs}{times})"


def forecast(
    machine: Machine, layout: LayoutCost, policy: RematCost, batch_size: int, accumulations: Sequence[int]
) -> Forecast:
    """The forecast with the least of `accumulations` (ascending, each divides the rows of a device) that fits.

    If none fits, that which needs least: summing micro-batches takes memory, too.
    """
    rows = batch_size * layout.tensor_devices // machine.num_devices

    def without_activations(num_micros: int) -> Memory:
        memory = layout.memory(num_micros)
        if memory.experience:  # that is the batch
            return memory
        return dataclasses.replace(memory, batch=int(policy.batch_bytes_per_row * rows))

    def memory(num_micros: int) -> Memory:
        activations = int(policy.activation_bytes_per_row * (rows // num_micros))
        return dataclasses.replace(without_activations(num_micros), activations=activations)

    def most_rows(num_micros: int) -> int:
        memory = without_activations(num_micros)
        if memory.state + memory.step > machine.usable_bytes:
            return 0
        return int((machine.usable_bytes - memory.state - memory.beside) // policy.activation_bytes_per_row)

    fitting = (n for n in accumulations if rows // n <= most_rows(n))
    grad_accum = next(fitting, None) or min(accumulations, key=lambda n: memory(n).total)
    moved = layout.memory(grad_accum).moved(grad_accum) + layout.beside_bytes(grad_accum)
    return Forecast(
        layout=layout,
        policy=policy,
        machine=machine,
        batch_size=batch_size,
        grad_accum=grad_accum,
        rows=rows // grad_accum,
        most_rows=most_rows(grad_accum),
        memory=memory(grad_accum),
        flows=layout.flows(grad_accum, policy.summed_bytes_per_row),
        beside=layout.beside(grad_accum),
        moved_bytes=2 * moved + policy.rewritten_bytes_per_row * rows,
    )


def is_settled(forecasts: Sequence[Forecast]) -> bool:
    """Whether these steps of the policy that recomputes least are so small that no other policy is worth a look."""
    return bool(forecasts) and all(one.is_small for one in forecasts)


def recommend(forecasts: Sequence[Forecast]) -> tuple[Forecast | None, str]:
    """The strategy with the shortest step of those that fit, with the policy that needs least memory; and why.

    A policy may cost `_EQUAL` of the time, a strategy that needs less memory `_ALIKE`. None if nothing fits. Among
    equals the first is taken. Where every step of the policy that recomputes least is small it is that policy.
    """
    fitting = sorted((one for one in forecasts if one.fits), key=lambda one: one.step_s)
    if not fitting:
        least = least_memory(forecasts)
        adapters = "" if least.memory.frozen else ", or train low-rank adapters only"
        why = (
            f"nothing fits: {least.words()} needs least, with {least.rows} row(s) on a device at a time, and "
            f"{least.machine.usable_bytes / GIB:.1f} GiB can be used; take more or larger devices{adapters}"
        )
        memory = least.memory
        if memory.generation > memory.step:
            flags = (
                "--eval.completions-per-device, or none in training: --eval.num-prompts 0"
                if least.layout.rl is None
                else "--rl.completions-per-device"
            )
            why += (
                "; without the texts that are generated between steps it needs "
                f"{(memory.state + memory.step) / GIB:.1f} GiB: generate fewer at a time ({flags})"
            )
        return None, why
    num_fitting = len(fitting)
    if is_settled([one for one in forecasts if one.policy is forecasts[0].policy]):
        fitting = [one for one in fitting if one.policy is forecasts[0].policy]
    shortest = fitting[0]
    alike = [one for one in fitting if one.policy is shortest.policy and one.step_s <= (1 + _ALIKE) * shortest.step_s]
    first = min(alike, key=lambda one: math.ceil(one.memory.total / (_UNIT * one.machine.usable_bytes)))
    equal = [one for one in fitting if one.layout is first.layout and one.step_s <= (1 + _EQUAL) * first.step_s]
    # What is generated between steps takes the same under every policy.
    best = min(equal, key=lambda one: math.ceil(one.memory.step / (_UNIT * one.machine.usable_bytes)))
    why = f"{best.words()}; the shortest step of the {num_fitting} of {len(forecasts)} that fit"
    if best is not shortest:
        share = _EQUAL if best.layout is shortest.layout else _ALIKE
        why += f", to {share:.1%}, with more room than {shortest.words()}"
    shorter = [one for one in forecasts if not one.fits and one.compute_s < best.compute_s]
    policies = dict.fromkeys(str(one.policy.remat) for one in shorter if one.layout is best.layout)
    if policies:
        why += f"; {', '.join(policies)} would recompute less and {'do' if len(policies) > 1 else 'does'} not fit"
    return best, why


def least_memory(forecasts: Sequence[Forecast]) -> Forecast:
    """The forecast that needs the least memory."""
    return min(forecasts, key=lambda one: one.memory.total)


def instead(forecasts: Sequence[Forecast], failed: Forecast, needed_bytes: int) -> Forecast | None:
    """What to take in place of `failed`, whose program needs `needed_bytes` on a device: the shortest step of those
    that then fit, if estimates of the others are off by as much; else what needs least. None if nothing needs less."""
    less = [one for one in forecasts if one.memory.total < failed.memory.total]
    factor = needed_bytes / failed.memory.total
    fitting = [one for one in less if factor * one.memory.total <= failed.machine.usable_bytes]
    if fitting:
        return min(fitting, key=lambda one: one.step_s)
    return least_memory(less) if less else None
