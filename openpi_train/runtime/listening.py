"""The address on which process 0 listens, and sockets that do. Read next: `rendezvous_server.py`."""

import contextlib
import errno
import os
import socket
from pathlib import Path

from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import is_loopback

_LISTENING = "0A"  # the state of a socket in /proc/net/tcp


def listen_host(host: str) -> str:
    """The address on which process 0 listens if others reach it as `host`, "" for all.

    Loopback if that is; the address itself if `host` is an address of this machine, or a name with exactly one that is.
    A name may mean a loopback address here alone (127.0.1.1 in Debian's /etc/hosts), and an address another machine
    that passes connections on: then all.
    """
    if is_loopback(host):
        return "::1" if ":" in host else "127.0.0.1"
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return ""  # a pod's own name is known late
    address = found.pop()
    return "" if found or is_loopback(address) or not _is_own(address) else address


def _is_own(address: str) -> bool:
    """Whether packets to it would stay on this machine: then their source is the same address."""
    if "%" in address:  # of one link alone
        return False
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            return probe.getsockname()[0] == address
    except OSError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A listening socket where `listen_host` says. Raises UsageError if the port is taken."""
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


def listening_process(port: int) -> int | None:
    """The process that listens on a port of this machine; None if that cannot be known: another user's, or no Linux."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            inodes |= {row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port}
    links = {f"socket:[{inode}]" for inode in inodes}
    for file in Path("/proc").glob("[0-9]*/fd/*") if links else ():
        with contextlib.suppress(OSError):
            if os.readlink(file) in links:
                return int(file.parts[2])
    return None
