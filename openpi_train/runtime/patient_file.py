"""An append-only file that survives a disk that is full or fails. Read next: `logs.py`, `../training/metrics.py`.

A full disk ends a run only at its next checkpoint, not at a log line.
"""

import contextlib
import io
import logging
import threading
from pathlib import Path

from openpi_train.runtime.system_errors import passes

logger = logging.getLogger(__name__)


class PatientFile:
    """Appends to a file. Data that do not fit the disk wait in memory, and are written before later data.

    Any thread may write. After `close`, another write opens the file again. Raises OSError only if it cannot be
    opened, with an error that will not pass.
    """

    def __init__(self, path: Path):
        self.path = path
        self.problem: OSError | None = None
        """Why some data could not be written yet; None if there are none."""
        self._held = bytearray()
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        try:
            self._open()
        except OSError as error:
            if not passes(error):
                raise
            self.problem = error
            self._tell_change(None)

    def write(self, data: str | bytes) -> int:
        """Append, now or as soon as there is space."""
        with self._lock:
            self._held += data.encode() if isinstance(data, str) else data
            before, self.problem = self.problem, self._write_held()
        self._tell_change(before)  # without the lock: the message may go to this very file
        return len(data)

    def flush(self) -> None:
        """Try again to write pending data."""
        if self.problem is not None:
            self.write(b"")

    def require_written(self) -> None:
        """Return once all is written; raise the OSError that is in the way."""
        self.flush()
        if self.problem is not None:
            raise self.problem

    def close(self) -> bytes:
        """Close the file after a last attempt; returns the data that could not be written."""
        self.flush()
        with self._lock:
            left = bytes(self._held)
            self._held.clear()
            with contextlib.suppress(OSError):  # all that could be written was written without a buffer
                if self._file is not None:
                    self._file.close()
        return left

    def begin_anew_after(self, most_bytes: int) -> None:
        """Keep the file as `<name>.1`, in place of an earlier one, and begin it anew if it is longer than this."""
        with self._lock:
            if self.problem is not None or self._file is None or self._file.closed or self._file.tell() <= most_bytes:
                return
            with contextlib.suppress(OSError):  # it stays one file
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                self._file.close()
                self._open()

    def descriptor(self) -> int:
        """The file descriptor, for code that writes without Python."""
        assert self._file is not None, "it has no problem, so it is open"
        return self._file.fileno()

    def _open(self) -> io.FileIO:
        self._file = self.path.open("ab", buffering=0)
        return self._file

    def _write_held(self) -> OSError | None:
        try:
            file = self._open() if self._file is None or self._file.closed else self._file
            while self._held:
                del self._held[: file.write(self._held)]  # a nearly full disk takes only a part
        except OSError as error:
            return OSError(error.errno, error.strerror, str(self.path))
        return None

    def _tell_change(self, before: OSError | None) -> None:
        if self.problem is not None and before is None:
            logger.warning(
                "%s cannot be written (%s): new lines are kept in memory until it can. Free some space before the next "
                "checkpoint if there is none",
                self.path,
                self.problem.strerror,
            )
        elif self.problem is None and before is not None:
            logger.info("%s is complete again", self.path)
