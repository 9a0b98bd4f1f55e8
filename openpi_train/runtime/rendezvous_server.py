"""Process 0's side of the rendezvous: accepts processes and decides whether the run starts. Read next: `rendezvous.py`.

Whoever cannot show that it knows the job's token (`handshake.py`) is dropped, counted and told of in a line. The server
stays open for the life of the run: once it has started, for each process's tunnel to jax's service (`tunnel.py`), and
so that an extra process 2, say, is refused with a reason. jax itself would end the process 2 that is already training.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from openpi_train.runtime import handshake
from openpi_train.runtime.exits import PeerLostError, UsageError
from openpi_train.runtime.handshake import NotProven, Signing
from openpi_train.runtime.lines import read_line, send_line
from openpi_train.runtime.listening import listen
from openpi_train.runtime.peer import Peer
from openpi_train.runtime.tunnel import Tunnels
from openpi_train.runtime.waiting import Wait, processes

logger = logging.getLogger(__name__)

# Limit from the connection to the end of the hello (our processes need milliseconds), and once all have their tunnels.
_HELLO_TIMEOUT_S, _LATE_TIMEOUT_S = 10.0, 1.0
_INTRODUCTION_LIMIT_BYTES = 1 << 10
_HELLO_LIMIT_BYTES = 1 << 18
_HOST_LIMIT = 255
# Connections that have not shown yet who they are: each has a thread, a descriptor, and a buffer of up to 256 KiB.
_MOST_HEARD = 256
# So long nobody makes room for others; of one address that has the most connections the oldest does, so that a stranger
# who opens thousands drives out his own.
_HEARD_S = 0.25
_MOST_DIFFERENCES = _MOST_NAMED = 8
_WARNINGS = 100
# Delay before the next try if no connection can be accepted: a process may temporarily lack files or threads.
_RETRY_S = 0.2
# Between two callers once all have their tunnels: whoever opens thousands of connections slows no step down.
_LATE_PAUSE_S = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """A process's introduction. All processes must have the same `facts` (versions, code, configuration)."""

    process_index: int
    process_count: int
    host: str
    facts: dict[str, str]
    local_name_is_loopback: bool = False

    def who(self) -> str:
        return f"process {self.process_index} on {self.host}"


@dataclasses.dataclass(kw_only=True)
class Guest:
    """A process that has connected to process 0. `gone` is set once the other end has closed."""

    hello: Hello
    peer: Peer
    connection: socket.socket
    signing: Signing
    same_machine: bool
    gone: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunnelCaller:
    """A process that calls again once the run has started, for its tunnel to jax's service."""

    process_index: int
    signing: Signing
    received: bytes
    """Has already been read from the connection."""


class RendezvousServer:
    """Process 0's side: listens, reads every guest in a separate thread, and sends all of them the same verdict."""

    def __init__(
        self,
        own: Hello,
        host: str,
        port: int,
        *,
        token: str,
        token_file: str | None = None,
        host_of: Callable[[int], str | None] = lambda index: None,
    ):
        """`token_file` names the file in which others find the token; `host_of` returns the host name of a process that
        has not come, if it is known."""
        self.own, self.host_of = own, host_of
        self.token, self.token_file = token, token_file
        self.arrivals: queue.Queue[Guest] = queue.Queue()
        self.waiting, self.started = True, False
        self.tunnels, self.tunnelled = Tunnels(), set[int]()
        self.unproven: dict[socket.socket, tuple[str, float]] = {}  # address and time of arrival, oldest first
        self.unproven_lock = threading.Lock()
        self.turned_away = itertools.count(1)
        self.listener = listen(host, port)
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def gather(self, timeout_s: float, cpu_collectives: bool) -> list[Peer]:
        """Wait for all guests, send the verdict, and return them. Raises like `meet`."""
        guests: dict[int, Guest] = {}
        error, kind = None, UsageError
        wait = Wait(timeout_s)
        while len(guests) < self.own.process_count - 1 and error is None:
            if wait.is_over():
                error, kind = f"{self._missing(guests)}, which never came within {timeout_s:.0f} s", PeerLostError
                break
            wait.report(lambda: f"{self._missing(guests)} missing")
            try:
                error = self._receive(self.arrivals.get(timeout=0.2), guests)
            except queue.Empty:
                continue
        if error is None and cpu_collectives:
            error = _unreachable_names(self.own, guests.values())
        self.waiting, self.started = False, error is None
        for guest in guests.values():
            self._answer(guest, error, lost=kind is PeerLostError)
        if error is not None:
            self._close(error)
            raise kind(error)
        return [guest.peer for guest in guests.values()]

    def _close(self, error: str) -> None:
        self.listener.close()
        while not self.arrivals.empty():  # those who came while the verdict fell
            self._answer(self.arrivals.get(), error)

    def _answer(self, guest: Guest, error: str | None, lost: bool = False) -> None:
        with contextlib.suppress(OSError):  # it left: its own log says why
            guest.signing.say(guest.connection, {"host": self.own.host, "error": error, "lost": lost})

    def _receive(self, guest: Guest, guests: dict[int, Guest]) -> str | None:
        """Handle one arrival or departure; returns the error that makes the whole run impossible, if any."""
        hello = guest.hello
        present = guests.get(hello.process_index)
        if guest.gone:
            if present is guest:
                del guests[hello.process_index]
            return None
        error = _disagreement(self.own, hello, present.hello if present else None)
        if error is None:
            guests[hello.process_index] = guest
        else:
            self._answer(guest, error)
        return error

    def _missing(self, guests: Mapping[int, Guest]) -> str:
        count = self.own.process_count
        missing: dict[str | None, list[int]] = {}
        for index in range(1, count):
            if index not in guests:
                missing.setdefault(self.host_of(index), []).append(index)
        names = [f"{host} ({processes(there)})" if host else processes(there) for host, there in missing.items()]
        number = sum(map(len, missing.values()))
        here = [self.own.who(), *(guest.hello.who() for _, guest in sorted(guests.items()))]
        if len(here) > _MOST_NAMED:
            here[_MOST_NAMED - 1 :] = [f"{len(here) - _MOST_NAMED + 1} more"]
        return f"waiting for {number} of {count} processes (here: {', '.join(here)}): {', '.join(names)}"

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self.listener.accept()
            except OSError as error:
                if self.listener.fileno() == -1:
                    return  # closed: the meeting failed
                self._warn("the rendezvous port takes nobody in for now: %s", error)
                time.sleep(_RETRY_S)
                continue
            self._make_room()
            with self.unproven_lock:
                self.unproven[connection] = (address[0], time.monotonic())
            try:
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # this process may have no more threads
                self._warn("nobody hears whoever came to the rendezvous port: %s", error)
                self._is_heard(connection)
                connection.close()
            if self._is_complete():
                time.sleep(_LATE_PAUSE_S)

    def _make_room(self) -> None:
        """Return once one more connection may be heard: the oldest of the address with the most has to go."""
        while True:
            with self.unproven_lock:
                if len(self.unproven) < _MOST_HEARD:
                    return
                counts = Counter(address for address, _ in self.unproven.values())
                crowd = max(counts, key=counts.__getitem__)
                oldest = next(one for one, (address, _) in self.unproven.items() if address == crowd)
                pause_s = self.unproven[oldest][1] + _HEARD_S - time.monotonic()
                if pause_s <= 0:
                    del self.unproven[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread ends, and tells of it
                    return
            time.sleep(pause_s)

    def _is_heard(self, connection: socket.socket) -> bool:
        """Give up the connection's place among the unproven; False if it has been taken from it already."""
        with self.unproven_lock:
            return self.unproven.pop(connection, None) is not None

    def _hear(self, connection: socket.socket) -> None:
        """Read a new connection, and let in those of the run. Garbage ends here."""
        caller = None
        with connection:
            try:
                caller = self._admitted(connection)
            except NotProven as stranger:
                self._warn("turned away %s, which does not know the token of this run", _claimed(stranger.said))
            except (ValueError, EOFError, TimeoutError) as error:
                self._warn("ignored a stranger on the rendezvous port: %s", error)
            except OSError:
                pass  # it left while it was turned away
            finally:
                is_heard = self._is_heard(connection)
            if caller is None or not is_heard:
                return
            try:
                caller.signing.say(connection, handshake.WELCOME)
            except OSError:
                return
            if isinstance(caller, TunnelCaller):
                self._let_through(caller, socket.socket(fileno=connection.detach()))
            else:
                self._attend(caller)

    def _attend(self, guest: Guest) -> None:
        """Pass on a member of the run, and notice when it leaves."""
        self.arrivals.put(guest)
        guest.peer.listen()
        guest.gone = True
        self.arrivals.put(guest)
        if self.waiting:
            logger.warning("%s left before all had come; still waiting for it", guest.hello.who())

    def _let_through(self, caller: TunnelCaller, connection: socket.socket) -> None:
        try:
            self.tunnels.into_service(connection, caller.received)
        except OSError as error:
            logger.warning("process %d finds no service of jax here: %s", caller.process_index, error)
            connection.close()
        else:
            self.tunnelled.add(caller.process_index)

    def _is_complete(self) -> bool:
        """Whether the run has started and every process has its tunnel: whoever comes now comes late."""
        return self.started and len(self.tunnelled) >= self.own.process_count - 1

    def _admitted(self, connection: socket.socket) -> Guest | TunnelCaller | None:
        """Whoever belongs to the run; None if it comes late.

        Raises NotProven if it does not know the token, and ValueError for an unknown program.
        """
        same_machine = connection.getpeername()[0] == connection.getsockname()[0]
        limit_s = _LATE_TIMEOUT_S if self._is_complete() else _HELLO_TIMEOUT_S
        line, rest = _read_within(connection, _INTRODUCTION_LIMIT_BYTES, limit_s)
        nonces = (handshake.read_introduction(line), handshake.new_nonce())
        connection.settimeout(limit_s)
        is_late = self.started
        send_line(connection, {"nonce": nonces[1], "token_file": self.token_file, "started": is_late})
        signing = Signing(token=self.token, side=handshake.PROCESS_0, nonces=nonces)
        try:
            line, rest = _read_within(connection, _HELLO_LIMIT_BYTES, limit_s, rest)
        except EOFError:
            if not is_late:
                raise
            self._warn("turned away a process from %s: all are here already", connection.getpeername()[0])
            return None
        try:
            said = signing.believed(line)
        except NotProven:
            with contextlib.suppress(OSError):
                send_line(connection, handshake.REFUSED)
            raise
        if is_late:
            index = handshake.read_tunnel_request(said, self.own.process_count)
            return TunnelCaller(process_index=index, signing=signing, received=rest)
        hello = _parse_hello(said)
        connection.settimeout(_HELLO_TIMEOUT_S)  # of an answer
        peer = Peer(hello.process_index, hello.host, connection, rest)
        return Guest(hello=hello, peer=peer, connection=connection, signing=signing, same_machine=same_machine)

    def _warn(self, text: str, what: object) -> None:
        """Log a refused connection; of many, only one in a hundred, so that nobody can fill the disk."""
        number = next(self.turned_away)
        if number <= _WARNINGS or number % _WARNINGS == 0:
            logger.warning(f"{text} (number %d)", what, number)


def _disagreement(own: Hello, hello: Hello, present: Hello | None) -> str | None:
    """Why `hello` cannot join process 0's run, in which `present` has its id already; None if it can."""
    if hello.process_count != own.process_count:
        return (
            f"process 0 on {own.host} was started for {own.process_count} processes and {hello.who()} for "
            f"{hello.process_count}: give all of them the same number"
        )
    if hello.process_index == 0 or present is not None:
        other = present.host if present else own.host
        return f"process id {hello.process_index} was given twice, on {other} and on {hello.host}: give each its own"
    different = [
        f"{name} is {own.facts.get(name, 'absent')} there and {hello.facts.get(name, 'absent')} here"
        for name in sorted(own.facts.keys() | hello.facts.keys())
        if own.facts.get(name) != hello.facts.get(name)
    ]
    if len(different) > _MOST_DIFFERENCES:
        different[_MOST_DIFFERENCES:] = [f"and {len(different) - _MOST_DIFFERENCES} more"]
    if different:
        there = f"process 0 on {own.host} (there) and {hello.who()} (here)"
        return f"{there} do not run the same: {'; '.join(different)}. Make them equal on all hosts."
    return None


def _unreachable_names(own: Hello, guests: Collection[Guest]) -> str | None:
    """Why gloo could not connect these hosts: it listens on whatever address the host name resolves to."""
    hellos = [own, *(guest.hello for guest in guests)]
    bad = sorted({hello.host for hello in hellos if hello.local_name_is_loopback})
    if not bad or all(guest.same_machine for guest in guests):
        return None
    return (
        f"the host name of {', '.join(bad)} resolves to a loopback address there, where CPU collectives (gloo) would "
        "listen: give the host name its network address in /etc/hosts"
    )


def _read_within(
    connection: socket.socket, limit_bytes: int, limit_s: float, received: bytes = b""
) -> tuple[bytes, bytes]:
    """A line of an unknown program, and the bytes after it. Raises ValueError if it is none, too long or too late."""
    start = time.monotonic()

    def check(num_bytes: int) -> None:
        if time.monotonic() - start > limit_s:
            raise ValueError(f"it said {num_bytes} bytes and no line in {limit_s:g} s")

    connection.settimeout(min(0.25, limit_s))
    return read_line(connection, limit_bytes, received, meanwhile=check)


def _parse_hello(told: Any) -> Hello:
    """Raises ValueError if the JSON value is none."""
    try:
        hello = Hello(**told)
        if not _is_well_formed(hello):
            raise ValueError("wrong types or numbers")
    except (ValueError, TypeError):
        raise ValueError(f"{str(told)[:60]!r} is no hello of ours") from None
    return hello


def _claimed(text: str) -> str:
    """Who a stranger says it is, if it says that as our processes do."""
    try:
        return _parse_hello(json.loads(text)).who()
    except (ValueError, RecursionError):
        return "a stranger"


def _is_well_formed(hello: Hello) -> bool:
    """Whether all fields have the right type: they are compared, shown in messages, and sent on."""
    return (
        type(hello.process_index) is int
        and type(hello.process_count) is int
        and 0 <= hello.process_index < hello.process_count < 1 << 31
        and type(hello.local_name_is_loopback) is bool
        and isinstance(hello.host, str)
        and len(hello.host) <= _HOST_LIMIT
        and hello.host.isprintable()
        and isinstance(hello.facts, dict)
        and all(isinstance(value, str) for value in hello.facts.values())
    )
