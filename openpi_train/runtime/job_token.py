"""The secret that the processes of one start share, and proofs that a process knows it. Read next: `handshake.py`.

Launchers give it in a variable, or in a variable that names a file. Otherwise process 0 writes a new one into a folder
that all processes see, in a file that only their user can read, and tells its name to whoever calls.
"""

import contextlib
import dataclasses
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.private_file import warn_if_others_can_read, write_private

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "OPENPI_TRAIN_JOB_TOKEN"
FILE_VARIABLE = "OPENPI_TRAIN_JOB_TOKEN_FILE"
_PREFIX = ".meeting-"
_LIMIT_S = 10.0  # network file systems may show a new file some seconds late
_STALE_S = 86400.0


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(16)


def given_token(environ: Mapping[str, str]) -> str | None:
    """The token that a launcher or the user gives, None without one. Raises UsageError if its file cannot be read."""
    if token := environ.get(TOKEN_VARIABLE):
        return token
    if not (name := environ.get(FILE_VARIABLE)):
        return None
    path = Path(name)
    try:
        token = path.read_text(encoding="utf-8").strip()
        warn_if_others_can_read(path, "the job's token")
    except (OSError, ValueError) as error:
        raise UsageError(f"{FILE_VARIABLE}={name}: the job's token cannot be read there ({error})") from error
    if not token:
        raise UsageError(f"{FILE_VARIABLE}={name}: the file is empty; it must hold the job's token")
    return token


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A token of one start that lies in a folder which all processes see."""

    path: Path
    token: str = dataclasses.field(repr=False)
    is_first: bool
    """Whether the folder was not there before."""

    @classmethod
    def write(cls, folder: Path) -> "TokenFile":
        """A new one in the folder, which is created. Raises OSError."""
        is_first = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{_PREFIX}*"):  # of a start that was killed in its meeting
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _STALE_S:
                    old.unlink()
        made = cls(folder / f"{_PREFIX}{secrets.token_hex(16)}", new_token(), is_first)
        write_private(made.path, made.token)
        warn_if_others_can_read(made.path, "the job's token")
        return made

    def remove(self) -> None:
        """Remove it once the meeting is over; a start that fails then leaves no trace."""
        with contextlib.suppress(OSError):
            self.path.unlink()
            if self.is_first:
                self.path.parent.rmdir()  # if it is empty


def read_token(folder: Path, name: str) -> str:
    """The token that process 0 has put there. Raises UsageError if the file cannot be seen or read.

    The name comes from whoever answers at process 0's address: any other kind of name is refused.
    """
    if not re.fullmatch(rf"{re.escape(_PREFIX)}[0-9a-f]{{32}}", name):
        raise UsageError(f"{name[:60]!r} is no name of a file with a job's token: another program answers")
    deadline = time.monotonic() + _LIMIT_S
    while True:
        try:
            if token := (folder / name).read_text(encoding="utf-8"):
                return token
            problem = "it is empty"
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise UsageError(
                f"this process does not see the token that process 0 has written into its folder {folder} ({problem}): "
                "all hosts must give the same --checkpoint-base-dir, on a file system that they share, to the same "
                f"user; or give all processes one secret word in {TOKEN_VARIABLE}"
            )
        time.sleep(0.1)


def proof(token: str, *said: str) -> str:
    """A proof that whoever has made it knows the token and says this: HMAC-SHA256 (RFC 2104) in hexadecimal digits."""
    return hmac.new(token.encode(), json.dumps(said).encode(), "sha256").hexdigest()


def is_proof(given: object, token: str, *said: str) -> bool:
    """Whether `given`, from an unknown program, is the `proof` of the same; compared in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), proof(token, *said).encode())
