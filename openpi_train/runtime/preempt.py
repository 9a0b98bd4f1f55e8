"""A polite stop: SIGTERM on any process becomes one step at which all of them stop. Read next: `exits.py`, code 75.

jax's preemption service listens for SIGTERM from `session.start` on, also in a run of one process. It must own the
signal: a Python handler for SIGTERM that is installed later switches it off.
"""

from jax.experimental import multihost_utils


def stop_requested(step: int) -> bool:
    """Whether to save and stop at `step`; true at the same step on every process.

    Every process must call it at every step, from the same first step on. The answer comes a step or two after the
    signal, since the processes first agree on a step that none of them has passed.
    """
    return multihost_utils.reached_preemption_sync_point(step)
