"""Names processes for which all others wait. Process 0 looks at each log interval. Read next: `lateness.py`."""

import statistics
from collections.abc import Mapping

from openpi_train.runtime.step_times import StepTimes

_NOTABLE_SHARE = 0.1
_INTERVALS = 3


class SlowHosts:
    """Compares what the processes have told of their steps since the last look."""

    def __init__(self):
        self._before: dict[str, StepTimes] = {}
        self._intervals: dict[str, int] = {}

    def look(self, told: Mapping[str, StepTimes], step_s: float) -> list[str]:
        """A line for each process that has been late by 10 % of a step of `step_s` for three looks in a row.

        Late is who keeps its devices waiting for longer than the median of the others does. A look at which a process
        has told nothing new is none: they tell every two seconds.
        """
        before = self._before
        if before.keys() != told.keys() or len(told) < 2:
            self._before = dict(told)
            return []
        if any(times.steps <= before[who].steps for who, times in told.items()):
            return []
        self._before = dict(told)
        late = {who: _per_step(before[who], times) for who, times in told.items()}
        lines = []
        for who, (late_s, data_s) in late.items():
            others = statistics.median(seconds for other, (seconds, _) in late.items() if other != who)
            excess_s = late_s - others
            is_late = excess_s > _NOTABLE_SHARE * step_s
            self._intervals[who] = self._intervals.get(who, 0) + 1 if is_late else 0
            if self._intervals[who] == _INTERVALS:
                cause = "waits for data" if data_s > excess_s / 2 else "is busy in its own code on the processor"
                how_much = f"{1000 * excess_s:.0f} ms of {1000 * step_s:.0f} ms a step"
                lines.append(f"{who} holds up the others by {how_much}: it {cause}")
        return lines


def _per_step(before: StepTimes, now: StepTimes) -> tuple[float, float]:
    """Seconds per step in which it was late, and in which it waited for data."""
    steps = now.steps - before.steps
    return (now.late_s - before.late_s) / steps, (now.data_s - before.data_s) / steps
