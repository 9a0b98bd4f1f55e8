"""The number of files and sockets that a process may have open: raised, and refused where it cannot be enough.

Read next: `session.py`, which starts with it.
"""

import logging
import resource
import socket

from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)

# Files of data and checkpoints, the log, the devices, and what libraries open.
_FOR_FILES = 256
# Of each other process, process 0 has a connection of the rendezvous, one that carries what jax says, and both ends of
# the one that carries it on to jax's service.
_PER_PEER = 4
# The system's own default of the most (`fs.nr_open`); some programs that a run starts go through all numbers.
_MOST = 1 << 20


def allow_open_files(process_index: int, process_count: int, *, cpu_collectives: bool = False) -> int:
    """Raise the limit of open files as far as the system allows, and return it.

    Raises UsageError if this process of the run needs more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MOST if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    limit = max(soft, min(hard, _MOST))
    if soft < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        except (OSError, ValueError) as error:  # macOS has another limit below the hard one
            logger.warning("the limit of open files stays at %d, and could not be raised to %d: %s", soft, limit, error)
            limit = soft
    peers = process_count - 1
    sockets = (_PER_PEER * peers if process_index == 0 else 0) + (peers if cpu_collectives else 0)
    needed = _FOR_FILES + sockets
    if peers and limit < needed:
        raise UsageError(
            f"process {process_index} on {socket.gethostname()} may have {limit} files open (ulimit -Hn) and needs "
            f"{needed} in a run of {process_count} processes: {sockets} connections to the others and {_FOR_FILES} "
            "files. Raise the limit there (/etc/security/limits.conf; LimitNOFILE= of a service; --ulimit nofile= of "
            "a container), or start fewer processes, one per host"
        )
    return limit
