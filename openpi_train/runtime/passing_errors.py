"""Errors of a file system that pass, such as those of a file server's failover: what is read is read again for minutes.

Read next: `system_errors.py`; `data/core/damage.py`, which tells such errors from damaged contents of data.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from openpi_train.runtime.exits import StorageError, causes
from openpi_train.runtime.system_errors import is_exhausted_host, is_lost_permission, is_of_storage, passes

logger = logging.getLogger(__name__)

# A failover takes one to five minutes; then a restart, perhaps on another host, is better.
_LIMIT_S = 300.0
_LONGEST_PAUSE_S = 30.0
Result = TypeVar("Result")


def patiently(act: Callable[[], Result], what: str, *, limit_s: float = _LIMIT_S) -> Result:
    """Call `act` again while it raises an error of a file that may pass, after 1 to 30 s, and return its result.

    Args: `what` is for messages: "reading /runs/x/100".

    Raises:
        StorageError: it still does after `limit_s`.
        Exception: another one, at once.
    """
    begun, pause_s = time.monotonic(), 1.0
    while True:
        try:
            return act()
        except (OSError, ValueError, StorageError) as error:
            if not any(map(passes, causes(error))):
                raise
            if time.monotonic() - begun + pause_s > limit_s:
                raise StorageError(
                    f"{what} failed for {limit_s:.0f} s: {error}. Look at the file system, and start again with "
                    "--resume"
                ) from error
            logger.warning("%s failed, and is tried again in %.0f s: %s", what, pause_s, error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def is_storage_fault(error: BaseException) -> bool:
    """Whether the error, or one of its causes, is of a file system that fails, or is full or read-only."""
    return any(isinstance(cause, StorageError) or is_of_storage(cause) for cause in causes(error))


def is_of_surroundings(error: BaseException) -> bool:
    """Whether a save that fails so is no fault of the run: a file system, or a host without memory or descriptors."""
    return is_storage_fault(error) or any(is_exhausted_host(one) or is_lost_permission(one) for one in causes(error))
