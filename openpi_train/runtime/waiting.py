"""Waits that say what they are for: no silent wait anywhere in the runtime. Read next: `rendezvous.py`, `agree.py`."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 10.0


class Wait:
    """A wait with a limit that says every ten seconds what it is for and since when."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.start = self.reported = time.monotonic()

    def is_over(self) -> bool:
        return time.monotonic() - self.start > self.timeout_s

    def report(self, what: Callable[[], str]) -> None:
        now = time.monotonic()
        if now - self.reported >= REPORT_EVERY_S:
            self.reported = now
            logger.info("%s since %.0f s, limit %.0f s", what(), now - self.start, self.timeout_s)

    def remaining_s(self) -> float:
        return max(0.0, self.timeout_s - (time.monotonic() - self.start))
