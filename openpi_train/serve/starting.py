"""What a server says while it loads and compiles: its progress, and 503 for HTTP requests. Read next: `main.py`.

Its port is open from the start, so that no client is refused. A policy server itself accepts websockets, and sends its
metadata when it is ready: openpi's clients wait for that as long as it takes, and for a handshake ten seconds.
"""

import asyncio
import contextlib
import http
import json
import socket
import ssl
import time

RETRY_AFTER_S = 5
_REQUEST_S = 10.0


class StartProgress:
    """What is done, and since when; set from any thread."""

    def __init__(self) -> None:
        self._began_s = self._since_s = time.monotonic()
        self._what = "loading the checkpoint"

    def now(self, what: str) -> None:
        """From now on `what` is done."""
        self._what, self._since_s = what, time.monotonic()

    @property
    def line(self) -> str:
        """One line, for clients and for the log."""
        now = time.monotonic()
        return f"starting: {self._what} since {now - self._since_s:.0f} s ({now - self._began_s:.0f} s in all)"


async def answer_not_ready(
    listener: socket.socket, progress: StartProgress, tls: ssl.SSLContext | None = None
) -> asyncio.Server:
    """Answer each HTTP request to the listening socket with 503 and the progress, until the returned server is closed.

    The socket stays open. The answer has the form of OpenAI's errors, whose clients try again after Retry-After.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        suppressed = contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.closing(writer), suppressed:
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_S)
            writer.write(_not_ready(progress))
            await writer.drain()
            await asyncio.wait_for(_read_all(reader), _REQUEST_S)  # closed before that, the answer might be lost

    return await asyncio.start_server(answer, sock=listener.dup(), ssl=tls)


async def _read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


def _not_ready(progress: StartProgress) -> bytes:
    status = http.HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": progress.line, "type": "server_error", "param": None, "code": "starting"}
    body = json.dumps({"error": error}).encode() + b"\n"
    head = {
        "Content-Type": "application/json",
        "Content-Length": len(body),
        "Retry-After": RETRY_AFTER_S,
        "Cache-Control": "no-store",
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
