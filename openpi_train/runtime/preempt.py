"""Graceful stop: after SIGTERM, SIGUSR1 or SIGHUP on any process, all processes stop at the same step.

jax's preemption service listens for SIGTERM from `session.start` on, also in a run of one process. It must own the
signal: a Python handler for SIGTERM that is installed later switches it off. Read next: `exits.py`, code 75.
"""

import contextlib
import dataclasses
import datetime
import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name yet (jax 0.10 to 0.12)
from jax.experimental import multihost_utils

from openpi_train.runtime import phases
from openpi_train.runtime.exits import Preempted, UsageError

logger = logging.getLogger(__name__)

# Seconds from a request to stop to the kill, set by `launch slurm` and `launch kubernetes`.
GRACE_VARIABLE = "OPENPI_TRAIN_GRACE_S"
# Key under which jax's preemption service stores the time of the first signal, for all processes (jax 0.10 to 0.12).
_NOTICE_KEY = "RECEIVED_PREEMPTION_NOTICE"
# The current step, and one more, at which all agree to stop.
_STEPS_TO_STOP = 2

_points = 0
_stopping = False
_stopped_after_s: float | None = None
_warned = False


class StoppedError(Exception):
    """All processes agreed to stop within an evaluation or a collection of attempts. A resumed run repeats it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopTimes:
    """Seconds from the request to stop until all had stopped, and until everything was saved.

    Measured by the clocks of two processes if another process got the request.
    """

    until_stopped_s: float
    until_saved_s: float

    def words(self) -> str:
        saving_s = self.until_saved_s - self.until_stopped_s
        return (
            f"{self.until_saved_s:.1f} s after the request ({self.until_stopped_s:.1f} s to the end of the step, "
            f"{saving_s:.1f} s to save)"
        )


@contextlib.contextmanager
def stoppable_start() -> Iterator[None]:
    """While the processes meet and jax starts, a signal ends this process at once; afterwards it requests a stop.

    SIGUSR1 is what `sbatch --signal=USR1@120` sends ahead of the time limit.
    """

    def stop(signum: int, frame: object) -> None:
        raise Preempted("asked to stop before the run began: start it again")

    grace_s()  # refuses an invalid value here
    # A closed terminal hangs up; not under `nohup`.
    others = [signal.SIGUSR1, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]
    for signum in (signal.SIGTERM, *others):
        signal.signal(signum, stop)
    yield  # in here jax takes SIGTERM over
    for signum in others:
        signal.signal(signum, lambda signum, frame: os.kill(os.getpid(), signal.SIGTERM))


def stop_requested() -> bool:
    """Whether all processes save and stop here; once true it stays true.

    Every process must make the same calls in the same order: the n-th call has the same answer on all of them. The
    answer changes a call or two after the signal, since the processes first agree on a call that none has made yet.
    """
    global _points, _stopping, _stopped_after_s
    _points += 1
    with phases.point():
        if not _stopping and multihost_utils.reached_preemption_sync_point(_points):
            _stopping, _stopped_after_s = True, _seconds_since_request()
    return _stopping


def note_stopped() -> None:
    """Count the time until here as that to the end of the step: a run of own attempts first ends its iteration."""
    global _stopped_after_s
    _stopped_after_s = _seconds_since_request()


def stop_noticed() -> bool:
    """Whether any process was asked to stop; known at once, without agreement on a step."""
    return bool(_notice())


def stop_times() -> StopTimes | None:
    """How long the stop took until now; None if none was requested. Call it when everything is saved."""
    saved_after_s = _seconds_since_request()
    if _stopped_after_s is None or saved_after_s is None:
        return None
    return StopTimes(until_stopped_s=_stopped_after_s, until_saved_s=saved_after_s)


def grace_s() -> float | None:
    """Seconds from a request to stop to the kill, if a launcher has set it. Raises UsageError for an invalid value."""
    text = os.environ.get(GRACE_VARIABLE)
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"{GRACE_VARIABLE}={text!r} in the environment is not a number of seconds") from None


def note_save(step: int, save_s: float, size_bytes: int) -> None:
    """Log how long a save took, and warn once if a request to stop leaves too little time for one."""
    global _warned
    size = f"{size_bytes / 1e6:,.1f} MB"
    logger.info("checkpoint %d is complete: %s, %.1f s after its save began", step, size, save_s)
    grace, stopping_s = grace_s(), _STEPS_TO_STOP * phases.usual_step_s()
    if grace is not None and stopping_s + save_s > grace and not _warned:
        _warned = True
        logger.warning(
            "a stop on request takes %.0f s here (%.0f s to the end of a step, %.0f s to save), but after %.0f s the "
            "processes are killed, and the steps since the last save lost: raise --stop-before-s (Slurm) or --grace-s "
            "(Kubernetes), which set %s",
            stopping_s + save_s,
            stopping_s,
            save_s,
            grace,
            GRACE_VARIABLE,
        )


def _seconds_since_request() -> float | None:
    notice = _notice()
    try:
        return max(0.0, time.time() - datetime.datetime.fromisoformat(notice).timestamp())
    except ValueError:  # absent, or in another jax's format: no reason to lose a checkpoint
        return None


def _notice() -> str:
    """When the first process was asked to stop, by its clock, as ISO 8601; empty if none was."""
    client: Any = distributed.global_state.client
    if client is None:
        return ""
    try:
        return client.key_value_try_get(_NOTICE_KEY)
    except jax.errors.JaxRuntimeError:  # absent, or the service is gone, which is detected elsewhere
        return ""
