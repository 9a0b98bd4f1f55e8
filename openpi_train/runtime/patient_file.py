"""A file that is only appended to, and that outlives a full disk. Read next: `logs.py`, `../training/metrics.py`.

Whether a run can go on without room on its disk is for its next checkpoint to say, not for a line of its log.
"""

import logging
import threading
from pathlib import Path

logger = logging.getLogger(__name__)


class PatientFile:
    """Appends. What the disk does not take waits in memory, and is written before whatever comes next.

    Any thread may write. After `close`, another write opens the file again. Raises OSError only where it cannot be
    opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self.problem: OSError | None = None
        """Why there is something that could not be written yet; None while there is nothing."""
        self._held = bytearray()
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)

    def write(self, data: str | bytes) -> int:
        """Append, now or as soon as there is room."""
        with self._lock:
            self._held += data.encode() if isinstance(data, str) else data
            before, self.problem = self.problem, self._write_held()
        self._tell_change(before)  # with the lock free: this file may be the very log that this goes to
        return len(data)

    def flush(self) -> None:
        """Try again to write what is held back."""
        if self.problem is not None:
            self.write(b"")

    def close(self) -> bytes:
        """Close the file, after a last attempt; returns what could not be written."""
        self.flush()
        with self._lock:
            left = bytes(self._held)
            self._held.clear()
            self._file.close()
        return left

    def descriptor(self) -> int:
        """For code that writes past Python."""
        return self._file.fileno()

    def _write_held(self) -> OSError | None:
        try:
            if self._file.closed:
                self._file = self.path.open("ab", buffering=0)
            while self._held:
                del self._held[: self._file.write(self._held)]  # a disk that fills up takes a part
        except OSError as error:
            return error
        return None

    def _tell_change(self, before: OSError | None) -> None:
        if self.problem is not None and before is None:
            logger.warning(
                "%s cannot be written (%s): what comes is kept in memory until there is room. Free some space before "
                "the next checkpoint, which ends the run where it finds none",
                self.path,
                self.problem.strerror,
            )
        elif self.problem is None and before is not None:
            logger.info("%s is complete again", self.path)
