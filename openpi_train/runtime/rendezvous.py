"""Rendezvous of all processes before jax starts, with clear errors. Read next: `door.py`, process 0's side.

jax aborts the process, uncatchably and without a reason, when a peer is late, a port is taken or a host name does not
resolve, and it accepts peers that disagree on the world size. So first every process introduces itself to process 0
over plain TCP, one port above the coordinator's, and process 0 sends all of them the same verdict. One JSON line each
way: a `Hello` from the process, `{"host": process 0's, "error": null or text, "lost": whether somebody never came}`
back. Then the watchdog uses the connection (`peer.py`). The token keeps jobs apart; it does not protect from attackers,
and neither does jax's own service: use a trusted network.
"""

import dataclasses
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

from openpi_train.runtime.door import Door, Hello
from openpi_train.runtime.exits import PeerLostError, UsageError
from openpi_train.runtime.lines import read_line, send_line
from openpi_train.runtime.peer import Peer
from openpi_train.runtime.waiting import Wait
from openpi_train.runtime.world import World, is_loopback, split_address

# It may hold the differences of long facts.
_VERDICT_LIMIT_BYTES = 1 << 23


def meet(
    world: World, facts: Mapping[str, str], *, timeout_s: float = 300.0, cpu_collectives: bool = False
) -> list[Peer]:
    """Return once all processes of `world` have met and agree; every process must call it.

    Returns all others on process 0, and process 0 on the others; the connections stay open for the life of the run.

    Args:
        facts: values that must be equal on all processes; a difference is reported by its key and both values.
        cpu_collectives: whether devices will use gloo, which needs a host name that other hosts can reach.

    Raises:
        UsageError: they disagree, an id is used twice, a port is taken, or a host name does not resolve.
        PeerLostError: not all came within `timeout_s`.
    """
    assert world.coordinator is not None
    hello = Hello(
        process_index=world.process_index,
        process_count=world.process_count,
        host=socket.gethostname(),
        token=world.token,
        facts=dict(facts),
        local_name_is_loopback=_name_is_loopback(),
    )
    host, port = split_address(world.coordinator)
    if world.process_index == 0:
        return Door(hello, host, port, world.host_of).gather(timeout_s, cpu_collectives)
    else:
        # The cluster's DNS learns a pod's name only once the pod is there; elsewhere an unknown name is a mistake.
        return _visit(hello, host, port, timeout_s, name_timeout_s=timeout_s if world.source == "kubernetes" else 0.0)


def _visit(own: Hello, host: str, port: int, timeout_s: float, name_timeout_s: float) -> list[Peer]:
    """The side of all other processes: connect to process 0, send the hello, wait for the verdict."""
    _await_name(own, host, name_timeout_s)
    where = f"process 0 at {host}, port {port + 1}"
    try:
        connection = Wait(timeout_s).until_it_works(
            lambda: socket.create_connection((host, port + 1), timeout=2.0),
            lambda: f"{own.who()} waits for {where}",
            pause_s=0.2,
        )
    except OSError as error:
        raise PeerLostError(
            f"{own.who()} could not reach {where} within {timeout_s:.0f} s ({error}): is it running, is the "
            "address right, and does the firewall let this port and the one below through?"
        ) from error
    try:
        send_line(connection, dataclasses.asdict(own))
        verdict, rest = _await_verdict(connection, own, where, timeout_s)
        if verdict["error"] is not None:
            raise (PeerLostError if verdict["lost"] else UsageError)(verdict["error"])
    except BaseException:
        connection.close()
        raise
    peer = Peer(0, verdict["host"], connection, rest)
    threading.Thread(target=peer.listen, name="process 0", daemon=True).start()
    return [peer]


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


def _await_verdict(connection: socket.socket, own: Hello, where: str, timeout_s: float) -> tuple[dict, bytes]:
    """Process 0's answer, and the bytes after it."""
    # Process 0 may have begun to wait for the others only now, and it must be the one to name the missing ones.
    wait = Wait(timeout_s + 15.0)

    def check(num_bytes: int) -> None:
        if wait.is_over():
            raise PeerLostError(f"{where} took {own.who()} in but never gave the sign to start")
        wait.report(lambda: f"{own.who()} is connected and waits until all {own.process_count} processes are here")

    connection.settimeout(1.0)
    try:
        line, rest = read_line(connection, _VERDICT_LIMIT_BYTES, meanwhile=check)
        if _is_verdict(verdict := json.loads(line)):
            return verdict, rest
    except (EOFError, OSError):
        raise PeerLostError(f"{where} closed the rendezvous without a word: its own log says why") from None
    except (ValueError, RecursionError):
        pass
    raise UsageError(f"another program answers for {where}: use another port")


def _is_verdict(said: Any) -> bool:
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
