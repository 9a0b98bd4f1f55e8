"""Whoever talks to the rendezvous port and is no process of the run: two thousand of them, and the run still starts."""

import collections
import contextlib
import dataclasses
import errno
import json
import logging
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time

import pytest

from openpi_train.runtime import door, rendezvous
from openpi_train.runtime.door import Door, Hello
from openpi_train.runtime.exits import PeerLostError, UsageError
from openpi_train.runtime.peer import Peer

FACTS = {"experiment": "abc"}
OURS = Hello(process_index=1, process_count=3, host="there", token="ours", facts=FACTS)
FIELDS = dataclasses.asdict(OURS)
NUM_STRANGERS = 2_000

# What a process of the run does, in a process of its own.
PROCESS = """
import sys
from openpi_train.runtime.rendezvous import meet
from openpi_train.runtime.world import World
index, count, port = map(int, sys.argv[1:])
world = World(process_index=index, process_count=count, local_index=index, local_count=None,
              coordinator=f"127.0.0.1:{port}", source="flags", token="ours")
print(len(meet(world, {"experiment": "abc"}, timeout_s=60.0)))
"""

MISTYPED = [
    *({**FIELDS, "process_index": value} for value in (True, 1.0, "1", None, [1], -1, 3, 10**400)),
    *({**FIELDS, "process_count": value} for value in (True, 3.0, "3", None, {}, 0, 10**400)),
    *({**FIELDS, "host": value} for value in (5, None, ["there"], {"a": 1}, "a\nb", "\x1b[2J", "h" * 256)),
    *({**FIELDS, "token": value} for value in (5, None, ["ours"], True)),
    *({**FIELDS, "facts": value} for value in (5, None, [], "abc", {"experiment": 5}, {"experiment": ["abc"]})),
    *({**FIELDS, "local_name_is_loopback": value} for value in (0, "no", None, [])),
    {**FIELDS, "more": 1},
    {name: value for name, value in FIELDS.items() if name != "token"},
    [FIELDS],
    "hello",
    7,
    None,
]


def line(hello) -> bytes:
    return json.dumps(hello).encode() + b"\n"


def random_hello(draw: random.Random) -> bytes:
    """Bytes of one of the kinds: random, truncated, deeply nested, mistyped, changed, too long."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(200)) + b"\n" * draw.randrange(2)
    if kind == 1:
        return line(FIELDS)[: draw.randrange(len(line(FIELDS)))]
    if kind == 2:
        opening = draw.choice(["[", '{"facts":', '{"process_index": 1, "facts":['])
        return opening.encode() * draw.choice([10, 1_000, 5_000]) + b"\n"
    if kind == 3:
        return line(draw.choice(MISTYPED))
    if kind == 4:
        whole = bytearray(line(FIELDS))
        for _ in range(draw.randrange(1, 5)):
            whole[draw.randrange(len(whole) - 1)] = draw.choice(b'{}[]:,"\\\x00\xff0')
        return bytes(whole).replace(b'"ours"', b'"other"')
    return b'{"host": "' + b"a" * draw.choice([1 << 12, 1 << 14]) + draw.choice([b"", b"\n"])


@pytest.fixture
def zero(free_port):
    """Process 0's door, with a list to which its end comes."""
    made = Door(dataclasses.replace(OURS, process_index=0), "127.0.0.1", free_port)
    yield made, free_port
    made.listener.close()


def meet(made: Door, timeout_s: float) -> list[Peer]:
    """Those who came; nobody where not all did."""
    try:
        return made.gather(timeout_s, cpu_collectives=False)
    except PeerLostError:
        return []


@contextlib.contextmanager
def gathering(made: Door, timeout_s: float = 60.0):
    """Process 0 waits for the others meanwhile; then they are in the list."""
    found: list = []
    thread = threading.Thread(target=lambda: found.extend(meet(made, timeout_s)))
    thread.start()
    yield found
    thread.join(60)
    assert not thread.is_alive()


def the_others(port: int, count: int) -> list[subprocess.Popen]:
    command = [sys.executable, "-c", PROCESS]
    return [
        subprocess.Popen([*command, str(index), str(count), str(port)], stdout=subprocess.PIPE, text=True)
        for index in range(1, count)
    ]


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port + 1), timeout=30)


@pytest.mark.slow
def test_two_thousand_strangers_are_ignored_and_real_processes_still_meet(zero, caplog):
    made, port = zero
    draw = random.Random(0)
    before, most = threading.active_count(), 0
    failed: list = []
    threading.excepthook, hook = failed.append, threading.excepthook
    try:
        with gathering(made) as found:
            recent: collections.deque = collections.deque()
            for _ in range(NUM_STRANGERS):
                stranger = connected(port)
                with contextlib.suppress(OSError):  # it may be thrown out in the middle of its line
                    stranger.sendall(random_hello(draw))
                recent.append(stranger)
                if len(recent) > 20:  # those who say half a line wait for more
                    recent.popleft().close()
                most = max(most, threading.active_count() - before)
            for stranger in recent:
                stranger.close()
            others = the_others(port, 3)
            assert [process.communicate(timeout=60)[0] for process in others] == ["1\n", "1\n"]
    finally:
        threading.excepthook = hook
    assert failed == []
    assert sorted(peer.process_index for peer in found) == [1, 2]
    assert most <= door._MOST_HEARD + 8, "beside those heard, process 0's own and some that end"
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 100 <= len(told) <= 100 + NUM_STRANGERS / 100


# Which of the lines it is given are hellos.
PARSE = """
import sys
from openpi_train.runtime.door import _parse_hello
for number, line in enumerate(sys.stdin.buffer):
    try:
        print(number, _parse_hello(line).process_index)
    except ValueError as error:
        assert str(error).endswith("is no hello of ours")
"""


def test_a_hello_of_other_types_is_no_hello():
    # In a process of its own, where the suite's checks of types are not.
    lines = b"".join(map(line, [FIELDS, *MISTYPED, {**FIELDS, "process_index": 2}]))
    done = subprocess.run([sys.executable, "-c", PARSE], input=lines, capture_output=True, timeout=60)
    assert (done.stdout.decode(), done.stderr) == (f"0 1\n{len(MISTYPED) + 1} 2\n", b"")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"facts":' * 20_000])
def test_a_deeply_nested_hello_is_no_hello(data):
    with pytest.raises(ValueError, match="is no hello of ours"):
        door._parse_hello(data + b"\n")


def test_the_whole_of_a_hello_is_bounded_and_not_each_part_of_it(zero, monkeypatch, caplog):
    monkeypatch.setattr(door, "_HELLO_TIMEOUT_S", 0.6)
    _, port = zero
    with connected(port) as stranger:
        assert drip(stranger, line(FIELDS), every_s=0.1) < len(line(FIELDS))
    wait_for(lambda: any("and no line in 0.6 s" in record.message for record in caplog.records))


def test_a_hello_beyond_its_limit_is_not_read_on(zero, caplog):
    _, port = zero
    with connected(port) as stranger, contextlib.suppress(OSError):
        for _ in range(64):
            stranger.sendall(b"a" * (1 << 16))
    wait_for(lambda: any("bytes that are no line" in record.message for record in caplog.records))
    told = next(record.message for record in caplog.records if "bytes that are no line" in record.message)
    assert int(told.split(": ")[1].split(" bytes")[0]) <= (256 << 10) + (64 << 10), "the limit, and one part beyond it"


class Short:
    """A listener that for a while can take nobody in, as where a process has no files left."""

    def __init__(self, listener, times):
        self.listener, self.times = listener, times

    def accept(self):
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.listener.accept()

    def fileno(self):
        return self.listener.fileno()

    def close(self):
        self.listener.close()


def test_the_door_stays_open_where_nobody_can_be_taken_in_for_a_while(zero, caplog):
    made, port = zero
    made.listener = Short(made.listener, 3)
    connected(port).close()  # the last whom the old one takes in
    with gathering(made) as found:
        others = the_others(port, 3)
        assert [process.communicate(timeout=60)[0] for process in others] == ["1\n", "1\n"]
    assert sorted(peer.process_index for peer in found) == [1, 2]
    assert sum("takes nobody in for now: [Errno 24]" in record.message for record in caplog.records) == 3


def test_the_door_stays_open_where_a_guest_gets_no_thread(zero, monkeypatch, caplog):
    made, port = zero
    with monkeypatch.context() as patch:
        patch.setattr(door.threading, "Thread", without_threads)
        for _ in range(door._MOST_HEARD + 1):
            with connected(port) as stranger:
                assert stranger.recv(1) == b""
    with gathering(made) as found:
        others = the_others(port, 3)
        assert [process.communicate(timeout=60)[0] for process in others] == ["1\n", "1\n"]
    assert sorted(peer.process_index for peer in found) == [1, 2]
    assert any("nobody hears" in record.message for record in caplog.records)


def without_threads(**_):
    raise RuntimeError("can't start new thread")


def test_strangers_who_say_nothing_take_places_for_a_second_and_no_more_threads(zero, monkeypatch):
    monkeypatch.setattr(door, "_HURRIED_TIMEOUT_S", 0.2)
    monkeypatch.setattr(door, "_HELLO_TIMEOUT_S", 600.0)
    made, port = zero
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(3 * door._MOST_HEARD):
            stack.enter_context(connected(port))
        wait_for(made.crowded.is_set)
        assert threading.active_count() - before <= door._MOST_HEARD + 8
        with gathering(made, timeout_s=30.0) as found:
            others = the_others(port, 3)
            assert [process.communicate(timeout=60)[0] for process in others] == ["1\n", "1\n"]
    assert sorted(peer.process_index for peer in found) == [1, 2]


@pytest.mark.parametrize("token", ["", "our", "ours!", "OURS", "other"])
def test_no_token_but_the_runs_own_lets_in(zero, token):
    made, port = zero
    with connected(port) as stranger:
        stranger.settimeout(5)
        stranger.sendall(line({**FIELDS, "token": token}))
        assert "is another job" in json.loads(stranger.recv(4096))["error"]
    assert made.arrivals.empty()


def test_whoever_came_in_keeps_no_place(zero):
    made, port = zero
    count = door._MOST_HEARD + 5
    made.own = dataclasses.replace(made.own, process_count=count)
    with gathering(made, timeout_s=20.0) as found, contextlib.ExitStack() as stack:
        for index in range(1, count):
            guest = stack.enter_context(connected(port))
            guest.sendall(line({**FIELDS, "process_index": index, "process_count": count}))
        assert json.loads(guest.recv(4096))["error"] is None
    assert len(found) == count - 1 and not made.crowded.is_set()


def drip(connection: socket.socket, data: bytes, every_s: float) -> int:
    """Say it byte by byte; how many went before the other end closed."""
    for number in range(len(data)):
        if select.select([connection], [], [], every_s)[0]:
            return number
        try:
            connection.sendall(data[number : number + 1])
        except OSError:
            return number
    return len(data)


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def verdict():
    """The visitor's wait for a verdict, on a connection whose other end comes with it."""
    ours, theirs = socket.socketpair()

    def wait(timeout_s=20.0):
        return rendezvous._await_verdict(ours, OURS, "process 0", timeout_s)

    with ours, theirs:
        yield wait, theirs


@pytest.mark.slow
def test_a_verdict_that_drips_is_not_waited_for_without_end(verdict):
    wait, theirs = verdict

    def speak():
        drip(theirs, b" " * 200, 0.01)
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)

    speaking = threading.Thread(target=speak)
    speaking.start()
    with pytest.raises(PeerLostError, match="never gave the sign to start"):
        wait(timeout_s=-14.5)  # the wait itself is fifteen seconds longer
    speaking.join(20)


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 100_000 + b"\n",
        line({"host": 5, "error": None, "lost": False}),
        line({"host": "a", "error": 5, "lost": False}),
        line({"host": "a", "error": None, "lost": "no"}),
        line(["host", "error", "lost"]),
        b"a" * ((1 << 23) + 1),
    ],
    ids=["nested", "host", "error", "lost", "list", "endless"],
)
def test_what_is_no_verdict_is_another_program(verdict, said):
    wait, theirs = verdict

    def say():
        with contextlib.suppress(OSError):
            theirs.sendall(said)

    saying = threading.Thread(target=say)
    saying.start()
    with pytest.raises(UsageError, match="another program answers"):
        wait(timeout_s=-5.0)
    theirs.close()
    saying.join(20)


def test_a_verdict_with_what_follows_it_is_taken(verdict):
    wait, theirs = verdict
    said = {"host": "a", "error": None, "lost": False}
    theirs.sendall(line(said) + b"more")
    assert wait() == (said, b"more")


@pytest.mark.parametrize("said", [b"[" * 100_000 + b"\n", b'{"status":' * 20_000 + b"\n"])
def test_a_peer_that_says_what_nobody_can_read_is_lost_and_not_waited_for(said):
    ours, theirs = socket.socketpair()
    peer, news = Peer(1, "there", ours), threading.Event()
    peer.on_news = news.set
    listening = threading.Thread(target=peer.listen)
    listening.start()
    with theirs:
        theirs.sendall(said)
        assert news.wait(10)
        listening.join(10)
    assert peer.closed
