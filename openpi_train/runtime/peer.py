"""Another process of the run, at the other end of the rendezvous connection. Read next: `watchdog.py`, the listener.

The connection stays open for the life of the run and carries lines of JSON both ways, each an object with one entry:
`status` every two seconds, `farewell` from a process that ends by itself, `verdict` from process 0 when all must end.
"""

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from openpi_train.runtime.lines import read_line, send_line

logger = logging.getLogger(__name__)

_LINE_LIMIT_BYTES = 1 << 20
# Limit of one write or read; a peer that accepts no small line for so long has a full buffer and is not reading.
_SLICE_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """A process's phase, its last step, and how long it has made no progress (limit None: unlimited).

    `points` counts the points that all processes pass in the same order (`phases.point`); `where` is where the
    main thread is in its code, told once it has been idle for long.
    """

    phase: str
    step: int
    idle_s: float
    limit_s: float | None
    points: int = 0
    times: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """`StepTimes` of the process."""
    where: str = ""

    def words(self) -> str:
        return f"{self.phase}, step {self.step}" if self.step else self.phase


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run or a process ends: the exit code and the reason as text."""

    code: int
    reason: str


class Peer:
    """One process's view of another. `listen` keeps it up to date; `on_news` is called for urgent changes."""

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
        """Own heartbeats since the last message: a process that was itself delayed accuses nobody."""
        self.on_news: Callable[[], None] = lambda: None
        self._connection, self._received = connection, received
        self._lock = threading.Lock()

    def send(self, kind: str, message: PeerStatus | Ending) -> None:
        """Send one message. A peer that is gone or not reading is detected by `listen` and by its silence."""
        with self._lock, contextlib.suppress(OSError):
            send_line(self._connection, {kind: dataclasses.asdict(message)})

    def hang_up(self) -> None:
        """Close the sending side. The peer closes the connection when it has read everything, which sets `closed`.

        A process that ends without waiting for this, with unread data, may reset the TCP connection and lose its last
        message: the peer would believe it was killed.
        """
        with self._lock, contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def listen(self) -> None:
        """Read the peer's messages until it hangs up or the connection breaks; then close."""
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
