"""Progress of long work: a log line every few seconds, and threads that stop when one of them fails."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

logger = logging.getLogger(__name__)

_REPORT_S = 5.0
Item = TypeVar("Item")
Result = TypeVar("Result")


class Progress:
    """Counts up to `total`, in `unit`. Thread-safe."""

    def __init__(self, what: str, total: float, unit: str):
        self.what, self.total, self.unit, self.done = what, total, unit, 0.0
        self._start = self._said = time.monotonic()
        self._stopped = False
        self._lock = threading.Lock()

    def add(self, count: float = 1) -> None:
        """Add `count` finished units. Raises InterruptedError in threads that should stop."""
        if self._stopped:
            raise InterruptedError(f"{self.what} was stopped")
        with self._lock:
            self.done += count
            now = time.monotonic()
            if now - self._said < _REPORT_S:
                return
            self._said = now
        rate = self.done / max(now - self._start, 1e-6)
        logger.info(
            "%s: %.0f of %.0f %s, %.3g %s/s, about %.0f s left",
            *(self.what, self.done, self.total, self.unit),
            *(rate, self.unit, (self.total - self.done) / rate if rate else float("inf")),
        )

    def in_threads(self, work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
        """The results of `work` on every item, in order. `work` calls `add`, which stops the others if one fails."""
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stopped = True
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]
