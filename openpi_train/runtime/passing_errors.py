"""Errors of a file system that pass, such as those of a file server's failover: what is read is read again for minutes.

Read next: `exits.py`; `data/damage.py`, which tells such errors from damaged contents of data.
"""

import errno
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

from openpi_train.runtime.exits import StorageError, causes

logger = logging.getLogger(__name__)

PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "EAGAIN", "EBUSY"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ECONNRESET", "ECONNREFUSED"),
    )
    if hasattr(errno, name)  # EREMOTEIO is Linux's
)
# What passes once somebody has made room.
_FULL = frozenset(getattr(errno, name) for name in ("ENOSPC", "EDQUOT") if hasattr(errno, name))
# tensorstore, which reads and writes arrays, raises a ValueError that ends with this.
_TENSORSTORE = re.compile(r"os_error_code='(\d+)'")
# A failover takes one to five minutes; then a restart, perhaps on another host, is better.
_LIMIT_S = 300.0
_LONGEST_PAUSE_S = 30.0
Result = TypeVar("Result")


def patiently(read: Callable[[], Result], what: str, *, limit_s: float = _LIMIT_S) -> Result:
    """Call `read` again while it raises an error of a file that may pass, after 1 to 30 s, and return its result.

    Args: `what` is for messages: "reading /runs/x/100".

    Raises:
        StorageError: it still does after `limit_s`.
        OSError, ValueError: another one, at once.
    """
    begun, pause_s = time.monotonic(), 1.0
    while True:
        try:
            return read()
        except (OSError, ValueError) as error:
            if _number(error) not in PASSING:
                raise
            if time.monotonic() - begun + pause_s > limit_s:
                raise StorageError(
                    f"{what} failed for {limit_s:.0f} s: {error}. Nothing was changed; look at the file system, and "
                    "start again with --resume"
                ) from error
            logger.warning("%s failed, and is tried again in %.0f s: %s", what, pause_s, error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def is_storage_fault(error: BaseException) -> bool:
    """Whether the error, or one of its causes, is of a file system that fails or is full."""
    return any(_number(cause) in PASSING | _FULL for cause in causes(error))


def _number(error: BaseException) -> int | None:
    """The system's number of an error of a file; None if it is another kind of error."""
    if isinstance(error, OSError):
        return error.errno
    found = _TENSORSTORE.search(str(error)) if isinstance(error, ValueError) else None
    return int(found[1]) if found else None
