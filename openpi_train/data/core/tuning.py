"""`--num-workers auto`: chooses the number of worker processes from how long the loop waits for data.

Reading begins in threads, which start at once and decode mostly outside the GIL; processes are added if one interpreter
cannot keep up. The number affects speed only: rows are a function of the step. Read next: `feed.py`.
"""

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# Wait, as a fraction of the step, that needs no change, and how long the loop is observed before each decision.
_LITTLE_WAIT, _WATCHED_S = 0.03, 10.0
# Workers should be this much faster than the steps, and than the previous readers.
_MARGIN = 1.2

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


class WorkerTuner:
    """Chooses `num_workers` from 0 (threads, at first) to `most`, from means over at least `_WATCHED_S` of steps."""

    def __init__(self, most: int):
        self._most = most
        self.num_workers = 0
        self._starts = self._said = False
        self._forget()
        logger.info("--num-workers auto: reading in threads; up to %d processes if the loop waits for data", most)

    def look(self, num_steps: int, step_s: float, wait_s: float, read_s: Callable[[], float]) -> bool:
        """Record the steps since the last call. Returns whether `num_workers` changed.

        Args:
            num_steps: number of steps since the last call.
            step_s, wait_s: mean duration of a step, and the part of it that the loop waited for data.
            read_s: measures the CPU seconds that one thread needs for this process's rows of a batch.
        """
        if self._starts:  # the first interval of new processes includes their startup
            self._starts = False
            return False
        self._num_steps += num_steps
        self._stepping_s += num_steps * step_s
        self._waited_s += num_steps * wait_s
        if self._stepping_s < _WATCHED_S:
            return False
        step_s, wait_s = self._stepping_s / self._num_steps, self._waited_s / self._num_steps
        self._forget()
        if wait_s <= _LITTLE_WAIT * step_s:
            return False
        return self._choose(step_s, wait_s, read_s())

    def _choose(self, step_s: float, wait_s: float, read_s: float) -> bool:
        wanted = math.ceil(_MARGIN * read_s / max(step_s - wait_s, 1e-3 * step_s))
        chosen = min(wanted, self._most)
        seen = f"the loop waited for data {wait_s / step_s:.0%} of the time; one core reads a batch in {read_s:.2g} s"
        # `chosen` processes give a batch every read_s / chosen seconds; up to now one came every step_s. If a single
        # process would be enough, threads are limited by storage and not by computing.
        if chosen <= max(self.num_workers, 1) or read_s / chosen * _MARGIN > step_s:
            if not self._said:
                logger.info("%s: %d processes (at most %d) would not be faster", seen, wanted, self._most)
            self._said = True
            return False
        logger.info("%s: reading in %d worker processes from now on (before: %d)", seen, chosen, self.num_workers)
        self.num_workers, self._starts = chosen, True
        return True

    def _forget(self) -> None:
        self._num_steps, self._stepping_s, self._waited_s = 0, 0.0, 0.0


def usable_cores() -> int:
    """Number of cores that this process may use, from its affinity and its cgroup's limit; at least 1."""
    cores = len(os.sched_getaffinity(0))
    if _CPU_LIMIT.is_file():
        quota, period = _CPU_LIMIT.read_text().split()
        if quota != "max":
            cores = min(cores, round(int(quota) / int(period)))
    return max(cores, 1)
