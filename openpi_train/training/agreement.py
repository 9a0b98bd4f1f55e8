"""`runtime/agree.py` for code that also serves tools and notebooks, where one process runs and no session was started.

Read next: `checkpoints/store.py`, `rundir.py`, whose processes agree here on what they found on disk.
"""

from typing import Any

import jax

from openpi_train.runtime import agree

# As long as process 0 may take to read a checkpoint of a large model back for its checksums, on a slow file system.
TIMEOUT_S = 1800.0


def gather(name: str, value: Any) -> list[Any]:
    """Every process's `value` (JSON), by process index. Every process must call it, from the main thread."""
    return [value] if jax.process_count() == 1 else agree.gather(name, value, TIMEOUT_S)


def from_process_0(name: str, value: Any) -> Any:
    """Process 0's `value` (JSON), on every process. Every process must call it; returns when process 0 has."""
    return gather(name, value if jax.process_index() == 0 else None)[0]
