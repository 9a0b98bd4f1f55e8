"""Plays the schedule of a compiled GPU program: how long it takes at least, and how long it waits for transfers.

Kernels run one after the other. A transfer runs beside them from the instruction that starts it to the one that ends
it, one transfer at a time; what the kernels wait for at its end is exposed. Read next: `kernels.py`, `../links.py`.
"""

import dataclasses
from collections.abc import Callable

from openpi_train.planning.hlo_text import CALLING, HloInstruction, HloProgram

# Kernel or transfer of a computation -> seconds; None for what is not one.
Seconds = Callable[[str, HloInstruction], float | None]


@dataclasses.dataclass(frozen=True)
class Played:
    """Seconds of a program, and how many of them are spent waiting for transfers."""

    total_s: float = 0.0
    exposed_s: float = 0.0

    def __add__(self, other: "Played") -> "Played":
        return Played(self.total_s + other.total_s, self.exposed_s + other.exposed_s)

    def times(self, number: int) -> "Played":
        """The same so many times."""
        return Played(number * self.total_s, number * self.exposed_s)


def play(program: HloProgram, kernel_s: Seconds, transfer_s: Seconds, name: str | None = None) -> Played:
    """The program (or its computation `name`) from beginning to end.

    A loop's turns are alike, so a transfer does not reach from one into the next; one of unknown length turns once.
    Of a conditional all branches run.
    """
    name = program.entry if name is None else name
    played, link_free, ready = Played(), 0.0, {}
    for instruction in program.computations[name].values():
        transfer = transfer_s(name, instruction)
        if transfer is not None:
            start = max(link_free, played.total_s)
            ready[instruction.name] = link_free = start + transfer
            if not _is_asynchronous(instruction):
                played += _wait(played, link_free)
        elif instruction.opcode.endswith("-done"):
            played += _wait(played, ready.get(instruction.operands[0], 0.0))
        elif instruction.opcode in CALLING:
            for called in instruction.called:
                played += play(program, kernel_s, transfer_s, called).times(instruction.trips or 1)
        else:
            played += Played(kernel_s(name, instruction) or 0.0)
    return played


def _wait(played: Played, until: float) -> Played:
    waited = max(until - played.total_s, 0.0)
    return Played(waited, waited)


def _is_asynchronous(instruction: HloInstruction) -> bool:
    """Whether kernels run beside the transfer that this instruction starts."""
    return instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes
