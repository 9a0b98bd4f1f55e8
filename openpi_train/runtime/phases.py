"""The phase of this process, shown in its log lines and reported to the other processes.

Read next: `watchdog.py`, which reports long phases and ends stuck processes.
"""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

# The host runs up to two steps ahead of the devices, so the first step has really ended only now.
_FIRST_STEPS = 3
_USUAL_STEPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """The phase of the main thread, the last optimizer step, and the time of the last progress."""

    name: str
    step: int = 0
    limited: bool = False
    """Made of steps, each of which must end in time; other phases may take as long as they need."""
    abandonable: bool = False
    """Nothing is lost if the run is ended here; a stop need not wait for the next step."""
    since: float = dataclasses.field(default_factory=time.monotonic)


_current = Phase(name="starting")
_on_change: Callable[[], None] | None = None
_step_durations_s: collections.deque[float] = collections.deque(maxlen=32)


def current() -> Phase:
    """The phase that the main thread is in."""
    return _current


@contextlib.contextmanager
def phase(name: str, *, limited: bool = False, abandonable: bool = False) -> Iterator[None]:
    """Set the phase of the main thread within a block, and restore the former one at the end. Also a decorator.

    Phases inside an abandonable phase are abandonable, too.

    After an exception the phase stays, since the process's last messages are about it.
    """
    global _current
    outer = _current
    _current = Phase(name=name, step=outer.step, limited=limited, abandonable=abandonable or outer.abandonable)
    _notify()
    yield
    _current = dataclasses.replace(outer, step=_current.step, since=time.monotonic())
    _notify()


def _notify() -> None:
    if _on_change is not None:
        _on_change()


def tell_changes(on_change: Callable[[], None]) -> None:
    """Register `on_change`, called whenever the name of the phase changes."""
    global _on_change
    _on_change = on_change


def step_done(step: int) -> None:
    """Record that the host has taken an optimizer step; the next one must end in time."""
    _step_durations_s.append(time.monotonic() - _current.since)
    at_step(step)


def at_step(step: int) -> None:
    """Record the step of the process's state, without having taken it."""
    global _current
    _current = dataclasses.replace(_current, step=step, since=time.monotonic())


def limit_s(stuck_s: float) -> float | None:
    """Limit without progress in the current phase, in seconds: `stuck_s`, or ten usual steps; None: unlimited."""
    if not _current.limited or len(_step_durations_s) < _FIRST_STEPS:
        return None
    return max(stuck_s, _USUAL_STEPS * usual_step_s())


def usual_step_s() -> float:
    """The median of the last steps' durations; 0 before the first."""
    return statistics.median(_step_durations_s) if _step_durations_s else 0.0
