"""`--num-workers auto`: how many worker processes read, found out from how long the loop waits for them.

Reading begins in threads, which start at once and which decoding hardly hinders; processes come where one interpreter
does not keep up. The number decides nothing but speed: rows are a function of the step. Read next: `feed.py`.
"""

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# Waiting that is not worth a change, as a share of the step, and how long the loop is watched before each one.
_LITTLE_WAIT, _WATCHED_S = 0.03, 10.0
# Workers are meant to be this much faster than the steps, and than what read before.
_MARGIN = 1.2

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


class WorkerTuner:
    """Decides `num_workers`, 0 (threads) at first, up to `most`; from means over at least `_WATCHED_S` of steps."""

    def __init__(self, most: int):
        self._most = most
        self.num_workers = 0
        self._starts = self._said = False
        self._forget()
        logger.info("--num-workers auto: threads read; up to %d processes if the loop waits for data", most)

    def look(self, num_steps: int, step_s: float, wait_s: float, read_s: Callable[[], float]) -> bool:
        """Take note of some steps. Returns whether `num_workers` changed.

        Args:
            num_steps: how many there were since the last call.
            step_s, wait_s: what one took, and how much of that the loop waited for data.
            read_s: measures the CPU seconds that one thread needs for this process's rows of a batch.
        """
        if self._starts:  # the first interval of new processes has their start in it
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
        # So many processes give a batch every read_s / chosen seconds; up to now one came every step_s. Where one would
        # do it is not computing that threads are slow at, but storage.
        if chosen <= max(self.num_workers, 1) or read_s / chosen * _MARGIN > step_s:
            if not self._said:
                logger.info("%s: %d processes (most: %d) would not be faster", seen, wanted, self._most)
            self._said = True
            return False
        logger.info("%s: %d worker processes read from here on (before: %d)", seen, chosen, self.num_workers)
        self.num_workers, self._starts = chosen, True
        return True

    def _forget(self) -> None:
        self._num_steps, self._stepping_s, self._waited_s = 0, 0.0, 0.0


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and its cgroup's limit; at least 1."""
    cores = len(os.sched_getaffinity(0))
    if _CPU_LIMIT.is_file():
        quota, period = _CPU_LIMIT.read_text().split()
        if quota != "max":
            cores = min(cores, round(int(quota) / int(period)))
    return max(cores, 1)
