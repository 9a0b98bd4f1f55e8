"""A polite stop: SIGTERM or SIGUSR1 on any process becomes one point at which all stop. Read next: `exits.py`, code 75.

jax's preemption service listens for SIGTERM from `session.start` on, also in a run of one process. It must own the
signal: a Python handler for SIGTERM that is installed later switches it off.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name yet (jax 0.10 to 0.12)
from jax.experimental import multihost_utils

from openpi_train.runtime.exits import Preempted

# Under which jax's preemption service notes the first signal, for all processes (jax 0.10 to 0.12).
_NOTICE_KEY = "RECEIVED_PREEMPTION_NOTICE"

_points = 0
_stopping = False


@contextlib.contextmanager
def stoppable_start() -> Iterator[None]:
    """While the processes meet and jax starts, a signal ends this process at once; afterwards it is a request.

    SIGUSR1 is what `sbatch --signal=USR1@120` sends ahead of the time limit.
    """

    def stop(signum: int, frame: object) -> None:
        raise Preempted("asked to stop before the run began: start it again")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    yield  # in here jax takes SIGTERM over
    signal.signal(signal.SIGUSR1, lambda signum, frame: os.kill(os.getpid(), signal.SIGTERM))


def stop_requested() -> bool:
    """Whether all are to save and stop here; once true it stays so.

    Every process must make the same calls in the same order: the n-th call has the same answer on all of them. The
    answer comes a call or two after the signal, since the processes first agree on a call that none of them has made.
    """
    global _points, _stopping
    _points += 1
    _stopping = _stopping or multihost_utils.reached_preemption_sync_point(_points)
    return _stopping


def stop_noticed() -> bool:
    """Whether any process was asked to stop; at once, and without an agreement on when."""
    client: Any = distributed.global_state.client
    if client is None:
        return False
    try:
        client.key_value_try_get(_NOTICE_KEY)
    except jax.errors.JaxRuntimeError:  # not there; or the service is gone, which is not to be found out here
        return False
    return True
