"""What this process is doing, by name: the words in its log lines, and what the others hear of it.

Read next: `watchdog.py`, which says when something takes long and ends what is stuck.
"""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

# The host runs up to two steps ahead of the devices, so only now the first one has really ended.
_FIRST_STEPS = 3
_USUAL_STEPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """What the main thread is doing, after which optimizer step, and since when it got no further."""

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
    """Name what the main thread does in here; the name of before comes back at the end. Also a decorator.

    What lies in an abandonable phase is abandonable, too.

    After an exception the name stays, since the process's last words are about this phase.
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
    """Have `on_change` called whenever the phase has got another name."""
    global _on_change
    _on_change = on_change


def step_done(step: int) -> None:
    """Note that the host has taken an optimizer step; the next one is to end in time."""
    _step_durations_s.append(time.monotonic() - _current.since)
    at_step(step)


def at_step(step: int) -> None:
    """Note the step of the state that the process holds, without having taken it."""
    global _current
    _current = dataclasses.replace(_current, step=step, since=time.monotonic())


def limit_s(stuck_s: float) -> float | None:
    """How long the present phase may get no further, in seconds: `stuck_s`, or ten usual steps; None: for ever."""
    if not _current.limited or len(_step_durations_s) < _FIRST_STEPS:
        return None
    return max(stuck_s, _USUAL_STEPS * usual_step_s())


def usual_step_s() -> float:
    """The median of the last steps' durations; 0 before the first."""
    return statistics.median(_step_durations_s) if _step_durations_s else 0.0
