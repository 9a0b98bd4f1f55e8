"""Nothing waits for the devices unnoticed: inside the loop's steps an implicit transfer is an error.

The host queues step after step; a `float(loss)` between two of them would make it wait for the first. Transfers that
are asked for (`jax.device_get`, `jax.device_put`) stay possible. On CPU devices, whose memory the host reads in place,
jax notices only what goes to them; `tests/training/test_guard.py` counts the reads. Read next: `loop.py`.
"""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def no_implicit_transfers() -> Iterator[None]:
    """In here, moving values between host and devices without saying so raises, with what to do about it."""
    try:
        with jax.transfer_guard("disallow"):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "Disallowed" in str(error):
            error.add_note(
                "A value went between host and devices inside a training step, which makes the loop wait. Keep metrics "
                "on the devices until the log interval (Recorder.add), and compute with arrays that are already there; "
                "what must move goes through jax.device_get or jax.device_put."
            )
        raise
