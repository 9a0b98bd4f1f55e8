"""What traced steps spent in communication, read from the profiler's trace. Read next: `profiler.py`."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from openpi_train.planning.hlo_text import CALLING, HloInstruction, HloProgram, read_hlo
from openpi_train.planning.traffic import collective_kind

_HOST_PLANE, _DEVICE_PLANE = "/host:CPU", re.compile(r"/device:\w+:\d+$")
# Lines of a device's plane with what ran: a GPU's streams, a TPU's instructions. Others, and a GPU's lines of
# instructions, sum these up.
_STREAM, _INSTRUCTIONS = "Stream", ("XLA Ops", "Async XLA Ops")
_INSTRUCTION_NAME = re.compile(r"%?([\w.\-]+)")

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedSteps:
    """Seconds per step, as means over the devices that were traced.

    Attributes:
        step_s: from the first instruction to the last one.
        kinds: in each kind of collective. A device that waits in one for others is counted.
        communication_s: in any of them.
        exposed_s: the part of it in which the device ran nothing else.
    """

    step_s: float
    kinds: Mapping[str, float]
    communication_s: float
    exposed_s: float

    def metrics(self) -> dict[str, float]:
        """By their names in `metrics.jsonl`."""
        return {
            "time/traced_step_s": self.step_s,
            "time/communication_s": self.communication_s,
            "time/communication_exposed_s": self.exposed_s,
        }

    def line(self) -> str:
        """For the log."""
        if not self.kinds:
            return f"the traced steps took {1e3 * self.step_s:.1f} ms each on a device, without communication"
        kinds = ", ".join(f"{kind} {1e3 * seconds:.1f}" for kind, seconds in sorted(self.kinds.items()))
        return (
            f"the traced steps took {1e3 * self.step_s:.1f} ms each on a device: {1e3 * self.communication_s:.1f} ms "
            f"of communication, {1e3 * self.exposed_s:.1f} of them without computing ({kinds})"
        )


def instruction_roles(hlo: str) -> dict[str, str | None]:
    """By instruction of a compiled program's text: a collective's kind, and None for one that only runs others.

    What is not in it computes.
    """
    program = read_hlo(hlo)
    found = ((one.name, _role(program, one)) for body in program.computations.values() for one in body.values())
    return {name: role or None for name, role in found if role is not None}


def _role(program: HloProgram, instruction: HloInstruction) -> str | None:
    """A collective's kind, empty for an instruction that only runs others, None for one that computes."""
    whole = dataclasses.replace(instruction, opcode=instruction.opcode.removesuffix("-done"))
    if kind := collective_kind(whole):
        return kind
    if instruction.opcode not in CALLING:
        return None
    started = (one for name in instruction.called for one in program.computations.get(name, {}).values())
    kinds = [kind for one in started if (kind := collective_kind(one))]
    return kinds[0] if kinds and instruction.opcode == "async-start" else ""


def read_trace(file: Path, roles: Mapping[str, str | None], num_steps: int) -> TracedSteps | None:
    """Read what `num_steps` steps spent; None if the trace holds no instruction of a device.

    Args:
        file: an `.xplane.pb`.
        roles: from `instruction_roles` of the step's program.
    """
    return traced_steps(jax.profiler.ProfileData.from_file(str(file)).planes, roles, num_steps)


def traced_steps(planes: Iterable[object], roles: Mapping[str, str | None], num_steps: int) -> TracedSteps | None:
    """`read_trace` of a trace's planes."""
    computing: dict[Any, list[Span]] = collections.defaultdict(list)
    communicating: dict[Any, dict[str, list[Span]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for device, name, span in _ran(planes):
        role = roles.get(name, "")
        if role:
            communicating[device][role].append(span)
        elif role is not None:
            computing[device].append(span)
    devices = {*computing, *communicating}
    if not devices:
        return None
    kinds: collections.Counter[str] = collections.Counter()
    whole = either = alone = 0.0
    for device in devices:
        sent = [span for spans in communicating[device].values() for span in spans]
        ran = [*sent, *computing[device]]
        whole += max(end for _, end in ran) - min(start for start, _ in ran)
        either += covered(sent)
        alone += covered(ran) - covered(computing[device])
        kinds.update({kind: covered(spans) for kind, spans in communicating[device].items()})
    scale = 1e-9 / (num_steps * len(devices))
    return TracedSteps(
        step_s=whole * scale,
        kinds={kind: length * scale for kind, length in kinds.items()},
        communication_s=either * scale,
        exposed_s=alone * scale,
    )


def covered(spans: Iterable[Span]) -> float:
    """The length that intervals cover together."""
    ordered = np.array(sorted(spans), dtype=np.float64).reshape(-1, 2)
    before = np.maximum.accumulate(np.concatenate([[-np.inf], ordered[:-1, 1]])) if len(ordered) else np.zeros(0)
    return float(np.maximum(ordered[:, 1] - np.maximum(ordered[:, 0], before), 0.0).sum())


def _ran(planes: Iterable[Any]) -> Iterator[tuple[Any, str, Span]]:
    """The device, the instruction and the nanoseconds of everything that ran on devices."""
    for plane in planes:
        on_device = bool(_DEVICE_PLANE.match(plane.name))
        if not on_device and plane.name != _HOST_PLANE:
            continue
        lines = list(plane.lines)
        if on_device:
            streams = [line for line in lines if line.name.startswith(_STREAM)]
            lines = streams or [line for line in lines if line.name in _INSTRUCTIONS]
        for line in lines:
            for event in line.events:
                facts = dict(event.stats)
                if on_device or "hlo_op" in facts:
                    device = plane.name if on_device else facts.get("device_ordinal", 0)
                    named = _INSTRUCTION_NAME.match(str(facts.get("hlo_op") or event.name))
                    yield device, named[1] if named else "", (event.start_ns, event.start_ns + event.duration_ns)
