"""Makes implicit transfers inside the loop's steps an error, so that nothing waits for the devices unnoticed.

The host queues step after step; a `float(loss)` between two of them would make it wait for the first. Explicit
transfers (`jax.device_get`, `jax.device_put`) are allowed. On CPU devices, whose memory the host reads in place,
jax only detects transfers to the devices; `tests/training/test_guard.py` counts the reads. Read next: `loop.py`.
"""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def no_implicit_transfers() -> Iterator[None]:
    """Within the block, an implicit transfer between host and devices raises an error with advice."""
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
