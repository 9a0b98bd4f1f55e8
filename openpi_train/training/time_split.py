"""Splits the loop's time into parts; every second of its thread belongs to one part. Read next: `recorder.py`."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

Part = Literal["data", "acting", "device", "checkpoint", "evaluation"]
# Parts in which no step is taken.
PAUSES: tuple[Part, ...] = ("checkpoint", "evaluation")


class TimeSplit:
    """Seconds by part and interval. Time outside of all parts is the host's own work.

    Intervals follow each other without a gap. `counted` gives the total time so far of parts that others measure, such
    as that in which the loop waited for data.
    """

    def __init__(self, counted: Mapping[Part, Callable[[], float]], clock: Callable[[], float] = time.perf_counter):
        self._counted, self._clock = counted, clock
        self.restart()

    def restart(self) -> None:
        """Begin an interval now, and discard the current one."""
        self._began, self._before = self._clock(), self._totals()
        self._spent: dict[Part, float] = {"device": 0.0, "checkpoint": 0.0, "evaluation": 0.0}

    @contextlib.contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Count the time of the block as `part`. Parts cannot be nested."""
        began = self._clock()
        yield
        self._spent[part] += self._clock() - began

    def stepping_s(self) -> float:
        """Seconds of the interval so far, without pauses."""
        return self._clock() - self._began - self._paused_s

    def lap(self) -> tuple[dict[str, float], float]:
        """End the interval and begin the next. Returns its seconds by part, which add up to the interval; and its
        length without `PAUSES`.
        """
        now, totals = self._clock(), self._totals()
        total, paused = now - self._began, self._paused_s
        parts = {**{part: seconds - self._before[part] for part, seconds in totals.items()}, **self._spent}
        self.restart()
        self._began, self._before = now, totals
        return {**parts, "host": total - sum(parts.values())}, total - paused

    def _totals(self) -> dict[Part, float]:
        return {part: seconds() for part, seconds in self._counted.items()}

    @property
    def _paused_s(self) -> float:
        return sum(self._spent[part] for part in PAUSES)
