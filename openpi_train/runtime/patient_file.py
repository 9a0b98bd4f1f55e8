"""An append-only file that survives a full disk. Read next: `logs.py`, `../training/metrics.py`.

A full disk ends a run only at its next checkpoint, not at a log line.
"""

import contextlib
import logging
import threading
from pathlib import Path

logger = logging.getLogger(__name__)


class PatientFile:
    """Appends to a file. Data that do not fit the disk wait in memory, and are written before later data.

    Any thread may write. After `close`, another write opens the file again. Raises OSError only if it cannot be
    opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self.problem: OSError | None = None
        """Why some data could not be written yet; None if there are none."""
        self._held = bytearray()
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)

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

    def close(self) -> bytes:
        """Close the file after a last attempt; returns the data that could not be written."""
        self.flush()
        with self._lock:
            left = bytes(self._held)
            self._held.clear()
            self._file.close()
        return left

    def begin_anew_after(self, most_bytes: int) -> None:
        """Keep the file as `<name>.1`, in place of an earlier one, and begin it anew if it is longer than this."""
        with self._lock:
            if self.problem is not None or self._file.closed or self._file.tell() <= most_bytes:
                return
            with contextlib.suppress(OSError):  # it stays one file
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                self._file.close()
                self._file = self.path.open("ab", buffering=0)

    def descriptor(self) -> int:
        """The file descriptor, for code that writes without Python."""
        return self._file.fileno()

    def _write_held(self) -> OSError | None:
        try:
            if self._file.closed:
                self._file = self.path.open("ab", buffering=0)
            while self._held:
                del self._held[: self._file.write(self._held)]  # a nearly full disk takes only a part
        except OSError as error:
            return error
        return None

    def _tell_change(self, before: OSError | None) -> None:
        if self.problem is not None and before is None:
            logger.warning(
                "%s cannot be written (%s): new lines are kept in memory until there is room. Free some space before "
                "the next checkpoint, which ends the run where it finds none",
                self.path,
                self.problem.strerror,
            )
        elif self.problem is None and before is not None:
            logger.info("%s is complete again", self.path)
