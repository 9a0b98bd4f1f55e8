"""Which errors are of what a run stands on: a file system, the host, the name service. Those of files pass, or last.

Read next: `passing_errors.py`, which waits for them to pass; `exits.py`, which ends a run for a restart.
"""

import errno
import re
import socket

# Such as those of a file server's failover.
PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "EAGAIN", "EBUSY"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ECONNRESET", "ECONNREFUSED"),
        *("ESHUTDOWN", "ENOLCK", "ENODEV", "ENXIO"),  # Lustre evicts a client, NFS has no locks, a disk comes back
    )
    if hasattr(errno, name)  # EREMOTEIO is Linux's
)
# Full, over quota, made read-only because of its errors, or damaged.
_UNTIL_MENDED = frozenset(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS", "EUCLEAN") if hasattr(errno, name)
)
# The host, or the limits of the process, have no memory, threads or descriptors left.
_EXHAUSTED = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_NO_THREAD = "can't start new thread"
# A ticket has expired, or a server was set up anew: what a run could read and write before, it could before.
_NO_PERMISSION = frozenset({errno.EACCES, errno.EPERM})
# Of these alone it is clear without a path that they are of a file: sockets and processes have the others, too.
_OF_FILES = _UNTIL_MENDED | {errno.EIO, errno.ESTALE}
# tensorstore, which reads and writes arrays, raises a ValueError that ends with this.
_TENSORSTORE = re.compile(r"os_error_code='(\d+)'")


def passes(error: BaseException) -> bool:
    """Whether this is an error of a file that may be over a moment later."""
    number = _number(error)
    return number in PASSING and _is_of_file(error, number)


def is_of_storage(error: BaseException) -> bool:
    """Whether this is an error of a file system that fails, or is full or read-only."""
    number = _number(error)
    return number in PASSING | _UNTIL_MENDED and _is_of_file(error, number)


def is_exhausted_host(error: BaseException) -> bool:
    """Whether the host has no memory, threads or descriptors left for what a run has done before."""
    no_thread = isinstance(error, RuntimeError) and _NO_THREAD in str(error)
    return isinstance(error, MemoryError) or no_thread or _number(error) in _EXHAUSTED


def is_lost_permission(error: BaseException) -> bool:
    """Whether a file may not be read or written any more, by a run that has done so before."""
    return _number(error) in _NO_PERMISSION and _is_of_file(error, _number(error))


def is_unknown_host(error: BaseException) -> bool:
    """Whether the name service does not answer now."""
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN


def _is_of_file(error: BaseException, number: int | None) -> bool:
    return number in _OF_FILES or not isinstance(error, OSError) or error.filename is not None


def _number(error: BaseException) -> int | None:
    """The system's number of an error of a file; None if it is another kind of error."""
    if isinstance(error, OSError):
        return error.errno
    found = _TENSORSTORE.search(str(error)) if isinstance(error, ValueError) else None
    return int(found[1]) if found else None
