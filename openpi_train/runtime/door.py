"""Process 0's side of the rendezvous: accepts processes and decides whether the run starts. Read next: `rendezvous.py`.

The door stays open for the life of the run, so that an extra process 2, say, is refused with a reason. jax itself
would end the process 2 that is already training.
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping

from openpi_train.runtime.exits import PeerLostError, UsageError
from openpi_train.runtime.lines import read_line, send_line
from openpi_train.runtime.peer import Peer
from openpi_train.runtime.waiting import Wait
from openpi_train.runtime.world import listen_host

logger = logging.getLogger(__name__)

# Limit from the connection to the end of the hello; and the same while others wait for a slot (our processes need
# milliseconds).
_HELLO_TIMEOUT_S, _HURRIED_TIMEOUT_S = 10.0, 1.0
_HELLO_LIMIT_BYTES = 1 << 18
_HOST_LIMIT = 255
# Connections read at the same time: each has a thread, and a buffer of up to some megabytes.
_MOST_HEARD = 32
_MOST_DIFFERENCES = 8
_WARNINGS = 100
# Delay before the next try if no connection can be accepted: a process may temporarily lack files or threads.
_RETRY_S = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """A process's introduction. All processes must have the same `facts` (versions, code, configuration)."""

    process_index: int
    process_count: int
    host: str
    token: str
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
    same_machine: bool
    gone: bool = False


class Door:
    """Process 0's side: listens, reads every guest in a separate thread, and sends all of them the same verdict."""

    def __init__(self, own: Hello, host: str, port: int, host_of: Callable[[int], str | None] = lambda index: None):
        """`host_of` returns the host name of a process that has not come, if it is known."""
        self.own, self.host_of = own, host_of
        self.arrivals: queue.Queue[Guest] = queue.Queue()
        self.waiting, self.started = True, False
        self.places = threading.BoundedSemaphore(_MOST_HEARD)
        self.crowded = threading.Event()
        self.turned_away = itertools.count(1)
        # jax's own listener would share a busy port with another jax run without a word (SO_REUSEPORT).
        listen(host, port).close()
        self.listener = listen(host, port + 1)
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
            self._answer(guest.connection, error, lost=kind is PeerLostError)
        if error is not None:
            self._close(error)
            raise kind(error)
        return [guest.peer for guest in guests.values()]

    def _close(self, error: str) -> None:
        self.listener.close()
        while not self.arrivals.empty():  # those who came while the verdict fell
            self._answer(self.arrivals.get().connection, error)

    def _answer(self, connection: socket.socket, error: str | None, lost: bool = False) -> None:
        with contextlib.suppress(OSError):  # it left: its own log says why
            send_line(connection, {"host": self.own.host, "error": error, "lost": lost})

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
            self._answer(guest.connection, error)
        return error

    def _missing(self, guests: Mapping[int, Guest]) -> str:
        count = self.own.process_count
        missing: dict[str | None, list[str]] = {}
        for index in range(1, count):
            if index not in guests:
                missing.setdefault(self.host_of(index), []).append(str(index))
        names = []
        for host, indices in missing.items():
            processes = f"process{'es' if len(indices) > 1 else ''} {', '.join(indices)}"
            names.append(f"{host} ({processes})" if host else processes)
        number = sum(map(len, missing.values()))
        here = ", ".join([self.own.who(), *(guest.hello.who() for _, guest in sorted(guests.items()))])
        return f"waiting for {number} of {count} processes (here: {here}): {', '.join(names)}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError as error:
                if self.listener.fileno() == -1:
                    return  # closed: the meeting failed
                self._warn("the rendezvous port takes nobody in for now: %s", error)
                time.sleep(_RETRY_S)
                continue
            if not self.places.acquire(blocking=False):
                self.crowded.set()
                self.places.acquire()
                self.crowded.clear()
            try:
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # this process may have no more threads
                self._warn("nobody hears whoever came to the rendezvous port: %s", error)
                self.places.release()
                connection.close()

    def _hear(self, connection: socket.socket) -> None:
        """Read a new connection, pass on members of the run, and notice when they leave. Garbage ends here."""
        guest = None
        with connection:
            try:
                guest = self._admitted(connection)
            except (ValueError, EOFError, TimeoutError) as error:
                self._warn("ignored a stranger on the rendezvous port: %s", error)
            except OSError:
                pass  # it left while it was turned away
            finally:
                self.places.release()
            if guest is None:
                return
            self.arrivals.put(guest)
            guest.peer.listen()
            guest.gone = True
            self.arrivals.put(guest)
            if self.waiting:
                logger.warning("%s left before all had come; still waiting for it", guest.hello.who())

    def _admitted(self, connection: socket.socket) -> Guest | None:
        """The new guest if it belongs to the run; None if it was refused. Raises ValueError for an unknown program."""
        same_machine = connection.getpeername()[0] == connection.getsockname()[0]
        hello = _parse_hello(_read_hello(connection, self.crowded))
        connection.settimeout(_HELLO_TIMEOUT_S)  # of an answer
        if hello.token != self.own.token:
            self._warn("turned away %s, which belongs to another job", hello.who())
            error = f"the run at this address is another job (process 0 on {self.own.host}): use another port"
        elif self.started:
            self._warn("turned away %s: all processes are here already", hello.who())
            error = (
                f"the run at this address has started already with all its {self.own.process_count} processes: end it "
                "first, or use another port"
            )
        else:
            peer = Peer(hello.process_index, hello.host, connection)
            return Guest(hello=hello, peer=peer, connection=connection, same_machine=same_machine)
        self._answer(connection, error)
        return None

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


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, on loopback only if `host` is. Raises UsageError if the port is taken."""
    address = (listen_host(host), port)
    try:
        if address[0]:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            return socket.create_server(address, family=family, backlog=1024)
        try:
            return socket.create_server(address, family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            return socket.create_server(address, backlog=1024)  # a kernel without IPv6
    except OSError as error:
        raise UsageError(
            f"port {port} on {socket.gethostname()} cannot be used for the run's coordinator ({error.strerror}): "
            "another program or an earlier run has it; end that one or give another port"
        ) from None


def _read_hello(connection: socket.socket, crowded: threading.Event) -> bytes:
    """Read a hello from an unknown program. Raises ValueError if it is not a line, too long or takes too long.

    The limit is `_HELLO_TIMEOUT_S`, or `_HURRIED_TIMEOUT_S` while it is `crowded`.
    """
    start = time.monotonic()

    def check(num_bytes: int) -> None:
        limit_s = _HURRIED_TIMEOUT_S if crowded.is_set() else _HELLO_TIMEOUT_S
        if time.monotonic() - start > limit_s:
            raise ValueError(f"it said {num_bytes} bytes and no line in {limit_s:g} s")

    connection.settimeout(_HURRIED_TIMEOUT_S / 4)
    return b"".join(read_line(connection, _HELLO_LIMIT_BYTES, meanwhile=check))


def _parse_hello(line: bytes) -> Hello:
    try:
        hello = Hello(**json.loads(line))
        if not _is_well_formed(hello):
            raise ValueError("wrong types or numbers")
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{line[:60]!r} is no hello of ours") from None
    return hello


def _is_well_formed(hello: Hello) -> bool:
    """Whether all fields have the right type: they are compared, shown in messages, and sent on."""
    return (
        type(hello.process_index) is int
        and type(hello.process_count) is int
        and 0 <= hello.process_index < hello.process_count < 1 << 31
        and type(hello.local_name_is_loopback) is bool
        and isinstance(hello.token, str)
        and isinstance(hello.host, str)
        and len(hello.host) <= _HOST_LIMIT
        and hello.host.isprintable()
        and isinstance(hello.facts, dict)
        and all(isinstance(value, str) for value in hello.facts.values())
    )
