"""Waits that log what they wait for: the runtime never waits silently. Read next: `rendezvous.py`, `agree.py`."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from openpi_train.fields import at_least

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 10.0
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long the processes of a run wait for each other, in seconds."""

    # For all processes to start and to meet.
    rendezvous_s: float = at_least(1, 300.0)
    # For jax to start on all of them, once they have met.
    handshake_s: float = at_least(1, 60.0)
    # Time until all others have exited with code 70 after a process was lost. Interruptions of up to a third pass.
    lost_s: float = at_least(1, 60.0)
    # Limit of a step, beside ten usual steps: a file server that is replaced by another is away for up to 5 minutes.
    stuck_s: float = at_least(1, 360.0)
    # Limit of any other phase without progress, and of each of a start's first steps; at least ten times the longest
    # that the run has taken for it.
    phase_s: float = at_least(1, 1800.0)
    # For process 0 to open the data (an index of terabytes on a slow disk may take hours).
    data_s: float = at_least(1, 6 * 3600.0)
    # For all processes to reach the end of the run, once the first one has.
    finish_s: float = at_least(1, 300.0)


class Wait:
    """A wait with a limit that logs every ten seconds what it waits for, and since when."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.start = self.reported = time.monotonic()

    def is_over(self) -> bool:
        return time.monotonic() - self.start > self.timeout_s

    def report(self, what: Callable[[], str]) -> None:
        now = time.monotonic()
        if now - self.reported >= REPORT_EVERY_S:
            self.reported = now
            limit = f", limit {self.timeout_s:.0f} s" if math.isfinite(self.timeout_s) else ""
            logger.info("%s since %.0f s%s", what(), now - self.start, limit)

    def until_it_works(self, attempt: Callable[[], Result], what: Callable[[], str], pause_s: float) -> Result:
        """Call `attempt` until it raises no OSError, and return its result; after the time-out the last error is
        raised."""
        while True:
            try:
                return attempt()
            except OSError:
                if self.is_over():
                    raise
            self.report(what)
            time.sleep(pause_s)

    def remaining_s(self) -> float:
        return max(0.0, self.timeout_s - (time.monotonic() - self.start))


def processes(indices: Iterable[int]) -> str:
    """Processes for people: "process 5", "processes 1, 2, 7-1023"."""
    spans: list[list[int]] = []
    for index in sorted(indices):
        if spans and index == spans[-1][-1] + 1:
            spans[-1][1:] = [index]
        else:
            spans.append([index])
    words = ["-".join(map(str, span)) if span[-1] - span[0] > 1 else ", ".join(map(str, span)) for span in spans]
    return f"{'process' if words == words[:1] and words[0].isdigit() else 'processes'} {', '.join(words)}"


def duration(seconds: float) -> str:
    """Seconds for people: `42s`, `3m20s`, `2h05m`, `3d04h`."""
    total = max(round(seconds), 0)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{total % 60:02d}s" if minutes else f"{total}s"
