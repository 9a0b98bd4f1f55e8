"""What one client may take of a server: places, frames, memory, and nothing from a browser's page. On real sockets."""

import base64
import contextlib
import gc
import select
import socket
import struct
import threading
import time
import tracemalloc
import urllib.error
import urllib.request

import numpy as np
import pytest
from stub import StubPolicy, request, serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from openpi_train.data.robot.resize import resize_with_pad
from openpi_train.data.robot.windows import WindowShape
from openpi_train.policy import wire
from openpi_train.policy.observation import ObservationForm
from openpi_train.robots.bridge import Bridge
from openpi_train.serve import connection as connections

KEY = base64.b64encode(bytes(16)).decode()
HANDSHAKE = (
    "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    f"Sec-WebSocket-Key: {KEY}\r\n"
)
TEXT, BINARY, PING = 1, 2, 9


def raw(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def frame(kind, data=b"", last=True):
    """A frame as clients send it, masked with zeros."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xff" + struct.pack(">Q", len(data))
    return bytes([(0x80 if last else 0) | kind]) + size + bytes(4) + data


def status(client):
    """The status of the answer to a handshake; the rest of its header is read, too."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = client.recv(1)
        assert part, received
        received += part
    return int(received.split()[1])


def opened(port):
    """A client past its handshake that has read the metadata."""
    client = raw(port)
    client.sendall(f"{HANDSHAKE}\r\n".encode())
    assert status(client) == 101
    message(client)
    return client


def message(client):
    """The next message's bytes."""

    def exactly(size):
        data = b""
        while len(data) < size:
            part = client.recv(size - len(data))
            if not part:
                raise ConnectionError
            data += part
        return data

    while True:
        kind, size = exactly(2)
        if size >= 126:
            size = int.from_bytes(exactly(2 if size == 126 else 8), "big")
        data = exactly(size)
        if kind & 0x0F in (1, 2):
            return data


def metric(port, line):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return line in response.read().decode()


def wait_for(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8000"])
def test_no_page_of_a_browser_reaches_the_robot(path, origin):
    with serving(StubPolicy()) as (port, _):
        if path == "/":
            with pytest.raises(InvalidStatus, match="403"), connect(f"ws://127.0.0.1:{port}", origin=origin):
                pass
        else:
            asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Origin": origin})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(asked, timeout=10)
        opened(port).close()


def test_a_handshake_with_several_keys_does_not_come_in():
    right, wrong = "Authorization: Api-Key right\r\n", "Authorization: Api-Key wrong\r\n"
    with serving(StubPolicy(), api_key="right") as (port, _):
        for headers, expected in [(right, 101), (right + wrong, 401), (wrong + right, 401), (right + right, 401)]:
            with raw(port) as client:
                client.sendall(f"{HANDSHAKE}{headers}\r\n".encode())
                assert status(client) == expected


def test_who_does_not_read_its_answer_loses_its_place():
    policy = StubPolicy()
    policy.answer = lambda prepared, draws=None: [{"actions": np.zeros(16 << 20, np.uint8)}]
    with serving(policy, limits={"send_s": 0.5, "ping_s": 600.0}) as (port, _), opened(port) as client:
        client.sendall(frame(BINARY, wire.encode(request(1))))
        wait_for(lambda: metric(port, "clients 1.0"))
        wait_for(lambda: metric(port, "clients 0.0"))


def test_handshakes_that_come_together_get_no_more_places_than_there_are():
    policy, go_on = StubPolicy(), threading.Event()
    with serving(policy, limits={"max_clients": 3}) as (port, _), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(raw(port)) for _ in range(24)]
        policy.loop.call_soon_threadsafe(go_on.wait, 20)
        for client in clients:
            client.sendall(f"{HANDSHAKE}\r\n".encode())
        go_on.set()
        statuses = [status(client) for client in clients]
        assert sorted(statuses) == [101] * 3 + [503] * 21
        assert metric(port, "openpi_train_clients 3.0")
        for client in clients:
            client.close()
        wait_for(lambda: metric(port, "openpi_train_clients 0.0"))
        opened(port).close()


def test_a_handshake_that_fails_leaves_its_place():
    with serving(StubPolicy(), limits={"max_clients": 1}) as (port, _):
        for broken in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", f"{HANDSHAKE}Upgrade: h2c\r\n\r\n".encode()):
            with raw(port) as client:
                client.sendall(broken)
                assert 400 <= status(client) < 500
            wait_for(lambda: metric(port, "openpi_train_clients 0.0"))
        opened(port).close()


def test_of_too_many_half_handshakes_the_oldest_go_and_health_is_told():
    with serving(StubPolicy(), limits={"max_opening": 4, "open_s": 60.0}) as (port, _), contextlib.ExitStack() as stack:
        halves = [stack.enter_context(raw(port)) for _ in range(8)]
        for half in halves:
            with contextlib.suppress(OSError):  # it may be gone
                half.sendall(HANDSHAKE.encode()[:40])
        for half in halves[:4]:
            assert gone(half)
        assert not select.select(halves[4:], [], [], 0.2)[0]
        assert metric(port, "openpi_train_clients 0.0")
        client = stack.enter_context(opened(port))
        client.sendall(frame(BINARY, wire.encode(request(1))))
        assert wire.decode(message(client))["actions"][0] == 2


def gone(client):
    """Whether the other end closes the connection."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "flood",
    [
        frame(PING) * 6_000,
        frame(BINARY, b"", last=False) + frame(0, b"", last=False) * 6_000,
        frame(BINARY, b"\xc0") * 6_000,
    ],
    ids=["pings", "parts of a message", "messages"],
)
def test_a_flood_of_frames_ends_that_connection_alone(flood, monkeypatch, caplog):
    monkeypatch.setattr(connections, "_FRAMES_PER_S", 0.0)
    with serving(StubPolicy()) as (port, _), opened(port) as client, opened(port) as other:
        with contextlib.suppress(ConnectionError):
            client.sendall(flood)
        assert gone(client)
        with opened(port) as leaving, contextlib.suppress(ConnectionError):
            leaving.sendall(flood)
        other.sendall(frame(BINARY, wire.encode(request(1))))
        assert wire.decode(message(other))["actions"][0] == 2
    assert len(caplog.records) < 50, "nor does it fill the log"


def test_whoever_is_cut_off_before_the_handshake_is_answered_takes_no_place():
    with serving(StubPolicy(), limits={"max_clients": 1}) as (port, _):
        for _ in range(3):
            with raw(port) as client, contextlib.suppress(ConnectionError):
                client.sendall(f"{HANDSHAKE}\r\n".encode() + frame(PING) * 30_000)
                assert gone(client)
        wait_for(lambda: metric(port, "openpi_train_clients 0.0"))
        opened(port).close()


def test_whoever_asks_in_between_may_ping_as_often_as_he_likes(monkeypatch):
    monkeypatch.setattr(connections, "_FRAMES_PER_S", 0.0)
    with serving(StubPolicy()) as (port, _), opened(port) as client:
        for number in range(4):
            client.sendall(frame(PING) * 2_000 + frame(BINARY, wire.encode(request(number))))
            assert wire.decode(message(client))["actions"][0] == 2 * number


def test_frames_are_allowed_by_time_too(monkeypatch):
    monkeypatch.setattr(connections, "_FRAMES_PER_S", 1e9)
    with serving(StubPolicy()) as (port, _), opened(port) as client:
        client.sendall(frame(PING) * 6_000 + frame(BINARY, wire.encode(request(1))))
        assert wire.decode(message(client))["actions"][0] == 2


@pytest.mark.slow
def test_the_next_request_waits_in_the_network_until_this_one_is_answered():
    policy = StubPolicy()
    large = frame(BINARY, wire.encode(request(2, image=np.zeros(48 << 20, np.uint8))))
    with serving(policy, limits={"max_message_bytes": 64 << 20}) as (port, _), opened(port) as client:
        policy.gate.clear()
        client.sendall(frame(BINARY, wire.encode(request(1))))
        wait_for(lambda: policy.batches)
        client.setblocking(False)
        sent = 0
        while sent < len(large) and select.select([], [client], [], 0.5)[1]:
            sent += client.send(large[sent : sent + (1 << 20)])
        client.settimeout(20)
        assert sent < 40 << 20, "no more than the system's own buffers, some megabytes"
        policy.gate.set()
        assert wire.decode(message(client))["actions"][0] == 2
        client.sendall(large[sent:])
        assert wire.decode(message(client))["actions"][0] == 4


class SeeingPolicy(StubPolicy):
    """Reads observations as a policy of Bridge's does, and scales their pictures."""

    form = ObservationForm(
        robot=Bridge(), window=WindowShape(horizon=4), image_size=(224, 224), reads_prompt=True, prompt="go"
    )

    def prepare(self, observation):
        row, state = self.form.row(observation)
        resize_with_pad(row["image/base_0_rgb"], 224, 224)
        return state[:2]


PIXELS = 2_048
# What comes in a picture's place.
PICTURES = {
    "bytes": np.zeros((PIXELS, PIXELS, 3), np.uint8),
    "channels first": np.zeros((3, PIXELS, PIXELS), np.uint8),
    "fractions": np.zeros((PIXELS // 2, PIXELS // 2, 3), np.float32),
    "double fractions": np.zeros((PIXELS // 2, PIXELS // 2, 3), np.float64),
    "a list of texts, one of them long": ["a"] * 4_000 + ["x" * 8_000_000],
    "a list of arrays, one of them wide": [np.zeros(100_000, np.uint8)] * 100 + [np.zeros(100_000)],
}


def big(kind):
    """A message of megabytes of one of the kinds that take most."""
    if kind in PICTURES:
        return wire.encode({"observation/image_0": PICTURES[kind], "state": np.zeros(7)})
    count = 1 << 21
    if kind == "a map of millions":
        return b"\xdf" + count.to_bytes(4, "big") + b"\xa3abc\x00" * count
    if kind == "small maps":
        return b"\xdd" + count.to_bytes(4, "big") + b"\x81\xa0\x00" * count
    if kind == "plain bytes":
        return wire.encode({"more": bytes(8 << 20)})
    assert kind == "wide text"
    return b"\xdb" + (8 << 20).to_bytes(4, "big") + b"a" * ((8 << 20) - 4) + "\N{GRINNING FACE}".encode()


@pytest.mark.parametrize(
    "kind", [*PICTURES, "a map of millions", "small maps", "plain bytes", "wide text", "wide text in a text frame"]
)
@pytest.mark.slow
def test_a_request_holds_no_more_than_twice_its_bytes(kind):
    whole = big(kind.removesuffix(" in a text frame"))
    sent = frame(TEXT if "frame" in kind else BINARY, whole)
    with serving(SeeingPolicy()) as (port, _), opened(port) as client:
        # What is kept from the first request on, such as the lines of source in the log's traceback, is not counted.
        client.sendall(sent)
        message(client)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(3):
                client.sendall(sent)
                message(client)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    # An eighth of its buffer a bytearray reserves and never touches; a read is 256 KiB, and threads that earlier tests
    # of this worker have left may hold as much. Three times the smallest of these messages is more than this.
    assert held < 2.125 * len(whole) + (4 << 20)
