"""How much this process has held up the training so far, told to process 0 with its status.

Read next: `training/slow_hosts.py`, which compares the processes; `peer.py`, which carries it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Totals of a start: steps, seconds in which the devices waited for this process, and those it waited for data."""

    steps: int = 0
    late_s: float = 0.0
    data_s: float = 0.0


_own = StepTimes()


def note(times: StepTimes) -> None:
    """Record this process's totals."""
    global _own
    _own = times


def own() -> StepTimes:
    """This process's totals."""
    return _own
