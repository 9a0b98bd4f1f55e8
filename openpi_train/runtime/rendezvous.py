"""Rendezvous of all processes before jax starts, with clear errors. Read next: `rendezvous_server.py`.

jax aborts the process, uncatchably and without a reason, when a peer is late, a port is taken or a host name does not
resolve, and it accepts peers that disagree on the world size. So first every process introduces itself to process 0
over plain TCP, at the coordinator's port, and process 0 sends all of them the same verdict. Both show that they know
the job's token (`handshake.py`). The process says a `Hello`, and process 0 `{"host": its own, "error": null or a text,
"lost": whether somebody never came}`. Then the watchdog uses the connection (`peer.py`). Once jax starts, each process
calls at the same port for a second connection, which carries what jax says (`tunnel.py`). A stranger ends no run here.
"""

import contextlib
import dataclasses
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from openpi_train.runtime import handshake
from openpi_train.runtime.exits import PeerLostError, UsageError
from openpi_train.runtime.handshake import NotProven, Signing
from openpi_train.runtime.job_token import TOKEN_VARIABLE, TokenFile, read_token
from openpi_train.runtime.lines import read_line, send_line
from openpi_train.runtime.peer import Peer
from openpi_train.runtime.rendezvous_server import Hello, RendezvousServer
from openpi_train.runtime.tunnel import Tunnels
from openpi_train.runtime.waiting import Wait
from openpi_train.runtime.world import World, is_loopback, split_address

logger = logging.getLogger(__name__)

# It may hold the differences of long facts.
_VERDICT_LIMIT_BYTES = 1 << 23
_CHALLENGE_LIMIT_BYTES = 1 << 10
# Limit from the connection to process 0's welcome, which comes within milliseconds; then the process calls again.
_WELCOME_S = 20.0
# jax's client gives a connection up after 20 s, and makes another.
_TUNNEL_S = 15.0


class _NotHeard(Exception):
    """Process 0 was too busy to hear this process, as when strangers crowd its server: it calls again."""


def meet(
    world: World,
    facts: Mapping[str, str],
    *,
    timeout_s: float = 300.0,
    cpu_collectives: bool = False,
    shared_folder: Path | None = None,
) -> tuple[list[Peer], Tunnels]:
    """Return once all processes of `world` have met and agree; every process must call it.

    Returns all others on process 0, and process 0 on the others, with connections that stay open for the life of the
    run; and what carries jax's.

    Args:
        facts: values that must be equal on all processes; a difference is reported by its key and both values.
        cpu_collectives: whether devices will use gloo, which needs a host name that other hosts can reach.
        shared_folder: where process 0 puts a token for all if `world` has no secret one; None: nowhere.

    Raises:
        UsageError: they disagree, an id is used twice, a port is taken, or a host name does not resolve.
        PeerLostError: not all came within `timeout_s`.
    """
    assert world.coordinator is not None
    hello = Hello(
        process_index=world.process_index,
        process_count=world.process_count,
        host=socket.gethostname(),
        facts=dict(facts),
        local_name_is_loopback=_name_is_loopback(),
    )
    host, port = split_address(world.coordinator)
    if world.process_index == 0:
        with _token_for_all(world, shared_folder, port) as (token, file):
            server = RendezvousServer(hello, host, port, token=token, token_file=file, host_of=world.host_of)
            return server.gather(timeout_s, cpu_collectives), server.tunnels
    # The cluster's DNS learns a pod's name only once the pod is there; elsewhere an unknown name is a mistake.
    visit = _Visit(hello, host, port, world, shared_folder)
    peers = visit.meet(timeout_s, name_timeout_s=timeout_s if world.source == "kubernetes" else 0.0)
    return peers, Tunnels(visit.tunnel)


@contextlib.contextmanager
def _token_for_all(world: World, folder: Path | None, port: int) -> Iterator[tuple[str, str | None]]:
    """The token of this start, and the name of its file in the folder while the processes meet, None without one."""
    file, problem = None, "and no folder that all see"
    if not world.token_is_secret and folder is not None:
        try:
            file = TokenFile.write(folder)
        except OSError as error:
            problem = f"and none can be put into {folder} ({error})"
    if not world.token_is_secret and file is None:
        logger.warning(
            "the processes of this run share no secret (no %s, %s): whoever reaches port %d can end this run",
            *(TOKEN_VARIABLE, problem, port),
        )
    try:
        yield (file.token, file.path.name) if file else (world.token, None)
    finally:
        if file:
            file.remove()


class _Visit:
    """The side of all other processes: connect to process 0, show that both know the token, wait for the verdict."""

    def __init__(self, own: Hello, host: str, port: int, world: World, shared_folder: Path | None):
        self._own, self._host, self._port = own, host, port
        self._world, self._folder = world, shared_folder
        self._where = f"process 0 at {host}, port {port}"
        self._agreed_token: str | None = None  # once all have met

    def meet(self, timeout_s: float, name_timeout_s: float) -> list[Peer]:
        """Process 0, as in the list that `meet` returns. Raises likewise."""
        _await_name(self._own, self._host, name_timeout_s)
        connection, signing, rest = self._call(dataclasses.asdict(self._own), timeout_s)
        try:
            verdict, rest = await_verdict(connection, signing, self._own, self._where, timeout_s, rest)
            if verdict["error"] is not None:
                raise (PeerLostError if verdict["lost"] else UsageError)(verdict["error"])
        except BaseException:
            connection.close()
            raise
        self._agreed_token = signing.token
        peer = Peer(0, verdict["host"], connection, rest)
        threading.Thread(target=peer.listen, name="process 0", daemon=True).start()
        return [peer]

    def tunnel(self) -> tuple[socket.socket, bytes]:
        """A further connection, which process 0 carries to jax's service, and what has come over it already."""
        connection, _, rest = self._call(handshake.tunnel_request(self._own.process_index), _TUNNEL_S)
        return connection, rest

    def _call(self, said: object, timeout_s: float) -> tuple[socket.socket, Signing, bytes]:
        """A connection on which both have shown that they know the token and `said` is said, and what has come over it
        already."""
        wait = Wait(timeout_s)
        while True:
            connection = self._connect(wait)
            try:
                return (connection, *self._introduce(connection, said))
            except _NotHeard:
                connection.close()
                if wait.is_over():
                    raise PeerLostError(
                        f"{self._where} closed the rendezvous without a word, to the end of {timeout_s:.0f} s: its own "
                        "log says why"
                    ) from None
                wait.report(lambda: f"{self._own.who()} calls {self._where} again and again, which hears it not")
                time.sleep(random.uniform(0.05, 0.3))  # not all at once again
            except BaseException:
                connection.close()
                raise

    def _connect(self, wait: Wait) -> socket.socket:
        try:
            return wait.until_it_works(
                lambda: socket.create_connection((self._host, self._port), timeout=2.0),
                lambda: f"{self._own.who()} waits for {self._where}",
                pause_s=0.2,
            )
        except OSError as error:
            raise PeerLostError(
                f"{self._own.who()} could not reach {self._where} within {wait.timeout_s:.0f} s ({error}): is it "
                "running, is the address right, and does the firewall let this port through?"
            ) from error

    def _introduce(self, connection: socket.socket, said: object) -> tuple[Signing, bytes]:
        """Say it, signed, and return once process 0 has shown that it knows the token, too."""
        deadline = time.monotonic() + _WELCOME_S

        def check(num_bytes: int) -> None:
            if time.monotonic() > deadline:
                raise _NotHeard

        connection.settimeout(1.0)
        try:
            nonce = handshake.new_nonce()
            send_line(connection, handshake.introduction(nonce))
            line, rest = read_line(connection, _CHALLENGE_LIMIT_BYTES, meanwhile=check)
            challenge = handshake.read_challenge(line)
            if challenge.started and self._agreed_token is None:
                raise UsageError(
                    f"the run at this address ({self._where}) has started already with all its processes: end it "
                    "first, or use another port"
                )
            signing = Signing(
                token=self._token(challenge.token_file), side=handshake.PROCESS, nonces=(nonce, challenge.nonce)
            )
            signing.say(connection, said)
            line, rest = read_line(connection, _VERDICT_LIMIT_BYTES, rest, meanwhile=check)
            if signing.believed(line) != handshake.WELCOME:
                raise ValueError("it says something else")
        except (EOFError, OSError):
            raise _NotHeard from None
        except NotProven:
            raise UsageError(
                f"{self._where} is another job, or was given another {TOKEN_VARIABLE} than {self._own.who()}: use "
                "another port, or give all processes the same"
            ) from None
        except ValueError:
            raise UsageError(f"another program answers for {self._where}: use another port") from None
        return signing, rest

    def _token(self, token_file: str | None) -> str:
        if self._agreed_token is not None:
            return self._agreed_token
        if self._world.token_is_secret or token_file is None or self._folder is None:
            return self._world.token
        return read_token(self._folder, token_file)


def _await_name(own: Hello, host: str, timeout_s: float) -> None:
    """Return once the coordinator's host name resolves.

    Raises UsageError if it does not and waiting cannot help, PeerLostError if it did not in time.
    """
    try:
        Wait(timeout_s).until_it_works(
            lambda: socket.getaddrinfo(host, None),
            lambda: f"{own.who()} waits for the name {host!r} to be known here",
            pause_s=1.0,
        )
    except OSError as error:
        raise (PeerLostError if timeout_s else UsageError)(
            f"the coordinator's host name {host!r} does not resolve on {own.host} ({error}): give its address, "
            "or a name that every host knows"
        ) from error


def await_verdict(
    connection: socket.socket, signing: Signing, own: Hello, where: str, timeout_s: float, received: bytes = b""
) -> tuple[dict, bytes]:
    """Process 0's answer, and the bytes after it; `received` has already been read."""
    # Process 0 may have begun to wait for the others only now, and it must be the one to name the missing ones.
    wait = Wait(timeout_s + 15.0)

    def check(num_bytes: int) -> None:
        if wait.is_over():
            raise PeerLostError(f"{where} took {own.who()} in but never gave the sign to start")
        wait.report(lambda: f"{own.who()} is connected and waits until all {own.process_count} processes are here")

    connection.settimeout(1.0)
    try:
        line, rest = read_line(connection, _VERDICT_LIMIT_BYTES, received, meanwhile=check)
        if _is_verdict(verdict := signing.believed(line)):
            return verdict, rest
    except (EOFError, OSError):
        raise PeerLostError(f"{where} closed the rendezvous without a word: its own log says why") from None
    except ValueError:
        pass
    raise UsageError(f"another program answers for {where}: use another port")


def _is_verdict(said: object) -> bool:
    return (
        isinstance(said, dict)
        and said.keys() == {"host", "error", "lost"}
        and isinstance(said["host"], str)
        and isinstance(said["error"], str | None)
        and isinstance(said["lost"], bool)
    )


def _name_is_loopback() -> bool:
    try:
        return is_loopback(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return False  # a name that does not resolve is gloo's to report
