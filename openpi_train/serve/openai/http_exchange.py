"""One HTTP request and its answer: a body of limited size and time, JSON, events as they come.

Read next: `text_server.py`.
"""

import asyncio
import email.utils
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from openpi_train.serve.limits import Limits
from openpi_train.serve.openai.api_error import ApiError
from openpi_train.serve.openai.http_connection import HttpConnection

JSON, _EVENTS = "application/json", "text/event-stream; charset=utf-8"
Headers = Sequence[tuple[bytes, bytes]]
# ASGI's: what a request is, a message, and how messages are received and sent.
Scope = Mapping[str, Any]
Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]


class ClientGone(Exception):
    """The client has left, or does not read or send."""


class HttpExchange:
    """A request with its answer. Args: `scope`, `receive` and `send` are ASGI's."""

    def __init__(self, connection: HttpConnection, scope: Scope, receive: Receive, send: Send, limits: Limits):
        self._connection, self._receive, self._send_event, self._limits = connection, receive, send, limits
        self._headers: Headers = scope["headers"]
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.is_started = False

    def headers(self, name: bytes) -> list[bytes]:
        """All headers of this name, in lower case."""
        return [value for own, value in self._headers if own == name]

    async def body(self) -> bytes:
        """The body. Raises ApiError if it is too large, or ClientGone if it does not come."""
        most = self._limits.max_message_bytes
        if not self._connection.has_length:
            raise ApiError(411, "the request must have the header Content-Length; a body in chunks is not read")
        lengths = self.headers(b"content-length")
        if lengths and int(lengths[0]) > most:  # the parser has checked that it is one number
            raise ApiError(413, f"the body has {int(lengths[0])} bytes; the limit is {most} (--max-message-mib)")
        found = bytearray()
        try:
            async with asyncio.timeout(self._limits.send_s):
                while True:
                    event = await self._receive()
                    if event["type"] != "http.request":
                        raise ClientGone
                    found += event["body"]
                    if not event["more_body"]:
                        return bytes(found)
        except TimeoutError as error:
            raise ClientGone from error

    async def gone(self) -> None:
        """Returns when the client has left; after the body only."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, content: bytes, kind: str, more: Headers = ()) -> None:
        """Answer with this content of a MIME type."""
        await self._start(status, kind, [(b"content-length", str(len(content)).encode()), *more])
        await self._send({"type": "http.response.body", "body": content})
        if self._connection.flow.write_paused:  # the client has its place until it has its answer
            await self._in_time(self._connection.flow.drain())

    async def answer_json(self, status: int, value: object, more: Headers = ()) -> None:
        """Answer with this value."""
        await self.answer(status, to_json(value), JSON, more)

    async def event(self, value: object) -> None:
        """Send a value as the next event of a stream, which begins with the first one. Raises ClientGone."""
        if not self.is_started:
            await self._start(200, _EVENTS, [(b"x-accel-buffering", b"no")])  # nginx would collect them
        await self._send(
            {"type": "http.response.body", "body": b"data: " + to_json(value) + b"\n\n", "more_body": True}
        )

    async def end_events(self, *, is_whole: bool) -> None:
        """End the stream; clients wait for its last word if it is whole."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if is_whole else b""})
        if self._connection.flow.write_paused:
            await self._in_time(self._connection.flow.drain())

    def drop(self) -> None:
        """Close the connection at once."""
        self._connection.transport.abort()

    async def _start(self, status: int, kind: str, more: Headers) -> None:
        self.is_started = True
        headers = [
            (b"content-type", kind.encode()),
            (b"date", email.utils.formatdate(usegmt=True).encode()),
            (b"cache-control", b"no-store"),
            *more,
        ]
        if not self._connection.has_length:  # what follows the headers is not read
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send(self, event: Event) -> None:
        await self._in_time(self._send_event(event))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._limits.send_s):
                await sending
        except TimeoutError as error:  # it does not read
            self.drop()
            raise ClientGone from error


def to_json(value: object) -> bytes:
    """The value as JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
