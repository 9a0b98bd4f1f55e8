"""Carries the connections of jax's clients to jax's service, which listens on no network. Read next: `session.py`.

jax's coordination service asks for nothing: whoever reaches it can end a process, and read and write all that the
processes agree on. So it listens on a Unix socket in a folder that only the user can enter. jax's client in another
process finds such a socket there, too, whose connections are carried over ones that process 0's door has let in
(`door.py`). The folders are there only while jax starts: a client connects once, and gives up where that breaks.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from openpi_train.runtime.exits import PeerLostError, UsageError
from openpi_train.runtime.waiting import Wait

logger = logging.getLogger(__name__)

_PREFIX = "openpi_train-jax-"
_PART_BYTES = 1 << 16
# Process 0 may begin to start jax later than the others, or be slower at it.
_SERVICE_S = 60.0
# For what jax's service has said last to leave process 0.
_LAST_S = 5.0


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
    """The connections that this process carries, all in one thread."""

    def __init__(self, reach: Callable[[], tuple[socket.socket, bytes]] | None = None):
        """`reach` makes a connection to process 0 that its door has let in, and gives what has come over it already;
        None on process 0 itself."""
        self._reach = reach
        self._path: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._carried: set[asyncio.Task] = set()

    @contextlib.contextmanager
    def starting(self, path: Path) -> Iterator[None]:
        """Inside of the block jax starts: its service listens at `path` on process 0, and its client calls there."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name="tunnels", daemon=True).start()
        self._path = path
        if self._reach is None:
            yield
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
        """On process 0: carry a connection that the door has let in; `received` has already been read from it."""
        service = Wait(_SERVICE_S).until_it_works(self._call_service, lambda: "waiting for jax to start", pause_s=0.02)
        self.carry(connection, service, received)

    def carry(self, one: socket.socket, other: socket.socket, received: bytes) -> None:
        """Pass on what either end says to the other, until one of them closes; then close both.

        `received` has already been read from `one`.
        """
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._begin, self._loop, one, other, received)
        except RuntimeError:  # closed: the run has ended
            one.close()
            other.close()

    def close(self) -> None:
        """Carry no more. On process 0 the service, which has shut down, has ended all: its last words go out."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._end(_LAST_S if self._reach is None else 0.0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _call_service(self) -> socket.socket:
        if self._path is None:
            raise FileNotFoundError
        service = socket.socket(socket.AF_UNIX)
        try:
            service.connect(str(self._path))
        except OSError:
            service.close()
            raise
        return service

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

    def _begin(
        self, loop: asyncio.AbstractEventLoop, one: socket.socket, other: socket.socket, received: bytes
    ) -> None:
        task = loop.create_task(_carry(one, other, received))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    async def _end(self, limit_s: float) -> None:
        if self._carried:
            await asyncio.wait(self._carried, timeout=limit_s)
        left = set(self._carried)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _carry(one: socket.socket, other: socket.socket, received: bytes) -> None:
    with one, other:
        (from_one, to_one), (from_other, to_other) = [await asyncio.open_connection(sock=end) for end in (one, other)]
        to_other.write(received)
        await asyncio.gather(_pass_on(from_one, to_other), _pass_on(from_other, to_one))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(_PART_BYTES):
            writer.write(part)
            await writer.drain()
    except OSError:
        pass  # a connection that broke is closed, too
    finally:
        writer.close()  # once all is sent; then the other direction ends, too
    with contextlib.suppress(OSError):
        await writer.wait_closed()
