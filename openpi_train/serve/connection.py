"""Limits of a server's connections: their number, and what a client may send besides requests.

A client has its place from its handshake until its connection is closed, so no place is given to two clients.
Read next: `server.py`.
"""

import asyncio
import dataclasses
from typing import Any, Protocol, runtime_checkable

from websockets.asyncio.server import Server, ServerConnection
from websockets.frames import Frame
from websockets.server import ServerProtocol

# Received data is parsed in slices, and frames are counted between slices. The smallest frame has six bytes.
_SLICE_BYTES = 1 << 13
# Maximum frames since the last request; each costs the event loop about ten microseconds.
_MOST_FRAMES = 2_500
_FRAMES_PER_S = 10.0
# Maximum bytes received during a request: enough for pongs, not for further requests.
_MOST_AHEAD_BYTES = 1 << 16


@runtime_checkable
class Opened(Protocol):
    """A connection of any kind."""

    transport: Any


class ConnectionSlots:
    """The connected clients: at most `max_clients`, and at most `max_opening` connections in their handshake."""

    def __init__(self, max_clients: int, max_opening: int):
        self._max_clients, self._max_opening = max_clients, max_opening
        self._clients: set[Opened] = set()
        self._opening: dict[Opened, None] = {}

    @property
    def num_clients(self) -> int:
        """Number of clients that have a place."""
        return len(self._clients)

    def came(self, connection: Opened) -> None:
        """Register a connection. If too many are in their handshake, drop the oldest: real clients are faster."""
        self._opening[connection] = None
        if len(self._opening) > self._max_opening:
            oldest = next(iter(self._opening))
            del self._opening[oldest]
            oldest.transport.abort()

    def take(self, connection: Opened) -> bool:
        """Give a client a place until `left`; returns False if there is none or the client is gone."""
        if len(self._clients) >= self._max_clients or connection not in self._opening:
            return False
        del self._opening[connection]
        self._clients.add(connection)
        return True

    def left(self, connection: Opened) -> None:
        """Unregister a closed connection."""
        self._opening.pop(connection, None)
        self._clients.discard(connection)


class Connection(ServerConnection):
    """One connection. Clients that send many frames without a request are dropped; requests are read one at a time."""

    def __init__(self, protocol: ServerProtocol, server: Server, *, places: ConnectionSlots, **options: Any):
        super().__init__(protocol, server, **options)
        self._places = places
        self._frames, self._since_s = 0, asyncio.get_running_loop().time()
        self._busy, self._ahead_bytes = False, 0

    def begin_request(self) -> None:
        """Mark the start of a request: further requests are not read."""
        self._frames, self._since_s = 0, self.loop.time()
        self._busy, self._ahead_bytes = True, 0

    def end_request(self) -> None:
        """Mark the request as answered: the next one may be read."""
        self._busy = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._places.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.left(self)
        super().connection_lost(exc)

    def process_event(self, event: Any) -> None:
        self._frames += 1
        if isinstance(event, Frame):  # the library keeps a frame until the next one; the kept one has no data
            event, kept = dataclasses.replace(event), event
            kept.data = b""
        super().process_event(event)

    def send_data(self) -> None:
        pieces = self.protocol.writes
        if len(pieces) > 1:  # join thousands of pongs: asyncio would log a warning for each if the client does not read
            self.protocol.writes = [b"".join(pieces), *(end for end in pieces[-1:] if not end)]
        super().send_data()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            super().data_received(data[start : start + _SLICE_BYTES])
            if self._frames > _MOST_FRAMES + _FRAMES_PER_S * (self.loop.time() - self._since_s):
                self.transport.abort()
            if self.transport.is_closing():
                return
        if self._busy:
            self._ahead_bytes += len(data)
            if self._ahead_bytes > _MOST_AHEAD_BYTES:
                self.transport.pause_reading()
