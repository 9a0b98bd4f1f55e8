"""Reads byte ranges of a dataset's files through open files that all threads of a process share.

Read next: `rlds/rlds_source.py` and `lerobot/lerobot_source.py`, which know the offsets.
"""

import functools
import os
from pathlib import Path

from openpi_train.data.core.damage import ChangedFileError, system_errno

# Far below the usual limit of 1024 open files: BridgeData alone has that many shards.
_OPEN_FILES = 256


def read_span(path: Path, size: int, mtime_ns: int, offset: int, length: int) -> bytes:
    """Read `length` bytes from `offset` of a file that had this size and time when it was indexed, with one `pread`.

    Raises OSError if the file is missing, cannot be read, has changed since, or ends too early.
    """
    file = open_file(path, size, mtime_ns)  # keep a reference until it is read: the cache may drop it meanwhile
    try:
        data = os.pread(file.descriptor, length, offset)
    except OSError as error:
        if system_errno(error) is None:
            raise
        # A file server that was restarted or failed over gives stale handles: a file opened anew can be read.
        open_file.cache_clear()
        file = open_file(path, size, mtime_ns)
        data = os.pread(file.descriptor, length, offset)
    if len(data) != length:
        raise OSError(f"the file ends {length - len(data)} bytes too early")
    return data


class OpenFile:
    """A file descriptor that closes with its last reference, so that cache eviction cannot close it during a read."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __del__(self, close=os.close):
        close(self.descriptor)


@functools.lru_cache(maxsize=_OPEN_FILES)
def open_file(path: Path, size: int, mtime_ns: int) -> OpenFile:
    """This process's handle of a file. Raises OSError if the file has changed since it was indexed."""
    file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    found = os.fstat(file.descriptor)
    if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
        raise ChangedFileError("the file changed since its index was built; restart the run to have it indexed again")
    return file
