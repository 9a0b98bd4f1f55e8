"""Measures how long the devices had nothing to do because this process came late with the next step.

In synchronous training all processes have the same step time. Those that wait for a late one have queued their next
step by then, so their devices are never idle in this sense: only those of the late process are.
Read next: `slow_hosts.py`.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax


class Lateness:
    """Counts the time from the end of all queued steps to the next one's dispatch. A thread waits for the ends."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.late_s = 0.0
        self._clock = clock
        self._queued = self._ended = self._before_pause = 0
        self._ended_at = 0.0
        self._results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def dispatching(self) -> None:
        """The next step is dispatched now."""
        if self._before_pause < self._queued == self._ended:
            self.late_s += self._clock() - self._ended_at
        self._queued += 1

    def dispatched(self, result: object) -> None:
        """`result` is ready when the step has ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="lateness", daemon=True)
            self._thread.start()
        self._results.put((self._queued, result))

    def pause(self) -> None:
        """What comes until the next step, an evaluation or a save, is no lateness."""
        self._before_pause = self._queued

    def _watch(self) -> None:
        while True:
            number, result = self._results.get()
            with contextlib.suppress(Exception):  # the main thread meets the error, too
                jax.block_until_ready(result)
            del result
            self._end(number)

    def _end(self, number: int) -> None:
        self._ended_at, self._ended = self._clock(), number
