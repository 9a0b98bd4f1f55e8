"""Splits the loop's time into parts; every second of its thread belongs to one part. Read next: `recorder.py`."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

Part = Literal["data", "device", "checkpoint", "evaluation"]
# Parts in which no step is taken.
PAUSES: tuple[Part, ...] = ("checkpoint", "evaluation")


class TimeSplit:
    """Seconds by part and interval. Time outside of all parts is the host's own work.

    Intervals follow each other without a gap. `data_s()` is the total time that the loop has waited for data so far.
    """

    def __init__(self, data_s: Callable[[], float], clock: Callable[[], float] = time.perf_counter):
        self._data_s, self._clock = data_s, clock
        self.restart()

    def restart(self) -> None:
        """Begin an interval now, and discard the current one."""
        self._began, self._data_before = self._clock(), self._data_s()
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
        now, data_s = self._clock(), self._data_s()
        total, paused = now - self._began, self._paused_s
        parts = {"data": data_s - self._data_before, **self._spent}
        self.restart()
        self._began, self._data_before = now, data_s
        return {**parts, "host": total - sum(parts.values())}, total - paused

    @property
    def _paused_s(self) -> float:
        return sum(self._spent[part] for part in PAUSES)
