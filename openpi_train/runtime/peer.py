"""Another process of the run, at the other end of the rendezvous connection. Read next: `watchdog.py`, who listens.

The connection stays open for the life of the run and carries lines of JSON both ways, each an object with one entry:
`status` every two seconds, `farewell` from whoever leaves of its own, `verdict` from process 0 when all must end.
"""

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable

from openpi_train.runtime.lines import read_line, send_line

logger = logging.getLogger(__name__)

_LINE_LIMIT_BYTES = 1 << 20
# Of one write or read; whoever takes no small line for so long has a full buffer and is not reading.
_SLICE_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """What a process is doing: its phase, the last step it took, and how long it got no further (limit None: may)."""

    phase: str
    step: int
    idle_s: float
    limit_s: float | None

    def words(self) -> str:
        return f"{self.phase}, step {self.step}" if self.step else self.phase

    def is_stuck(self) -> bool:
        return self.limit_s is not None and self.idle_s > self.limit_s


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run or a process of it ends: the exit code, and why, for people."""

    code: int
    reason: str


class Peer:
    """What one process knows of another. `listen` keeps it up to date; `on_news` is called when it must not wait."""

    def __init__(self, process_index: int, host: str, connection: socket.socket, received: bytes = b""):
        """`received` has already been read from the connection."""
        self.process_index = process_index
        self.who = f"process {process_index} on {host}"
        self.status: PeerStatus | None = None
        self.farewell: Ending | None = None
        self.farewell_time = 0.0
        self.verdict: Ending | None = None
        self.closed = False
        self.unheard_beats = 0
        """Own beats since anything came: a process that was itself held up accuses nobody."""
        self.on_news: Callable[[], None] = lambda: None
        self._connection, self._received = connection, received
        self._lock = threading.Lock()

    def send(self, kind: str, message: PeerStatus | Ending) -> None:
        """Send one message. A peer that is gone or takes nothing is left to `listen` and to its silence."""
        with self._lock, contextlib.suppress(OSError):
            send_line(self._connection, {kind: dataclasses.asdict(message)})

    def hang_up(self) -> None:
        """Send nothing more. The peer closes the connection when it has heard all, which sets `closed`.

        Whoever ends its process without waiting for that may, with something unread, take back its last words (a TCP
        reset): the peer would believe it was killed.
        """
        with self._lock, contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def listen(self) -> None:
        """Take in what the peer says, until it hangs up or its connection breaks; then close."""
        try:
            self._connection.settimeout(_SLICE_S)
            while True:
                line, self._received = read_line(self._connection, _LINE_LIMIT_BYTES, self._received)
                self._hear(line)
        except (EOFError, OSError):
            pass  # a connection that broke is closed, too
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("%s said something that is no message of ours: %s", self.who, error)
        with contextlib.suppress(OSError):
            self._connection.close()
        self.closed = True
        self.on_news()

    def _hear(self, line: bytes) -> None:
        self.unheard_beats = 0
        for kind, fields in json.loads(line).items():
            if kind == "status":
                self.status = PeerStatus(**fields)
            elif kind == "farewell":
                self.farewell, self.farewell_time = Ending(**fields), time.monotonic()
                self.on_news()
            elif kind == "verdict":
                self.verdict = Ending(**fields)
                self.on_news()
