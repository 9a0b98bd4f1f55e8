"""Tells a file whose contents are damaged from a system that failed to read it.

Damage belongs to the dataset: an index keeps it, and `on_bad_record` decides what becomes of it. A failure of the
system (a stale NFS handle, an I/O error, no permission, no file descriptor left, a full disk) may be over a moment
later and says nothing about the contents: whatever is being built ends with an OSError, and nothing of it is kept. All
formats ask here.
"""

import errno
import os
import re
from pathlib import Path

from openpi_train.data.core.source import BadRecord
from openpi_train.runtime.exits import DataError, RunError, kind_for

# FFmpeg and HDF5 give these for contents that make no sense to them.
_OF_CONTENTS = {errno.EINVAL, errno.EDOM, errno.ERANGE, errno.EILSEQ}
# tensorstore's errors are ValueErrors that begin with a status. Those of contents are NOT_FOUND (a missing chunk),
# FAILED_PRECONDITION, INVALID_ARGUMENT, DATA_LOSS, OUT_OF_RANGE and UNIMPLEMENTED (seen with tensorstore 0.1.86).
_STATUS = re.compile(
    "(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|UNAVAILABLE"
    "|UNKNOWN): "
)
# array_record's are RuntimeErrors that quote the call and the system's words.
_CALL = re.compile(r"\b\w+\(\) failed: ([^;]+)")
_CODE = re.compile(r"\[os_error_code='(\d+)'\]")


class ChangedFileError(OSError):
    """Error for a file that is another than when it was indexed."""


def system_errno(error: BaseException) -> int | None:
    """The errno of a failure of the system; None if the error is about contents.

    pyarrow raises OSError for both, with an errno only for the system's; so does pillow, whose UnidentifiedImageError
    and "image file is truncated" have none. PyAV's errors have FFmpeg's own numbers for contents.
    """
    number = getattr(error, "errno", None)
    if isinstance(number, int):
        return number if number in errno.errorcode and number not in _OF_CONTENTS else None
    if call := _CALL.search(str(error)):
        return next((code for code in errno.errorcode if os.strerror(code) == call[1].strip()), errno.EIO)
    if _STATUS.match(str(error)):
        code = _CODE.search(str(error))
        return int(code[1]) if code else errno.EIO
    return None


def raise_if_system(error: BaseException, path: Path) -> None:
    """Raise an OSError that names the file, unless the error is about contents.

    Args: `path` is the file that was being read. An OSError that already names a file is raised as it is.
    """
    number = system_errno(error)
    if number is None:
        return
    if isinstance(error, OSError) and error.filename is not None:
        raise error
    raise OSError(number, os.strerror(number), str(path)) from error


def of_record(error: Exception, where: str) -> RunError:
    """The error for a step that cannot be read: BadRecord, or another if the system failed or the file is another.

    Another row may stand in for a damaged one. A file system that fails would have all rows replaced: it ends the run.
    """
    if isinstance(error, ChangedFileError):
        return DataError(f"{where}: {error}")
    if system_errno(error) is None:
        return BadRecord(f"{where}: {error}")
    told = f"{where}: {error}. This is an error of the system, not damage: resume the run once it is mended"
    return kind_for(error, DataError)(told)
