"""Messages between processes: JSON values over a connection, one per line. Read next: `rendezvous.py`, `peer.py`."""

import json
import socket
from collections.abc import Callable


def send_line(connection: socket.socket, message: object) -> None:
    """Send one message. Raises OSError if nobody receives it."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(
    connection: socket.socket, limit_bytes: int, received: bytes = b"", meanwhile: Callable[[int], None] | None = None
) -> tuple[bytes, bytes]:
    """Read one line; returns it and the bytes after it. `received` has already been read.

    Before every read, which ends with the connection's time-out, `meanwhile` gets the number of bytes so far; it may
    raise. Raises ValueError if there are too many, EOFError if the other end closes, OSError if the connection breaks.
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
