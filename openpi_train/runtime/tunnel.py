"""Carries the connections of jax's clients to jax's service, which listens on no network. Read next: `session.py`.

jax's coordination service asks for nothing: whoever reaches it can end a process, and read and write all that the
processes agree on. So it listens on a Unix socket in a folder that only the user can enter. jax's client in another
process finds such a socket there, too, whose connections are carried over ones that process 0's server has let in
(`rendezvous_server.py`), by a small program beside each process (`tunnel_carrier.py`). The folders are there only while
jax starts: a client connects once, and gives up where that breaks.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from openpi_train.runtime import tunnel_carrier
from openpi_train.runtime.exits import PeerLostError, UsageError

logger = logging.getLogger(__name__)

_PREFIX = "openpi_train-jax-"
# What Python may need to start, and none of the variables by which a training process is known.
_FOR_PYTHON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")
# Process 0 may begin to start jax later than the others, or be slower at it.
_SERVICE_S = 60.0
# For what jax's service has said last to leave this host, and for the carrier to begin.
_LAST_S, _CARRIER_S = 5.0, 60.0
_LOOK_EVERY_S = 0.02


@contextlib.contextmanager
def private_socket() -> Iterator[Path]:
    """A path for a Unix socket that no other user can reach; gone after the block.

    Raises UsageError if no folder for temporary files can hold one.
    """
    folder, lock = _private_folder()
    try:
        yield folder / "jax"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _private_folder() -> tuple[Path, int]:
    """A new folder, and a descriptor that keeps it locked."""
    problems = []
    for place in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/dev/shm"]):
        _remove_remains(Path(place))
        try:
            folder, lock = _locked_folder(place)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            continue
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(folder / "probe"))
            return folder, lock
        except OSError as error:  # the path is too long, or the file system knows no sockets
            problems.append(f"{folder}: {error.strerror or error}")
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    raise UsageError(
        f"no folder on {socket.gethostname()} can hold a Unix socket, which jax's start needs ({'; '.join(problems)}): "
        "set TMPDIR to one on a local disk, with a path of less than 70 characters"
    )


def _locked_folder(place: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))  # for this user alone
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another process has taken it for remains before it was locked


def _remove_remains(place: Path) -> None:
    """Remove the folders of processes that were killed while jax started on them: nobody holds their lock."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or another user's
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def jax_address(path: Path) -> str:
    """A Unix socket in the words of jax's clients and services (https://github.com/grpc/grpc/blob/master/doc/naming.md)."""
    return f"unix:{urllib.parse.quote(str(path))}"


class Tunnels:
    """The connections of this process that its carrier carries."""

    def __init__(self, reach: Callable[[], tuple[socket.socket, bytes]] | None = None):
        """`reach` makes a connection to process 0 that its server has let in, and gives what has come over it already;
        None on process 0 itself."""
        self._reach = reach
        self._path: Path | None = None
        self._listens = threading.Event()  # jax's service, at the path
        self._control: socket.socket | None = None
        self._carrier: subprocess.Popen | None = None

    @contextlib.contextmanager
    def starting(self, path: Path) -> Iterator[None]:
        """Inside of the block jax starts: its service listens at `path` on process 0, and its client calls there."""
        self._start_carrier()
        if self._reach is None:
            self._path = path
            over = threading.Event()
            threading.Thread(target=self._look_for_service, args=(over,), name="jax's service", daemon=True).start()
            try:
                yield
            finally:
                over.set()
            return
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), name="jax's client", daemon=True).start()
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def into_service(self, connection: socket.socket, received: bytes) -> None:
        """On process 0: carry a connection that the server has let in; `received` has already been read from it."""
        self._listens.wait(_SERVICE_S)
        self.carry(connection, self._call_service(), received)

    def carry(self, one: socket.socket, other: socket.socket, received: bytes) -> None:
        """Have passed on what either end says to the other, until one of them closes; then both are closed.

        `received`, a few bytes, has already been read from `one`. This process keeps neither.
        """
        with one, other:
            other.sendall(received)
            assert self._control is not None
            with contextlib.suppress(OSError):  # the run ends
                socket.send_fds(self._control, [b"c"], [one.fileno(), other.fileno()])

    def close(self) -> None:
        """Carry nothing new. jax has shut down: once its last words have gone out, the carrier ends."""
        assert self._control is not None and self._carrier is not None
        self._control.close()
        try:
            self._carrier.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            self._carrier.kill()
            self._carrier.wait()

    def _start_carrier(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-S", tunnel_carrier.__file__, str(theirs.fileno())]
            environ = {name: value for name, value in os.environ.items() if name in _FOR_PYTHON}
            self._carrier = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ, stdin=subprocess.DEVNULL)
        self._control.settimeout(_CARRIER_S)
        try:
            began = self._control.recv(1) == tunnel_carrier.READY
        except TimeoutError:
            began = False
        if not began:
            raise PeerLostError("the program that carries jax's connections did not start")
        self._control.settimeout(None)

    def _call_service(self) -> socket.socket:
        if self._path is None:
            raise FileNotFoundError(errno.ENOENT, "process 0 has not begun to start jax")
        service = socket.socket(socket.AF_UNIX)
        try:
            service.connect(str(self._path))
        except OSError:
            service.close()
            raise
        return service

    def _look_for_service(self, over: threading.Event) -> None:
        """Notice that the service listens: one thread for all who wait for it, who may be a thousand."""
        while not over.wait(_LOOK_EVERY_S):
            with contextlib.suppress(OSError):
                self._call_service().close()
                self._listens.set()
                return

    def _accept(self, listener: socket.socket) -> None:
        assert self._reach is not None
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # jax has started
            try:
                connection, received = self._reach()
                self.carry(connection, client, received)
            except (PeerLostError, UsageError) as error:  # jax calls again
                logger.warning("%s", error)
                client.close()
