"""Hostile messages of two dozen kinds: malformed, too large, truncated, endless. Read next: `serving.py`.

`attack` sends thousands of small ones; `LARGE` are as large as a server accepts, each made as expensive as possible.
"""

import contextlib
import dataclasses
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from openpi_train.policy import wire

_ARRAY = {b"__ndarray__": True, b"data": bytes(12), b"dtype": "<f4", b"shape": [3]}
_HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
_BIG = 64 << 20
# A little less than `--max-message-mib` allows.
_LARGE = 63 << 19


def _frame(size: int, content: bytes = b"") -> bytes:
    """The beginning of a binary message that claims `size` bytes."""
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
    "more values than are read": b"\xdd\x00\x01\x00\x00" + b"\x90" * (1 << 16),
    "a key that is a list": b"\x81\x90\x00",
    "a picture of one row": wire.encode({"observation/image_0": np.zeros((1, 100_000, 3), np.uint8)}),
}
# Bytes on a new TCP connection, after which the client disconnects.
STREAMS: dict[str, bytes] = {
    "no HTTP": b"\0" * 300,
    "half a handshake": _HANDSHAKE[:40],
    "endless headers": _HANDSHAKE[:-2] + b"X: " + b"a" * 100_000,
    "half a message": _HANDSHAKE + _frame(1 << 20, bytes(1 << 16)),
    "a message beyond the limit": _HANDSHAKE + _frame(_BIG, bytes(1 << 16)),
    "a message of 2**62 bytes": _HANDSHAKE + _frame(2**62),
    "an unmasked frame": _HANDSHAKE + b"\x82\x05hello",
    "an unknown opcode": _HANDSHAKE + b"\x83\x80\0\0\0\0",
    "a web page": _HANDSHAKE[:-2] + b"Origin: http://evil.example\r\n\r\n",
    "a flood of pings": _HANDSHAKE + b"\x89\x80\0\0\0\0" * 50_000,
    "a flood of parts": _HANDSHAKE + b"\x02\x80\0\0\0\0" + b"\x00\x80\0\0\0\0" * 50_000,
    "a flood of messages": _HANDSHAKE + b"\x82\x81\0\0\0\0\xc0" * 50_000,
}


def attack(port: int, count: int) -> dict[str, int]:
    """Send `count` messages, kind after kind; returns the number of each. Raises AssertionError if one is not
    refused."""
    kinds: list[tuple[str, Callable[[int], None]]] = []
    kinds += [(name, lambda port, message=message: _message(port, message)) for name, message in MESSAGES.items()]
    kinds += [(name, lambda port, data=data: _stream(port, data)) for name, data in STREAMS.items()]
    sent: dict[str, int] = dict.fromkeys((name for name, _ in kinds), 0)
    for name, send in itertools.islice(itertools.cycle(kinds), count):
        send(port)
        sent[name] += 1
    return sent


def _client(port: int) -> ClientConnection:
    """Connect once a slot is free: clients that just disconnected may still occupy theirs."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None)
        except InvalidStatus as error:
            if error.response.status_code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _message(port: int, message: bytes | str) -> None:
    with _client(port) as connection:
        connection.recv(timeout=30)
        with contextlib.suppress(WebSocketException):
            connection.send(message)
            answer = connection.recv(timeout=30)
            assert isinstance(answer, str) and "Traceback" not in answer, answer


def _stream(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client, contextlib.suppress(OSError):
        client.sendall(data)


def _repeated(head: int, each: bytes) -> bytes:
    """A list or map (its first byte is `head`) with as many copies of the value as fit."""
    count = _LARGE // len(each)
    return bytes([head]) + count.to_bytes(4, "big") + each * count


def _keys() -> bytes:
    """A map of 5.5 million keys, all different."""
    count = _LARGE // 6
    keys = np.zeros((count, 6), np.uint8)
    keys[:, 0] = 0xA4
    for place in range(4):
        keys[:, 1 + place] = 0x21 + np.arange(count) // 90**place % 90
    return b"\xdf" + count.to_bytes(4, "big") + keys.tobytes()


def _picture(*shape: int, dtype: str = "uint8") -> Callable[[dict[str, Any]], bytes]:
    """An observation with one such picture, otherwise as the policy expects it."""
    return _instead(np.zeros(shape, dtype))


def _instead(picture: Any) -> Callable[[dict[str, Any]], bytes]:
    """An observation with this value in place of a picture."""

    def made(spec: dict[str, Any]) -> bytes:
        wanted: dict[str, Any] = {
            key: "go" if one["dtype"] == "str" else np.zeros(one["shape"], one["dtype"]) for key, one in spec.items()
        }
        first = next(key for key, one in spec.items() if one["dtype"] == "uint8")
        return wire.encode({**wanted, first: picture})

    return made


# Made from the server's description of its observations.
LARGE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "a map of 5.5 million keys": lambda spec: _keys(),
    "8 million maps": lambda spec: _repeated(0xDD, b"\x81\xa1a\x00"),
    "33 million lists": lambda spec: _repeated(0xDD, b"\x90"),
    "maps of lists of maps": lambda spec: _repeated(0xDF, b"\xa1a\x91\x81\xa1a\x90"),
    "33 million levels": lambda spec: b"\x91" * _LARGE,
    "text of wide letters": lambda spec: b"\xdb" + _LARGE.to_bytes(4, "big") + "\U0001f600".encode() * (_LARGE // 4),
    "bytes as a key": lambda spec: b"\x81\xc6" + _LARGE.to_bytes(4, "big") + bytes(_LARGE) + b"\x00",
    "plain bytes": lambda spec: wire.encode({"more": bytes(_LARGE)}),
    "a picture of 11 million by 1": _picture(11_000_000, 1, 3),
    "a picture of 4,000 by 2,700": _picture(4_000, 2_700, 3),
    "the same, channels first": _picture(3, 4_000, 2_700),
    "a picture of fractions": _picture(1_600, 1_600, 3, dtype="float32"),
    "a list of texts, one of them long": _instead(["a"] * 9_000 + ["x" * 240_000]),
    "a list of arrays, one of them wide": _instead([np.zeros(300_000, np.uint8)] * 100 + [np.zeros(300_000)]),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answer:
    """The size of the message, the time of its answer, and whether it was refused."""

    size_mb: float
    seconds: float
    refused: bool


def send_large(port: int, make: Callable[[dict[str, Any]], bytes], before: Callable[[], None], times: int) -> Answer:
    """Send it `times` times, masked with zeros to save CPU time here; `before` is called before the first."""
    with _client(port) as connection:
        message = make(wire.decode(connection.recv(timeout=30, decode=False))["observation"])
        head, answer = _frame(len(message)), b""
        before()
        started = time.perf_counter()
        for _ in range(times):
            connection.socket.sendall(head)
            connection.socket.sendall(message)
            answer = connection.recv(timeout=120)
        seconds = (time.perf_counter() - started) / times
    return Answer(len(message) / 1e6, seconds, isinstance(answer, str))
