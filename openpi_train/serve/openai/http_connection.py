"""A connection of the HTTP server: its time limits, and what a client may send. Read next: `http_exchange.py`.

uvicorn's protocol reads requests; this adds what it has no options for. A connection without a request is idle: if
too many are, the oldest is dropped. One with a request has a place.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from openpi_train.serve.connection import ConnectionSlots
from openpi_train.serve.limits import Limits

# Received data is parsed in slices: a request that is refused unread ends with its slice.
_SLICE_BYTES = 1 << 14
# After an answer to a request that was not read to its end so many bytes, times the largest body, are thrown away: most
# clients read the answer when they have sent everything.
_MOST_UNREAD = 4

Handle = Callable[["HttpConnection", Any, Any, Any], Awaitable[None]]


class HttpConnection(H11Protocol):
    """One connection. `handle` is called for each request with this connection and ASGI's scope, receive and send."""

    def __init__(self, *, places: ConnectionSlots, limits: Limits, handle: Handle, **options: Any):
        super().__init__(**options)
        self.app: Any = functools.partial(handle, self)
        # Requests of a connection are answered one after the other.
        self.turn = asyncio.Lock()
        self._places, self._limits = places, limits
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun, self._unread_bytes, self._is_deaf = True, 0, False

    @property
    def has_length(self) -> bool:
        """Whether the request says how long its body is; one in chunks does not."""
        return not any(name == b"transfer-encoding" for name, _ in self.headers or ())

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._places.came(self)
        self._allow(self._limits.open_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._places.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._allow(self._limits.open_s)
        if self._is_too_much(len(data)):
            return self.transport.abort()
        for start in range(0, len(data), _SLICE_BYTES):
            if self._is_deaf:
                return
            self._feed(data[start : start + _SLICE_BYTES])
            if self.transport.is_closing():
                return

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:  # it would keep a connection that ended with an error
            self.timeout_keep_alive_task.cancel()
        if self.transport.is_closing():  # what is not sent yet keeps it open
            self._allow(self._limits.send_s)
        elif self.conn.their_state is h11.SEND_BODY:
            self._allow(self._limits.open_s)
        else:
            self._has_begun = False
            self._allow(self._limits.idle_s)

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # an error is under way to a client that does not read
            self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is to be answered."""
        return self.cycle is None or self.cycle.response_complete

    def _feed(self, data: bytes) -> None:
        was_idle = self._is_idle
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # invalid data while an answer is under way
            self.transport.abort()
            return
        if self._is_idle:
            return
        if was_idle:
            self._stop_timer()
            self._unread_bytes = 0
            self._is_deaf = not self.has_length
        if not self.cycle.more_body and self.conn.trailing_data[0]:
            # The next request, before this one is answered: no client of the API sends ahead, and reading stops now,
            # so that it would not be seen when this one leaves.
            self.transport.abort()

    def _is_too_much(self, size: int) -> bool:
        """Whether a client sends more than the rest of a body that was not read."""
        if not self._is_idle or self.conn.their_state is not h11.SEND_BODY:
            return False
        self._unread_bytes += size
        return self._unread_bytes > _MOST_UNREAD * self._limits.max_message_bytes

    def _allow(self, seconds: float) -> None:
        """Drop the connection after this time, unless a request comes."""
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
