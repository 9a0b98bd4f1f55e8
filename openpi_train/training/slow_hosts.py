"""Names processes and devices for which all others wait. Process 0 looks at each log interval.

Read next: `lateness.py`, `device_speed.py`, which measure.
"""

import statistics
from collections.abc import Mapping

from openpi_train.runtime.step_times import StepTimes

_NOTABLE_SHARE = 0.1
_INTERVALS = 3
# What a late host waits for is told if it does so for this much more of the time than the others.
_MORE_STALLED = 0.2
_STALLED_FOR = {"cpu": "a processor", "io": "a disk", "memory": "memory"}


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
                lines.append(f"{who} holds up the others by {how_much}: it {cause}{_stalls(who, before, told)}")
        return lines


class SlowDevices:
    """Compares what the processes have told of the timed products of their devices."""

    def __init__(self):
        self._looks: dict[str, int] = {}
        self._in_a_row: dict[tuple[str, int], int] = {}

    def look(self, told: Mapping[str, StepTimes]) -> list[str]:
        """A line for each device that has been slower by 10 % than the median of the others for three products in a
        row. A look at which a process has told of no new product is none.
        """
        looks = {who: times.products for who, times in told.items()}
        if not all(products > self._looks.get(who, 0) for who, products in looks.items()):
            return []
        self._looks = looks
        seconds = {(who, place): each for who, times in told.items() for place, each in enumerate(times.product_s)}
        lines = []
        for device, own_s in seconds.items() if len(seconds) > 1 else ():
            others_s = statistics.median(each for other, each in seconds.items() if other != device)
            is_slow = own_s > (1 + _NOTABLE_SHARE) * others_s
            self._in_a_row[device] = self._in_a_row.get(device, 0) + 1 if is_slow else 0
            if self._in_a_row[device] == _INTERVALS:
                who, place = device
                more, state = own_s / others_s - 1, told[who].device
                said = f"{who} holds up the others: its device is slower, local device {place}: products take "
                said += f"{more:.0%} longer there than in the median of the others"
                lines.append(f"{said} (the slowest there: {state})" if state else said)
        return lines


def _stalls(who: str, before: Mapping[str, StepTimes], told: Mapping[str, StepTimes]) -> str:
    """What programs on this host wait for, more than on the others."""
    shares = {one: _stalled(before[one], times) for one, times in told.items()}
    words = []
    for resource, name in _STALLED_FOR.items():
        others = [share[resource] for one, share in shares.items() if one != who and resource in share]
        own = shares[who].get(resource, 0.0)
        if others and own - statistics.median(others) > _MORE_STALLED:
            words.append(f"for {name} {own:.0%} of the time (elsewhere {statistics.median(others):.0%})")
    return f"; programs of its host wait {' and '.join(words)}" if words else ""


def _stalled(before: StepTimes, now: StepTimes) -> dict[str, float]:
    """The share of the time in which some program of the host waited, by what for."""
    seconds = now.at_s - before.at_s
    known = now.stalled_s.keys() & before.stalled_s.keys() if seconds > 0 else ()
    return {resource: (now.stalled_s[resource] - before.stalled_s[resource]) / seconds for resource in known}


def _per_step(before: StepTimes, now: StepTimes) -> tuple[float, float]:
    """Seconds per step in which it was late, and in which it waited for data."""
    steps = now.steps - before.steps
    return (now.late_s - before.late_s) / steps, (now.data_s - before.data_s) / steps
