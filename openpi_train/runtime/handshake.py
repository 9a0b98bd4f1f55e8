"""What two processes of a run say to show each other that they know its token, which is never sent.

    process      {"openpi_train": 3, "nonce": N}
    process 0    {"nonce": M, "token_file": name of a `TokenFile` or null, "started": whether the run has}
    process      {"said": text of its `Hello`, "proof": of the token, "process", N, M and the text}
    process 0    {"said": '"welcome"', "proof": of the token, "process 0", N, M and the text}
    process 0    {"said": its verdict, "proof": likewise}

Once the run has started, a process calls again for its tunnel (`tunnel.py`), and says `{"tunnel": its index}` instead
of the `Hello`; after "welcome" the connection carries what jax says. A line of JSON each. N and M are new for each
connection, so nobody can say again what was overheard. Process 0 proves itself, too: a stranger in its place is not
believed. What follows on a connection (`peer.py`) is not signed: whoever can change packets of an open connection can
still end the run. Read next: `rendezvous.py`, `rendezvous_server.py`.
"""

import dataclasses
import json
import secrets
import socket
from typing import Any

from openpi_train.runtime import job_token
from openpi_train.runtime.lines import send_line

_VERSION = 3
_NONCE_LIMIT = 64
PROCESS, PROCESS_0 = "process", "process 0"
WELCOME = "welcome"
# To whoever does not know the token; not signed, so that nobody gets a signature for it.
REFUSED = {"said": "refused", "proof": ""}


class NotProven(ValueError):
    """The other end does not know the token. `said` is what it claims."""

    def __init__(self, said: str):
        super().__init__("it does not know the token of the run")
        self.said = said


@dataclasses.dataclass(frozen=True, kw_only=True)
class Challenge:
    """What process 0 says first."""

    nonce: str
    token_file: str | None
    started: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signing:
    """One end of a connection: signs what it says, and believes what the other end has signed."""

    token: str = dataclasses.field(repr=False)
    side: str
    nonces: tuple[str, str]
    """Of the process, and of process 0."""

    def say(self, connection: socket.socket, message: object) -> None:
        """Send a signed message, any JSON value. Raises OSError if nobody receives it."""
        text = json.dumps(message)
        send_line(connection, {"said": text, "proof": job_token.proof(self.token, self.side, *self.nonces, text)})

    def believed(self, line: bytes) -> Any:
        """The message in a line of the other end. Raises NotProven, or ValueError if it is no such line."""
        told = _object(line, said=str, proof=str)
        other = PROCESS_0 if self.side == PROCESS else PROCESS
        if not job_token.is_proof(told["proof"], self.token, other, *self.nonces, told["said"]):
            raise NotProven(told["said"])
        return _json(told["said"])


def new_nonce() -> str:
    """A number that is used once."""
    return secrets.token_hex(16)


def introduction(nonce: str) -> dict[str, Any]:
    """The first line of a process."""
    return {"openpi_train": _VERSION, "nonce": nonce}


def read_introduction(line: bytes) -> str:
    """The nonce of an unknown program. Raises ValueError if it is none of ours."""
    told = _object(line, openpi_train=int, nonce=str)
    if told["openpi_train"] != _VERSION or len(told["nonce"]) > _NONCE_LIMIT:
        raise ValueError(f"{line[:60]!r} is no introduction of ours")
    return told["nonce"]


def tunnel_request(process_index: int) -> dict[str, Any]:
    """What a process says, signed, that calls for its tunnel."""
    return {"tunnel": process_index}


def read_tunnel_request(said: Any, process_count: int) -> int:
    """Which process calls for its tunnel. Raises ValueError if none of ours does."""
    index = said.get("tunnel") if isinstance(said, dict) else None
    if type(index) is int and 1 <= index < process_count and len(said) == 1:
        return index
    raise ValueError(f"{str(said)[:60]!r} is no call for a tunnel")


def read_challenge(line: bytes) -> Challenge:
    """Process 0's first line. Raises ValueError if it is none of ours."""
    return Challenge(**_object(line, nonce=str, token_file=str | None, started=bool))


def _object(line: bytes, **kinds: Any) -> dict[str, Any]:
    """The JSON object with exactly these entries, of these types."""
    told = _json(line)
    if not (
        isinstance(told, dict)
        and told.keys() == kinds.keys()
        and all(isinstance(told[name], kind) for name, kind in kinds.items())
    ):
        raise ValueError(f"{line[:60]!r} is no line of ours")
    return told


def _json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:60]!r} is no line of ours") from None
