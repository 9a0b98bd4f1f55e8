"""Messages that no client should send, in a dozen kinds: malformed, too large, cut off. Read next: `serving.py`."""

import contextlib
import itertools
import socket
from collections.abc import Callable

import msgpack
import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from openpi_train.policy import wire

_ARRAY = {b"__ndarray__": True, b"data": bytes(12), b"dtype": "<f4", b"shape": [3]}
_HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
_BIG = 64 << 20


def _frame(size: int, content: bytes = b"") -> bytes:
    """The beginning of a binary message that claims so many bytes."""
    return b"\x82\xff" + size.to_bytes(8, "big") + b"\0\0\0\0" + content


# Whole messages, answered with text.
MESSAGES: dict[str, bytes | str] = {
    "no msgpack": b"\xc1" * 100,
    "text": "hello",
    "a number": msgpack.packb(7) or b"",
    "cut off": wire.encode({"state": np.zeros(7)})[:-9],
    "an object array": msgpack.packb({"state": {**_ARRAY, b"dtype": "|O"}}) or b"",
    "a record array": msgpack.packb({"state": {**_ARRAY, b"dtype": "|V12"}}) or b"",
    "another size than it says": msgpack.packb({"state": {**_ARRAY, b"shape": [2**40]}}) or b"",
    "a list beyond its bytes": b"\xdd\xff\xff\xff\xff",
    "nested 100,000 deep": b"\x91" * 100_000,
    "a megabyte of zeros": bytes(1 << 20),
    "a wrong image": wire.encode({"observation/image_0": np.zeros((2, 3)), "state": np.zeros(7), "prompt": "go"}),
    "an endless prompt": wire.encode({"prompt": "go " * 100_000}),
}
# Bytes on a fresh TCP connection, after which the client is gone.
STREAMS: dict[str, bytes] = {
    "no HTTP": b"\0" * 300,
    "half a handshake": _HANDSHAKE[:40],
    "endless headers": _HANDSHAKE[:-2] + b"X: " + b"a" * 100_000,
    "half a message": _HANDSHAKE + _frame(1 << 20, bytes(1 << 16)),
    "a message beyond the limit": _HANDSHAKE + _frame(_BIG, bytes(1 << 16)),
    "a message of 2**62 bytes": _HANDSHAKE + _frame(2**62),
    "an unmasked frame": _HANDSHAKE + b"\x82\x05hello",
    "an unknown opcode": _HANDSHAKE + b"\x83\x80\0\0\0\0",
}


def attack(port: int, count: int) -> dict[str, int]:
    """Send so many, kind after kind; how many of each. Raises AssertionError where one is not refused."""
    kinds: list[tuple[str, Callable[[int], None]]] = []
    kinds += [(name, lambda port, message=message: _message(port, message)) for name, message in MESSAGES.items()]
    kinds += [(name, lambda port, data=data: _stream(port, data)) for name, data in STREAMS.items()]
    sent: dict[str, int] = dict.fromkeys((name for name, _ in kinds), 0)
    for name, send in itertools.islice(itertools.cycle(kinds), count):
        send(port)
        sent[name] += 1
    return sent


def _message(port: int, message: bytes | str) -> None:
    with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:
        connection.recv(timeout=30)
        with contextlib.suppress(WebSocketException):
            connection.send(message)
            answer = connection.recv(timeout=30)
            assert isinstance(answer, str) and "Traceback" not in answer, answer


def _stream(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client, contextlib.suppress(OSError):
        client.sendall(data)
