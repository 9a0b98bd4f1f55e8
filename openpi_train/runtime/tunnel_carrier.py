"""Passes on what the two ends of connections say to each other, as a program of its own. Read next: `tunnel.py`.

    python -P -S tunnel_carrier.py DESCRIPTOR

It gets pairs of connected sockets over the Unix socket of this number, and ends when that is closed and every pair has
ended. Some calls of jax keep Python's lock while they wait for an answer, which a thread of theirs could not bring.
"""

import asyncio
import contextlib
import signal
import socket
import sys

READY = b"r"
_PART_BYTES = 1 << 16
# A request to stop is for the training process, which still has something to say.
_NOT_OURS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


async def serve(control: socket.socket) -> None:
    """Carry pairs until `control` is closed and all pairs have ended."""
    control.setblocking(False)
    control.send(READY)
    carried: set[asyncio.Task] = set()
    while ends := await _next_pair(control):
        task = asyncio.create_task(_carry(*ends))
        carried.add(task)
        task.add_done_callback(carried.discard)
    await asyncio.gather(*carried)


async def _next_pair(control: socket.socket) -> list[socket.socket]:
    """Two connected sockets; none once `control` is closed."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(control, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(control)
    _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
    return [socket.socket(fileno=one) for one in descriptors]


async def _carry(one: socket.socket, other: socket.socket) -> None:
    with one, other:
        (from_one, to_one), (from_other, to_other) = [await asyncio.open_connection(sock=end) for end in (one, other)]
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


if __name__ == "__main__":
    for name in _NOT_OURS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        asyncio.run(serve(end))
