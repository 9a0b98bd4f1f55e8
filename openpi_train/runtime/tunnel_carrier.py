"""Passes on what the two ends of connections say to each other, as a program of its own. Read next: `tunnel.py`.

    python -P -S tunnel_carrier.py DESCRIPTOR

It gets pairs of connected sockets over the Unix socket of this number, and ends when that is closed and every pair has
ended. Some calls of jax keep Python's lock while they wait for an answer, which a thread of theirs could not bring.
Every start of a run with several processes waits for this program: it imports little.
"""

import selectors
import signal
import socket
import sys

READY = b"r"
_PART_BYTES = 1 << 16
# A request to stop is for the training process, which still has something to say.
_NOT_OURS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class Pair:
    """Two connected sockets. Where one ends, the other is told what was said before, and ends, too."""

    def __init__(self, *ends: socket.socket):
        self.ends = ends
        self.unsent = dict.fromkeys(ends, b"")
        """What an end has yet to be told: until then the other is not heard."""
        self.is_open = True
        for end in ends:
            end.setblocking(False)

    def other(self, end: socket.socket) -> socket.socket:
        return self.ends[1 - self.ends.index(end)]

    def wanted(self, end: socket.socket) -> int:
        """The events of `selectors` that an end waits for."""
        read = selectors.EVENT_READ if self.is_open and not self.unsent[self.other(end)] else 0
        return read | (selectors.EVENT_WRITE if self.unsent[end] else 0)

    def pass_on(self, end: socket.socket, events: int) -> None:
        """Do what an end is ready for."""
        try:
            if events & selectors.EVENT_WRITE:
                self.unsent[end] = self.unsent[end][end.send(self.unsent[end]) :]
            if events & selectors.EVENT_READ:
                part = end.recv(_PART_BYTES)
                self.unsent[self.other(end)] = part
                self.is_open = bool(part)
        except BlockingIOError:
            pass
        except OSError:  # a connection that broke is closed, too
            self.unsent[end], self.is_open = b"", False

    def wait(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wait for what the ends want now. Where both want nothing more they are closed."""
        for end in self.ends:
            wanted, known = self.wanted(end), end in selector.get_map()
            if wanted and known:
                selector.modify(end, wanted, self)
            elif wanted:
                selector.register(end, wanted, self)
            elif known:
                selector.unregister(end)
        if not any(map(self.wanted, self.ends)):
            for end in self.ends:
                end.close()


def serve(control: socket.socket) -> None:
    """Carry pairs until `control` is closed and all pairs have ended."""
    control.send(READY)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while selector.get_map():
            for key, events in selector.select():
                pair, end = key.data, key.fileobj
                if end is control:
                    _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
                    if descriptors:
                        Pair(*(socket.socket(fileno=one) for one in descriptors)).wait(selector)
                    else:
                        selector.unregister(control)
                elif ready := events & pair.wanted(end):  # else the other end's turn has changed it
                    pair.pass_on(end, ready)
                    pair.wait(selector)


if __name__ == "__main__":
    for name in _NOT_OURS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        serve(end)
