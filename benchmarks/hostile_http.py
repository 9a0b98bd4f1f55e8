"""Hostile requests to a text server: malformed, too large, cut off, slow, of wrong types.

`kinds` has several hundred, by name; `attack` sends them in turn. Each must be refused with OpenAI's error, or end its
connection alone. Read next: `serving_texts.py`.
"""

import contextlib
import dataclasses
import itertools
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_MIB = 1 << 20
# How long an answer may take.
_ANSWER_S = 30.0


@dataclasses.dataclass(frozen=True)
class Hostile:
    """Bytes on a new connection.

    `statuses` are those with which it may be answered; None: it may be, or the connection is closed. `then` is what
    the client does after sending: it reads the answer, leaves at once, leaves with a reset, or sends byte by byte.
    """

    data: bytes
    statuses: Sequence[int] | None = (400,)
    then: str = "read"


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A request with this body."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def kinds(model: str) -> dict[str, Hostile]:
    """All kinds by name, for a server of the model of this name."""
    found: dict[str, Hostile] = {}
    for path, good in _good(model).items():
        word = path.rsplit("/", 1)[-1] if path == COMPLETIONS else "chat"
        found |= {f"{word}: {name}": one for name, one in _bodies(path, good)}
        found |= {f"{word}: {name}": one for name, one in _values(path, good)}
        found |= {f"{word}: {name}": one for name, one in _bytes(path, good)}
    found |= dict(_http(model))
    return found


def _good(model: str) -> dict[str, dict[str, Any]]:
    return {
        COMPLETIONS: {"model": model, "prompt": "go on", "max_tokens": 4},
        CHAT: {"model": model, "messages": [{"role": "user", "content": "go on"}], "max_tokens": 4},
    }


# Values of every type but the right one, and out of every range.
_WRONG: dict[str, Any] = {
    "a text": "x",
    "a long text": "9" * 5_000,
    "a list": [1],
    "an object": {"a": 1},
    "true": True,
    "a negative": -3,
    "a fraction": 0.5,
    "a huge integer": 10**400,
    "a huge float": 1e308,
    "half of a pair": "\ud800",
    "nulls in a list": [None, None],
    "deep lists": [[[[[[1]]]]]],
}
_ALLOWED = {
    ("model", "a text"), ("prompt", "a text"), ("stop", "a text"), ("echo", "null"), ("prompt", "a list"),
    ("temperature", "a fraction"), ("top_p", "a fraction"), ("min_p", "a fraction"), ("stream", "true"),
    ("seed", "a negative"), ("logprobs", "true"), ("chat_template_kwargs", "an object"),
}  # fmt: skip
_FIELDS = (
    *("model", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream", "logprobs"),
    *("stream_options", "logit_bias", "presence_penalty", "frequency_penalty", "chat_template_kwargs", "no_such_field"),
)


def _values(path: str, good: dict[str, Any]) -> Iterator[tuple[str, Hostile]]:
    """The request with one value that is wrong."""
    content = "prompt" if path == COMPLETIONS else "messages"
    for field, (name, value) in itertools.product((content, *_FIELDS), _WRONG.items()):
        statuses = (200, 400, 404) if (field, name) in _ALLOWED or field == "model" else (400,)
        yield f"{field} is {name}", Hostile(post(path, json.dumps({**good, field: value}).encode()), statuses)
    if path == CHAT:
        for part, (name, value) in itertools.product(("role", "content", "name", "tool_calls"), _WRONG.items()):
            message = {"role": "user", "content": "x", part: value}
            body = json.dumps({**good, "messages": [message]}).encode()
            is_text = part in ("content", "name") and name in ("a text", "a long text")
            yield f"{part} is {name}", Hostile(post(path, body), (200, 400) if is_text else (400,))


def _bodies(path: str, good: dict[str, Any]) -> Iterator[tuple[str, Hostile]]:
    """Bodies that are not the JSON of a request."""
    whole = json.dumps(good).encode()
    bad = {
        "nothing": b"",
        "not JSON": b"hello",
        "cut off": whole[:-9],
        "two objects": whole + whole,
        "a list": b"[1, 2]",
        "a number": b"7",
        "null": b"null",
        "NaN": whole[:-1] + b', "temperature": NaN}',
        "infinity": whole[:-1] + b', "temperature": -Infinity}',
        "a float without end": whole[:-1] + b', "temperature": 1e999}',
        "digits": whole[:-1] + b', "seed": ' + b"9" * 100_000 + b"}",
        "control characters": whole.replace(b"go on", b"go\x00on"),
        "no UTF-8": whole.replace(b"go on", b"\xff\xfe\x80"),
        "UTF-16": json.dumps(good).encode("utf-16"),
        "UTF-32": json.dumps(good).encode("utf-32"),
        "half of a pair": whole.replace(b"go on", b"\\udc00"),
        "lists 1,000 deep": b"[" * 1_000 + b"]" * 1_000,
        "lists 100,000 deep": b"[" * 100_000,
        "objects 100,000 deep": b'{"a":' * 100_000,
        "100,000 lists": whole[:-1] + b', "metadata": [' + b"[]," * 100_000 + b"[]]}",
        "100,000 objects": whole[:-1] + b', "metadata": [' + b"{}," * 100_000 + b"{}]}",
        "300,000 keys": whole[:-1] + b"".join(b', "k%d": 1' % number for number in range(300_000)) + b"}",
        "a million texts": whole[:-1] + b', "metadata": [' + b'"",' * 1_000_000 + b'""]}',
        "two million numbers": whole[:-1] + b', "metadata": [' + b"1," * 2_000_000 + b"1]}",
        "an open text": b'{"a": "' + b"x" * 100_000,
        "quotes": b'"' * 100_000,
        "backslashes": b'{"a": "' + b"\\" * 100_001,
        "escaped quotes": b'{"a": "' + b'\\"' * 100_000,
        "a megabyte of zeros": bytes(_MIB),
        "a megabyte of spaces": b" " * _MIB,
        "a megabyte of prompt": whole.replace(b"go on", b"x" * _MIB),
        "a prompt of wide letters": whole.replace(b"go on", "\U0001f600".encode() * 100_000),
    }
    for name, body in bad.items():
        yield name, Hostile(post(path, body))
    for field in good:
        if field != "max_tokens":
            less = {name: value for name, value in good.items() if name != field}
            yield f"without {field}", Hostile(post(path, json.dumps(less).encode()))


def _bytes(path: str, good: dict[str, Any]) -> Iterator[tuple[str, Hostile]]:
    """Whole requests that are sent or read in a hostile way."""
    whole, long = json.dumps(good).encode(), json.dumps({**good, "max_tokens": 100, "stream": True}).encode()
    half = post(path, whole[: len(whole) // 2], length=len(whole))
    yield "half a body, then gone", Hostile(half, None, "leave")
    yield "half a body, then a reset", Hostile(half, None, "reset")
    yield "whole, then gone", Hostile(post(path, whole), None, "leave")
    yield "whole, then a reset", Hostile(post(path, whole), None, "reset")
    yield "a stream, then gone", Hostile(post(path, long), None, "leave")
    yield "a stream, then a reset", Hostile(post(path, long), None, "reset")
    yield "a stream that is read a little", Hostile(post(path, long), None, "peek")
    yield "the next request ahead", Hostile(post(path, whole) * 3, None)
    yield "a thousand requests ahead", Hostile(post(path, whole) * 1_000, None, "leave")
    yield "byte by byte", Hostile(post(path, whole), (200,), "slow")
    yield "in chunks", Hostile(_chunked(path, whole, 7), (411,))
    yield "in chunks of a byte", Hostile(_chunked(path, b" " * 50_000 + whole, 1), (411,))
    yield "chunks without end", Hostile(_chunked(path, whole, 7)[:-5] + b"1\r\nx\r\n" * 50_000, None, "leave")
    yield "two lengths", Hostile(post(path, whole, f"Content-Length: {len(whole) + 1}"), None)
    yield "a length and chunks", Hostile(post(path, whole, "Transfer-Encoding: chunked"), None)
    yield "a negative length", Hostile(post(path, whole, length=-5), None)
    yield "a length of 2**62", Hostile(post(path, whole, length=2**62), (413,))
    yield "a length of 10,000 digits", Hostile(post(path, whole, length=10**3_000), None)
    yield "a gigabyte announced", Hostile(post(path, bytes(_MIB), length=1 << 30), (413,))
    yield "continue", Hostile(post(path, whole, "Expect: 100-continue"), (100, 200))
    yield "another method", Hostile(post(path, whole).replace(b"POST", b"PUT", 1), (405,))
    yield "a method of its own", Hostile(post(path, whole).replace(b"POST", b"BREW", 1), (405,))
    yield "from a page", Hostile(post(path, whole, "Origin: http://evil.example"), (403,))
    for seed in range(20):
        yield f"garbled {seed}", Hostile(post(path, _garbled(whole, seed)), (200, 400, 404))


def _http(model: str) -> Iterator[tuple[str, Hostile]]:
    """What is not a request for a completion at all."""
    get = "GET {} HTTP/1.1\r\nHost: x\r\n\r\n"
    for path in ("/", "/v1", "/v1/", "/v2/completions", "/v1/completions/", "/v1/chat", "//v1/models", "/%2e%2e/etc"):
        yield f"path {path}", Hostile(get.format(path).encode(), (404,))
    yield "a path of 10,000 letters", Hostile(get.format("/v1/" + "x" * 10_000).encode(), (404,))
    yield "a path of 100,000 letters", Hostile(get.format("/v1/" + "x" * 100_000).encode(), None)
    yield "another model", Hostile(get.format("/v1/models/" + "x" * 300).encode(), (404,))
    yield "a model with signs", Hostile(get.format("/v1/models/%00%ff%0d%0a").encode(), (404,))
    yield "a GET of completions", Hostile(get.format(COMPLETIONS).encode(), (405,))
    yield "no HTTP", Hostile(bytes(300), None, "leave")
    yield "TLS", Hostile(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), None)
    yield "another protocol", Hostile(b"SSH-2.0-OpenSSH_9.0\r\n", None, "leave")
    yield "HTTP/2", Hostile(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None)
    yield "HTTP/0.9", Hostile(b"GET /\r\n", None)
    yield "no host", Hostile(b"GET /healthz HTTP/1.1\r\n\r\n", None)
    yield (
        "a websocket",
        Hostile(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n",
            (200,),
        ),
    )
    yield "half a request", Hostile(b"POST /v1/completions HT", None, "leave")
    yield "half a header", Hostile(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX", None, "leave")
    yield "endless headers", Hostile(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000, None)
    yield "10,000 headers", Hostile(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 10_000 + b"\r\n", None)
    yield "empty lines", Hostile(b"\r\n" * 20_000, None, "leave")
    yield "a header with zeros", Hostile(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: \x00\x01\r\n\r\n", None)
    yield "nothing", Hostile(b"", None, "leave")
    for seed in range(20):
        whole = post(COMPLETIONS, json.dumps(_good(model)[COMPLETIONS]).encode())
        yield f"garbled request {seed}", Hostile(_garbled(whole, seed, 8), None, "leave")


def _chunked(path: str, body: bytes, size: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def _garbled(data: bytes, seed: int, count: int = 3) -> bytes:
    """The bytes with some of them replaced."""
    chance = random.Random(seed)
    found = bytearray(data)
    for _ in range(count):
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)


def attack(port: int, model: str, count: int) -> dict[str, int]:
    """Send `count` requests, kind after kind; returns how many of each status were answered (0: none).

    Raises AssertionError for an answer that is not the expected one, is not OpenAI's error, or shows a traceback.
    """
    found: dict[str, int] = {}
    for name, one in itertools.islice(itertools.cycle(kinds(model).items()), count):
        status = send(port, name, one)
        found[str(status)] = found.get(str(status), 0) + 1
    return found


def send(port: int, name: str, one: Hostile) -> int:
    """Send one; returns the status of its answer, 0 if there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as client:
        try:
            if one.then == "slow":
                for byte in one.data:
                    client.sendall(bytes([byte]))
            else:
                client.sendall(one.data)
            if one.then == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if one.then in ("leave", "reset"):
                return 0
            answer = client.recv(200) if one.then == "peek" else _answer(client)
        except (BrokenPipeError, ConnectionError):
            answer = b""
    status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
    assert one.statuses is None or status in one.statuses, f"{name}: {answer[:500]!r}"
    assert b"Traceback" not in answer and status != 500, f"{name}: {answer[:500]!r}"
    is_whole = one.then != "peek"  # which has read the first bytes of it
    if is_whole and status in (400, 401, 403, 404, 405, 411, 413, 429) and b"application/json" in answer:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert isinstance(error["message"], str) and error["type"] == "invalid_request_error", f"{name}: {error}"
        assert len(error["message"]) < 1_000, f"{name}: the error repeats the request"
    return status


def _answer(client: socket.socket) -> bytes:
    """One answer, to the end of its body; what there is of it, if the connection ends before."""
    found = b""
    while True:
        head, end, body = found.partition(b"\r\n\r\n")
        if end and len(body) >= _length(head):
            return found
        if head.startswith(b"HTTP/1.1 100"):
            found = body
        elif not (more := client.recv(1 << 16)):
            return found
        else:
            found += more


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0 if b"chunked" in head.lower() else 1 << 30


@contextlib.contextmanager
def held_open(port: int, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that have sent these bytes and wait."""
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S)))
            clients[-1].sendall(data)
        yield clients


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Raises AssertionError if the condition does not come true in this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)
