"""Folders of files on a disk or in a bucket, read by name. Read next: `stored_leaves.py`.

Buckets are read through tensorstore's own drivers, which read parts of files: nothing is copied to a disk first.
Credentials are the standard ones of each (`GOOGLE_APPLICATION_CREDENTIALS`, `AWS_*`); public buckets need none.
"""

import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from openpi_train.runtime.exits import CheckpointError, kind_for

SCHEMES = ("gs", "s3", "http", "https")
# Retries of the first, small requests: by default tensorstore retries for 15 minutes without a network.
_RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder; `str` gives its name for errors. `url` has no trailing slash."""

    url: str

    @classmethod
    def of(cls, where: str | Path) -> "Place":
        """The folder that a user gave: a path, or an address with one of `SCHEMES`. Raises CheckpointError."""
        text = str(where)
        scheme = re.match(r"(\w+)://", text)
        if scheme is None:
            # Links are not resolved: there are no norm stats beside the target of a link `params`.
            return cls(os.path.abspath(Path(text).expanduser()))
        if scheme[1] not in SCHEMES:
            raise CheckpointError(
                f"{text}: addresses with {scheme[1]}:// are not supported; allowed: a path, or one of "
                + ", ".join(f"{name}://" for name in SCHEMES)
            )
        return cls(text.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Place":
        return Place(f"{self.url}/{name}")

    @property
    def local(self) -> Path | None:
        """The folder on this machine's file systems; None in a bucket."""
        return None if "://" in self.url else Path(self.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Place":
        """The folder that contains it."""
        return Place(self.url.rpartition("/")[0])

    @property
    def kvstore(self) -> str:
        """The folder as tensorstore's URL."""
        return f"{self.url}/" if self.local is None else f"{self.local.as_uri()}/"

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.local / name).is_file() if self.local else self._read(name, 0, 1) is not None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes of a file from `begin` up to `end`, exclusive. Raises CheckpointError if it cannot be read."""
        if self.local is None:
            content = self._read(name, begin, end)
            if content is None:
                raise CheckpointError(f"{self}/{name} is missing")
            return content
        try:
            with (self.local / name).open("rb") as file:
                file.seek(begin)
                return file.read() if end is None else file.read(end - begin)
        except OSError as error:
            raise kind_for(error, CheckpointError)(f"{self}/{name} cannot be read: {error.strerror}") from error

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file. Raises CheckpointError if it cannot be read, or is not one."""
        try:
            found = json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self}/{name} is not JSON ({error}); fetch it again") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{self}/{name} holds a {type(found).__name__}, not a JSON object; fetch it again")
        return found

    def names(self, below: str = "") -> list[str]:
        """The paths of the files in it, recursively, sorted; only those that begin with `below`."""
        if self.local is not None:
            files = (path for path in self.local.rglob("*") if path.is_file())
            return sorted(name for path in files if (name := path.relative_to(self.local).as_posix()).startswith(below))
        import tensorstore

        # Up to the first name that is after all that begin with it.
        prefix = tensorstore.KvStore.KeyRange(below, below[:-1] + chr(ord(below[-1]) + 1)) if below else None
        return sorted(key.decode() for key in self._remote(lambda: self._store.list(prefix).result()))

    def _read(self, name: str, begin: int = 0, end: int | None = None) -> bytes | None:
        found = self._remote(lambda: self._store.read(name, byte_range=slice(begin, end)).result())
        return None if found.state == "missing" else bytes(found.value)

    @functools.cached_property
    def _store(self) -> Any:
        import tensorstore

        retries = {f"{kind}_request_retries": _RETRIES for kind in ("gcs", "s3", "http")}
        context = tensorstore.Context(retries)
        return self._remote(lambda: tensorstore.KvStore.open(self.kvstore, context=context).result())

    def _remote(self, ask: Any) -> Any:
        try:
            return ask()
        except (ValueError, OSError) as error:
            said = str(error).partition(" [")[0]
            raise kind_for(error, CheckpointError)(
                f"{self} cannot be read: {said}. Check the address, the network and the credentials; or copy it to a "
                "local or shared disk and name that"
            ) from error
