"""What a process says at process 0's door, from the description in `runtime/handshake.py` and Python's own `hmac`."""

import hmac
import json
import socket


def read(connection: socket.socket) -> dict:
    """The next line; {} where the other end closes."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            return {}
        line += part
    return json.loads(line)


def challenged(connection: socket.socket, nonce: str = "0" * 32) -> tuple[str, str]:
    """Introduce ourselves; the nonces of both ends."""
    connection.sendall(json.dumps({"openpi_train": 3, "nonce": nonce}).encode() + b"\n")
    return nonce, read(connection)["nonce"]


def signed(said, token: str, nonces: tuple[str, str], side: str = "process") -> bytes:
    """The line that says it with a proof of the token."""
    text = json.dumps(said)
    message = json.dumps([side, *nonces, text]).encode()
    return json.dumps({"said": text, "proof": hmac.new(token.encode(), message, "sha256").hexdigest()}).encode() + b"\n"


def heard(connection: socket.socket, token: str, nonces: tuple[str, str]):
    """The next message of process 0, whose proof must be right."""
    told = read(connection)
    assert json.dumps(told).encode() + b"\n" == signed(json.loads(told["said"]), token, nonces, side="process 0")
    return json.loads(told["said"])


def admitted(connection: socket.socket, hello: dict, token: str) -> tuple[str, str]:
    """Come in as a process of the run does; the nonces."""
    nonces = challenged(connection)
    connection.sendall(signed(hello, token, nonces))
    assert heard(connection, token, nonces) == "welcome"
    return nonces
