"""What a server bounds on its connections: how many there are, and what one may send that is no request.

A client has its place from its handshake until its connection is gone, so that no two are given the same one.
Read next: `server.py`.
"""

import asyncio
import dataclasses
from typing import Any

from websockets.asyncio.server import Server, ServerConnection
from websockets.frames import Frame
from websockets.server import ServerProtocol

# Of what has been read: between two slices the frames are counted. The smallest frame has six bytes.
_SLICE_BYTES = 1 << 13
# Frames since the last request; each costs the event loop some ten microseconds.
_MOST_FRAMES = 2_500
_FRAMES_PER_S = 10.0
# What may come while a request is under way: pongs, not the next requests.
_MOST_AHEAD_BYTES = 1 << 16


class Places:
    """Who is connected: at most `max_clients` clients, and at most `max_opening` whose handshake is not over."""

    def __init__(self, max_clients: int, max_opening: int):
        self._max_clients, self._max_opening = max_clients, max_opening
        self._clients: set[ServerConnection] = set()
        self._opening: dict[ServerConnection, None] = {}

    @property
    def num_clients(self) -> int:
        """Clients that have a place."""
        return len(self._clients)

    def came(self, connection: ServerConnection) -> None:
        """Somebody connected. Of too many without a handshake the oldest goes: whoever means it needs no second."""
        self._opening[connection] = None
        if len(self._opening) > self._max_opening:
            oldest = next(iter(self._opening))
            del self._opening[oldest]
            oldest.transport.abort()

    def take(self, connection: ServerConnection) -> bool:
        """Give a client a place, which it has until `left`; False where there is none, or the client is gone."""
        if len(self._clients) >= self._max_clients or connection not in self._opening:
            return False
        del self._opening[connection]
        self._clients.add(connection)
        return True

    def left(self, connection: ServerConnection) -> None:
        """The connection is gone."""
        self._opening.pop(connection, None)
        self._clients.discard(connection)


class Connection(ServerConnection):
    """One connection. Who sends frame after frame and no request is cut off; the next request waits in the network."""

    def __init__(self, protocol: ServerProtocol, server: Server, *, places: Places, **options: Any):
        super().__init__(protocol, server, **options)
        self._places = places
        self._frames, self._since_s = 0, asyncio.get_running_loop().time()
        self._busy, self._ahead_bytes = False, 0

    def begin_request(self) -> None:
        """A request has come, and is worked on."""
        self._frames, self._since_s = 0, self.loop.time()
        self._busy, self._ahead_bytes = True, 0

    def end_request(self) -> None:
        """It is answered: the next may come."""
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
        if isinstance(event, Frame):  # the library keeps a frame until the next has come: that one has no data
            event, kept = dataclasses.replace(event), event
            kept.data = b""
        super().process_event(event)

    def send_data(self) -> None:
        pieces = self.protocol.writes
        if len(pieces) > 1:  # thousands of pongs, for each of which asyncio would log that nobody takes it
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
