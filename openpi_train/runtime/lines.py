"""How processes talk beside jax: JSON values over a connection, one a line. Read next: `rendezvous.py`, `peer.py`."""

import json
import socket
from collections.abc import Callable
from typing import Any


def send_line(connection: socket.socket, message: Any) -> None:
    """Send one message. Raises OSError where nobody takes it."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(
    connection: socket.socket, limit_bytes: int, received: bytes = b"", meanwhile: Callable[[int], None] | None = None
) -> tuple[bytes, bytes]:
    """One line, and what came behind it; `received` has already been read.

    Before every read, which ends with the connection's time-out, `meanwhile` gets the number of bytes so far; it may
    raise. Raises ValueError where there are too many, EOFError where the other end closes, OSError where it breaks.
    """
    while b"\n" not in received:
        if meanwhile:
            meanwhile(len(received))
        try:
            part = connection.recv(65536)
        except TimeoutError:
            continue
        received += part
        if not part or len(received) > limit_bytes:
            raise (ValueError if part else EOFError)(f"{len(received)} bytes that are no line")
    line, _, rest = received.partition(b"\n")
    return line, rest
