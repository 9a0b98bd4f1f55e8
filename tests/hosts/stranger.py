"""A program on another host that disturbs a run: `stranger.py crowd HOST:PORT ...`, `record FOLDER`, `replay FOLDER`.

Imports nothing of the package: it knows what is public, and what it has overheard.
"""

import contextlib
import itertools
import os
import random
import resource
import socket
import sys
import threading
from pathlib import Path

DRAW = random.Random(0)
INTRODUCTION = b'{"openpi_train": 3, "nonce": "00000000000000000000000000000000"}\n'
SAID = (
    b"",
    b"\n" * 1000,
    b"x" * 2_000_000,
    DRAW.randbytes(3000),
    (0).to_bytes(8, "little") * 64,  # gloo's first connection
    b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + DRAW.randbytes(500),  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",  # gRPC
    INTRODUCTION[:20],
    INTRODUCTION,
    INTRODUCTION + b'{"said": "{\\"tunnel\\": 1}", "proof": "0"}\n',
)
HELD, PASSING = 150, 600


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


def crowd(*addresses: str) -> None:
    """Fill each port with connections that say all kinds of things and stay, and with ones that go at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    held = []
    for address in addresses:
        for _, said in zip(range(HELD), itertools.cycle(SAID), strict=False):
            with contextlib.suppress(OSError):  # its queue is full, or it has heard enough
                held.append(connect(address))
                held[-1].setblocking(False)
                held[-1].send(said)
        for _ in range(PASSING):
            with contextlib.suppress(OSError):
                connect(address).close()
    print("done", flush=True)
    sys.stdin.read()


def record(folder: str) -> None:
    """Pass connections to this host's port on to node0's, and write down what their makers say."""
    listener = socket.create_server(("", 29500))
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
    print("done", flush=True)
    for number in itertools.count():
        caller, _ = listener.accept()
        zero = socket.create_connection(("node0", 29500))
        said = Path(folder, f"said_{number}")
        threading.Thread(target=pass_on, args=(caller, zero, said)).start()
        threading.Thread(target=pass_on, args=(zero, caller, None)).start()


def pass_on(source: socket.socket, target: socket.socket, said: Path | None) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            target.sendall(part)
            if said:
                with said.open("ab") as file:
                    file.write(part)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def replay(folder: str) -> None:
    """Say the handshakes again that were written down, two lines each; prints the last line of each answer."""
    for said in sorted(Path(folder).glob("said_*")):
        with connect("node0:29500") as again:
            again.settimeout(30)
            again.sendall(b"".join(said.read_bytes().splitlines(keepends=True)[:2]))
            answer = b""
            with contextlib.suppress(OSError):
                while part := again.recv(1 << 16):
                    answer += part
        print(answer.decode(errors="replace").strip().rpartition("\n")[2], flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
