"""A folder of files, on a disk or in a bucket, read by name. Read next: `stored_leaves.py`.

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

from openpi_train.runtime.exits import CheckpointError

SCHEMES = ("gs", "s3", "http", "https")
# Of the first, small requests: without a network, tensorstore itself tries for a quarter of an hour.
_RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder; `str` is what an error calls it. `url` has no slash at its end."""

    url: str

    @classmethod
    def of(cls, where: str | Path) -> "Place":
        """The folder that a user named: a path, or an address of one of `SCHEMES`. Raises CheckpointError."""
        text = str(where)
        scheme = re.match(r"(\w+)://", text)
        if scheme is None:
            # Links stay: beside what a link `params` points to there are no norm stats.
            return cls(os.path.abspath(Path(text).expanduser()))
        if scheme[1] not in SCHEMES:
            raise CheckpointError(
                f"{text}: addresses of {scheme[1]}:// are not read; allowed: a path, or one of "
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
    def parent(self) -> "Place":
        """The folder around it."""
        return Place(self.url.rpartition("/")[0])

    @property
    def kvstore(self) -> str:
        """The folder as tensorstore's URL."""
        return f"{self.url}/" if self.local is None else f"{self.local.as_uri()}/"

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.local / name).is_file() if self.local else self._read(name, 0, 1) is not None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes of a file from `begin` to before `end`. Raises CheckpointError if it cannot be read."""
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
            raise CheckpointError(f"{self}/{name} cannot be read: {error.strerror}") from error

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object that a file holds. Raises CheckpointError if it cannot be read, or is none."""
        try:
            found = json.loads(self.read(name))
        except ValueError as error:
            raise CheckpointError(f"{self}/{name} is no JSON ({error}); fetch it again") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{self}/{name} holds no names but {type(found).__name__}; fetch it again")
        return found

    def names(self, below: str = "") -> list[str]:
        """The files below it, by path, sorted; those whose path begins with `below`."""
        if self.local is not None:
            files = (path for path in self.local.rglob("*") if path.is_file())
            return sorted(name for path in files if (name := path.relative_to(self.local).as_posix()).startswith(below))
        import tensorstore

        prefix = tensorstore.KvStore.KeyRange(below, _after(below)) if below else None
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
            raise CheckpointError(
                f"{self} cannot be read: {said}. Check the address, the network and the credentials; or copy it to a "
                "local or shared disk and name that"
            ) from error


def _after(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
