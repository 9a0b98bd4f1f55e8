"""The phase of this process, shown in its log lines and reported to the others; how long phases took, and may take.

Every phase has a limit on the time without progress. Progress is a step, a change of phase, and each point that all
processes pass together: an agreement (`agree.py`) or a look for a request to stop (`preempt.py`).
Read next: `watchdog.py`, which reports long phases and ends stuck processes.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from openpi_train.runtime.waiting import Timeouts, duration

logger = logging.getLogger(__name__)

# The host runs up to two steps ahead of the devices, so the first step has really ended only now.
FIRST_STEPS = 3
# A limit is at least so many usual steps, or so many times the longest time that the phase has taken in this run.
_TIMES_THE_USUAL = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """The phase of the main thread, the last optimizer step, and the time of the last progress."""

    name: str
    step: int = 0
    of_steps: bool = False
    """Made of steps, each of which must end in time."""
    abandonable: bool = False
    """Nothing is lost if the run is ended here; a stop need not wait for the next step."""
    least_s: float | None = None
    """Limit on the time without progress; None: the run's for all phases."""
    began: float = dataclasses.field(default_factory=lambda: time.monotonic())
    """When the phase, or the step in it, began."""
    since: float = dataclasses.field(default_factory=lambda: time.monotonic())


_current = Phase(name="starting")
_on_change: Callable[[], None] | None = None
_step_durations_s: collections.deque[float] = collections.deque(maxlen=32)
_points = 0
_longest_s: dict[str, float] = {}
_seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
_counted_until = time.monotonic()
_timeouts: Timeouts | None = None
_shows_limits = False
_shown: dict[str, str] = {}


def current() -> Phase:
    """The phase that the main thread is in."""
    return _current


@contextlib.contextmanager
def phase(
    name: str, *, of_steps: bool = False, abandonable: bool = False, least_s: float | None = None
) -> Iterator[None]:
    """Set the phase of the main thread within a block, and restore the former one at the end. Also a decorator.

    Phases inside an abandonable phase are abandonable, too. `least_s` is the limit of a phase that may take longer
    than others.

    After an exception the phase stays, since the process's last messages are about it.
    """
    outer = _current
    _enter(
        Phase(
            name=name,
            step=outer.step,
            of_steps=of_steps,
            abandonable=abandonable or outer.abandonable,
            least_s=least_s,
        )
    )
    _show_limit()
    yield
    now = time.monotonic()
    _enter(dataclasses.replace(outer, step=_current.step, began=now, since=now))


def _enter(new: Phase) -> None:
    global _current
    _note_time()
    _current = new
    if _on_change is not None:
        _on_change()


def tell_changes(on_change: Callable[[], None]) -> None:
    """Register `on_change`, called whenever the name of the phase changes."""
    global _on_change
    _on_change = on_change


def step_done(step: int) -> None:
    """Record that the host has taken an optimizer step; the next one must end in time."""
    _note_time()
    _step_durations_s.append(time.monotonic() - _current.began)
    at_step(step)
    if len(_step_durations_s) == FIRST_STEPS:
        _show_limit()


def at_step(step: int) -> None:
    """Record the step of the process's state, without having taken it."""
    global _current
    now = time.monotonic()
    _current = dataclasses.replace(_current, step=step, began=now, since=now)


def progress() -> None:
    """Record that the main thread goes on within its phase."""
    global _current
    _note_time()
    _current = dataclasses.replace(_current, since=time.monotonic())


@contextlib.contextmanager
def point() -> Iterator[None]:
    """A point that all processes pass in the same order: to come to it is progress, and so is to leave it."""
    global _points
    _points += 1
    progress()
    yield
    progress()


def points() -> int:
    """How many of these points this process has come to: the fewest has who holds up the others."""
    return _points


def limit_by(timeouts: Timeouts, *, shows: bool) -> None:
    """Limit every phase from now on; with `shows` the log has the limits, and another one where such a phase begins."""
    global _timeouts, _shows_limits
    _timeouts, _shows_limits = timeouts, shows
    if shows:
        words = "time without progress: at most %s in a phase, %s and ten usual steps in a step (--timeouts)"
        logger.info(words, duration(timeouts.phase_s), duration(timeouts.stuck_s))


def limit_s() -> float | None:
    """Limit without progress in the current phase, in seconds; None before `limit_by`.

    Of a step after the first ones `stuck_s` and ten usual steps; else `phase_s`, or ten times the longest time in
    this run that the phase has been without progress.
    """
    if _timeouts is None:
        return None
    if _current.of_steps and len(_step_durations_s) >= FIRST_STEPS:
        return _timeouts.stuck_s + _TIMES_THE_USUAL * usual_step_s()
    return max(_current.least_s or _timeouts.phase_s, learned_s(_kind(_current)))


def has_taken_first_steps() -> bool:
    """Whether this start has shown that its steps can be taken."""
    return len(_step_durations_s) >= FIRST_STEPS


def learned_s(name: str) -> float:
    """The limit of a phase that follows from this run's own times; 0 before the first."""
    return _TIMES_THE_USUAL * _longest_s.get(name, 0.0)


def usual_step_s() -> float:
    """The median of the last steps' durations; 0 before the first."""
    return statistics.median(_step_durations_s) if _step_durations_s else 0.0


def longest_s() -> Mapping[str, float]:
    """The longest time without progress by phase, of this start and of those that `expect` was told of."""
    return dict(_longest_s)


def expect(longest: Mapping[str, float]) -> None:
    """Learn from earlier starts of the run: their `longest_s`."""
    for name, seconds in longest.items():
        _longest_s[name] = max(_longest_s.get(name, 0.0), seconds)


def seconds() -> Mapping[str, float]:
    """Where the time of the main thread has gone since the process began, by phase, without the phases inside."""
    _note_time()
    return dict(_seconds)


def _kind(now: Phase) -> str:
    """A start's first steps are learned from apart: they may compile, and read what is cached later."""
    return f"the first steps of {now.name}" if now.of_steps else now.name


def _note_time() -> None:
    """Count the time until now as the current phase's."""
    global _counted_until
    now = time.monotonic()
    _seconds[_current.name] += now - _counted_until
    _counted_until = now
    if not _current.of_steps or len(_step_durations_s) < FIRST_STEPS:
        expect({_kind(_current): now - _current.since})


def _show_limit() -> None:
    """Log the phase's limit if it is another than all have, and was not logged before."""
    limit = limit_s()
    if limit is None or _timeouts is None or not _shows_limits:
        return
    is_step = _current.of_steps and len(_step_durations_s) >= FIRST_STEPS
    words = duration(limit)
    if words == _shown.get(_current.name, duration(_timeouts.stuck_s if is_step else _timeouts.phase_s)):
        return
    _shown[_current.name] = words
    what = " a step" if is_step else f" for each of the first {FIRST_STEPS} steps" if _current.of_steps else ""
    logger.info("%s (limit %s%s)", _current.name, words, what)


def _age_s() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


_seconds[_current.name] = _age_s()
