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
from rendezvous_caller import admitted, challenged, heard, read, signed

from openpi_train.runtime import rendezvous, rendezvous_server
from openpi_train.runtime.exits import PeerLostError, UsageError
from openpi_train.runtime.handshake import Signing
from openpi_train.runtime.job_token import proof
from openpi_train.runtime.peer import Peer, PeerStatus
from openpi_train.runtime.rendezvous_server import Hello, RendezvousServer

PHASE = PeerStatus(phase="none", step=0, idle_s=0.0, limit_s=None)
FACTS = {"experiment": "abc"}
OURS = Hello(process_index=1, process_count=3, host="there", facts=FACTS)
FIELDS = dataclasses.asdict(OURS)
NUM_STRANGERS = 2_000

# What a process of the run does, in a process of its own.
PROCESS = """
import sys
from openpi_train.runtime.rendezvous import meet
from openpi_train.runtime.world import World
index, count, port = map(int, sys.argv[1:])
world = World(process_index=index, process_count=count, local_index=index, local_count=None,
              coordinator=f"127.0.0.1:{port}", source="flags", token="ours", token_is_secret=True)
peers, _ = meet(world, {"experiment": "abc"}, timeout_s=60.0)
print(len(peers))
"""

MISTYPED = [
    *({**FIELDS, "process_index": value} for value in (True, 1.0, "1", None, [1], -1, 3, 10**400)),
    *({**FIELDS, "process_count": value} for value in (True, 3.0, "3", None, {}, 0, 10**400)),
    *({**FIELDS, "host": value} for value in (5, None, ["there"], {"a": 1}, "a\nb", "\x1b[2J", "h" * 256)),
    *({**FIELDS, "facts": value} for value in (5, None, [], "abc", {"experiment": 5}, {"experiment": ["abc"]})),
    *({**FIELDS, "local_name_is_loopback": value} for value in (0, "no", None, [])),
    {**FIELDS, "more": 1},
    {name: value for name, value in FIELDS.items() if name != "host"},
    [FIELDS],
    "hello",
    7,
    None,
]


def line(hello) -> bytes:
    return json.dumps(hello).encode() + b"\n"


INTRODUCTION = line({"openpi_train": 3, "nonce": "0" * 32})


def random_hello(draw: random.Random) -> bytes:
    """Bytes of one of the kinds below, as the first or the second line."""
    return INTRODUCTION * draw.randrange(2) + random_line(draw)


def random_line(draw: random.Random) -> bytes:
    """Random, truncated, deeply nested, mistyped, changed, too long, signed with another token."""
    if draw.random() < 0.2:
        nonces = (draw.choice(["0" * 32, "1"]), "f" * 32)
        return signed(draw.choice([FIELDS, "welcome", *MISTYPED[:5]]), draw.choice(["", "theirs", "ours"]), nonces)
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
        return bytes(whole)
    return b'{"host": "' + b"a" * draw.choice([1 << 12, 1 << 14]) + draw.choice([b"", b"\n"])


@pytest.fixture
def zero(free_port):
    """Process 0's server, with a list to which its end comes."""
    made = RendezvousServer(dataclasses.replace(OURS, process_index=0), "127.0.0.1", free_port, token="ours")
    yield made, free_port
    made.listener.close()


def meet(made: RendezvousServer, timeout_s: float) -> list[Peer]:
    """Those who came; nobody where not all did."""
    try:
        return made.gather(timeout_s, cpu_collectives=False)
    except PeerLostError:
        return []


@contextlib.contextmanager
def gathering(made: RendezvousServer, timeout_s: float = 60.0):
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
    return socket.create_connection(("127.0.0.1", port), timeout=30)


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
    assert most <= rendezvous_server._MOST_HEARD + 8, "beside those heard, process 0's own and some that end"
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 100 <= len(told) <= 100 + NUM_STRANGERS / 100


# Which of the lines it is given are hellos.
PARSE = """
import sys
import json
from openpi_train.runtime.rendezvous_server import _parse_hello
for number, line in enumerate(sys.stdin.buffer):
    try:
        print(number, _parse_hello(json.loads(line)).process_index)
    except ValueError as error:
        assert str(error).endswith("is no hello of ours")
"""


def test_a_hello_of_other_types_is_no_hello():
    # In a process of its own, where the suite's checks of types are not.
    lines = b"".join(map(line, [FIELDS, *MISTYPED, {**FIELDS, "process_index": 2}]))
    done = subprocess.run([sys.executable, "-c", PARSE], input=lines, capture_output=True, timeout=60)
    assert (done.stdout.decode(), done.stderr) == (f"0 1\n{len(MISTYPED) + 1} 2\n", b"")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"facts":' * 20_000])
def test_a_deeply_nested_line_is_no_line(text):
    signing = Signing(token="ours", side="process 0", nonces=("a", "b"))
    for line in (text.encode(), json.dumps({"said": text, "proof": proof("ours", "process", "a", "b", text)}).encode()):
        with pytest.raises(ValueError, match="is no line of ours"):
            signing.believed(line)
    assert rendezvous_server._claimed(text) == "a stranger"


def test_the_whole_of_a_hello_is_bounded_and_not_each_part_of_it(zero, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous_server, "_HELLO_TIMEOUT_S", 0.6)
    _, port = zero
    with connected(port) as stranger:
        assert drip(stranger, INTRODUCTION, every_s=0.1) < len(INTRODUCTION)
    wait_for(lambda: any("and no line in 0.6 s" in record.message for record in caplog.records))


def test_a_hello_beyond_its_limit_is_not_read_on(zero, caplog):
    _, port = zero
    with connected(port) as stranger, contextlib.suppress(OSError):
        challenged(stranger)
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


def test_the_server_stays_where_nobody_can_be_taken_in_for_a_while(zero, caplog):
    made, port = zero
    made.listener = Short(made.listener, 3)
    connected(port).close()  # the last whom the old one takes in
    with gathering(made) as found:
        others = the_others(port, 3)
        assert [process.communicate(timeout=60)[0] for process in others] == ["1\n", "1\n"]
    assert sorted(peer.process_index for peer in found) == [1, 2]
    assert sum("takes nobody in for now: [Errno 24]" in record.message for record in caplog.records) == 3


def test_the_server_stays_where_a_guest_gets_no_thread(zero, monkeypatch, caplog):
    made, port = zero
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous_server.threading, "Thread", without_threads)
        for _ in range(rendezvous_server._MOST_HEARD + 1):
            with connected(port) as stranger:
                assert stranger.recv(1) == b""
    with gathering(made) as found:
        others = the_others(port, 3)
        assert [process.communicate(timeout=60)[0] for process in others] == ["1\n", "1\n"]
    assert sorted(peer.process_index for peer in found) == [1, 2]
    assert any("nobody hears" in record.message for record in caplog.records)


def without_threads(**_):
    raise RuntimeError("can't start new thread")


def test_strangers_who_say_nothing_take_no_more_threads_and_keep_nobody_out(zero, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous_server, "_HELLO_TIMEOUT_S", 600.0)
    monkeypatch.setattr(rendezvous_server, "_MOST_HEARD", 32)
    made, port = zero
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(3 * rendezvous_server._MOST_HEARD):
            stack.enter_context(connected(port))
        wait_for(lambda: len(made.unproven) == rendezvous_server._MOST_HEARD)
        assert threading.active_count() - before <= rendezvous_server._MOST_HEARD + 8
        with gathering(made, timeout_s=30.0) as found:
            others = the_others(port, 3)
            assert [process.communicate(timeout=60)[0] for process in others] == ["1\n", "1\n"]
    assert sorted(peer.process_index for peer in found) == [1, 2]


def test_a_crowd_from_one_address_drives_out_its_own(zero, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "_MOST_HEARD", 8)
    monkeypatch.setattr(rendezvous_server, "_HEARD_S", 0.0)
    made, port = zero
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(connected(port))
        for _ in range(10 * rendezvous_server._MOST_HEARD):
            crowd = socket.create_connection(("127.0.0.1", port), 30, source_address=("127.0.0.2", 0))
            stack.enter_context(crowd)
        wait_for(lambda: len(made.unproven) == rendezvous_server._MOST_HEARD)
        admitted(slow, FIELDS, "ours")
    assert made.arrivals.get(timeout=20).hello == OURS


@pytest.mark.parametrize("token", ["", "our", "ours!", "OURS", "other"])
def test_no_token_but_the_runs_own_lets_in(zero, token, caplog):
    made, port = zero
    with connected(port) as stranger:
        nonces = challenged(stranger)
        stranger.sendall(signed(FIELDS, token, nonces))
        assert read(stranger) == {"said": "refused", "proof": ""}
    wait_for(lambda: "turned away process 1 on there, which does not know the token of this run" in caplog.text)
    assert made.arrivals.empty()


@pytest.mark.parametrize("field", ["said", "proof", "nonce of the process", "nonce of process 0", "side"])
def test_a_proof_holds_for_what_is_said_here_and_now_alone(zero, field):
    made, port = zero
    with connected(port) as stranger:
        own, theirs = challenged(stranger)
        own = "1" * 32 if field == "nonce of the process" else own
        nonces = (own, "1" if field == "nonce of process 0" else theirs)
        told = json.loads(signed(FIELDS, "ours", nonces, side="process 0" if field == "side" else "process"))
        if field == "said":
            told["said"] = told["said"].replace("there", "here")
        if field == "proof":
            told["proof"] = told["proof"][:-1] + ("0" if told["proof"][-1] != "0" else "1")
        stranger.sendall(line(told))
        assert read(stranger) == {"said": "refused", "proof": ""}
    assert made.arrivals.empty()


def test_what_a_process_has_said_lets_nobody_in_again(zero, caplog):
    made, port = zero
    with connected(port) as member:
        nonces = challenged(member)
        recorded = signed(FIELDS, "ours", nonces)
        member.sendall(recorded)
        assert heard(member, "ours", nonces) == "welcome"
        with connected(port) as stranger:
            challenged(stranger, nonces[0])
            stranger.sendall(recorded)
            assert read(stranger) == {"said": "refused", "proof": ""}
        assert made.arrivals.get(timeout=20).hello == OURS and made.arrivals.empty()


def test_the_token_is_never_sent(zero):
    made, port = zero
    made.token = "a" * 40
    for hello in (FIELDS, {**FIELDS, "process_index": 9}):
        with connected(port) as guest:
            nonces = challenged(guest)
            told = signed(hello, made.token, nonces)
            guest.sendall(told)
            guest.shutdown(socket.SHUT_WR)
            answered = b"".join(iter(lambda guest=guest: guest.recv(4096), b""))
            assert made.token.encode() not in told + answered


def test_a_flood_after_the_start_takes_few_threads_and_the_run_goes_on(zero, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "_LATE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(rendezvous_server, "_LATE_PAUSE_S", 0.005)
    made, port = zero
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        members = {index: stack.enter_context(connected(port)) for index in (1, 2)}
        with gathering(made) as found:
            nonces = {
                index: admitted(member, {**FIELDS, "process_index": index}, "ours") for index, member in members.items()
            }
        made.tunnelled.update(members)
        strangers = [stack.enter_context(connected(port)) for _ in range(200)]  # silent ones
        threads, heard_by = [], {peer.process_index: peer for peer in found}
        for step in range(1, 6):
            status = {"status": {"phase": "training", "step": step, "idle_s": 0.0, "limit_s": None}}
            for index, member in members.items():
                assert step > 1 or heard(member, "ours", nonces[index])["error"] is None
                member.sendall(line(status))
                wait_for(lambda index=index, step=step: (heard_by[index].status or PHASE).step == step)
            threads.append(threading.active_count() - before)
        with connected(port) as late:
            late.settimeout(60)
            late.sendall(INTRODUCTION)
            assert read(late)["started"] is True
    assert max(threads) <= 2 + 0.05 / 0.005 + 10 and len(strangers) == 200


def test_whoever_came_in_keeps_no_place(zero, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "_MOST_HEARD", 8)
    made, port = zero
    count = rendezvous_server._MOST_HEARD + 5
    made.own = dataclasses.replace(made.own, process_count=count)
    with gathering(made, timeout_s=20.0) as found, contextlib.ExitStack() as stack:
        for index in range(1, count):
            guest = stack.enter_context(connected(port))
            nonces = admitted(guest, {**FIELDS, "process_index": index, "process_count": count}, "ours")
        assert heard(guest, "ours", nonces)["error"] is None
    assert len(found) == count - 1 and not made.unproven


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


NONCES = ("a", "b")


def verdict_line(said, token="ours", side="process 0") -> bytes:
    return signed(said, token, NONCES, side)


@pytest.fixture
def verdict():
    """The visitor's wait for a verdict, on a connection whose other end comes with it."""
    ours, theirs = socket.socketpair()

    def wait(timeout_s=20.0):
        signing = Signing(token="ours", side="process", nonces=NONCES)
        return rendezvous.await_verdict(ours, signing, OURS, "process 0", timeout_s)

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
        verdict_line({"host": 5, "error": None, "lost": False}),
        verdict_line({"host": "a", "error": 5, "lost": False}),
        verdict_line({"host": "a", "error": None, "lost": "no"}),
        verdict_line(["host", "error", "lost"]),
        verdict_line({"host": "a", "error": "you may go", "lost": False}, token="another"),
        verdict_line({"host": "a", "error": "what you said yourself", "lost": False}, side="process"),
        b"a" * ((1 << 23) + 1),
    ],
    ids=["nested", "host", "error", "lost", "list", "token", "side", "endless"],
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
    theirs.sendall(verdict_line(said) + b"more")
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
