"""A shared disk that misbehaves: a folder seen through FUSE, which refuses or delays what it is told to.

    with BadDisk(behind=folder, at=mount_point) as disk:
        number = disk.misbehave("EIO", on="*/manifest.json", operations=("open", "read"), times=3)
        ...
        assert disk.met(number)  # a fault that nobody has met tells nothing

Errors are those of a network file system: by the system's name (EIO, ESTALE, EDQUOT, EROFS, ENOSPC ...), "delay", and
"undeletable" (EACCES where files are deleted, as of a colleague's). Locks are the kernel's, for all processes of this
machine. Namespaces of mounts that are made later see the disk too. Read next: `passthrough.py`, the server.
"""

import contextlib
import ctypes.util
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Of the file system; those of one kind are refused together. "close" is where NFS tells of writes that failed.
_GROWING = ("create", "write", "mkdir", "link", "symlink", "truncate", "fallocate", "rename")
_CHANGING = (*_GROWING, "unlink", "rmdir", "attributes")
OPERATIONS = (*_CHANGING, "open", "read", "close", "fsync", "lookup", "list", "readlink", "space")
_BY_KIND = {
    "EROFS": _CHANGING,
    "ENOSPC": _GROWING,
    "EDQUOT": _GROWING,
    "undeletable": ("unlink", "rmdir"),
}
_START_S = 30.0
_CAP_SYS_ADMIN = 21


def why_not() -> str | None:
    """Why there can be no bad disk here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a disk that misbehaves needs root on Linux"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed (pip)"
    if ctypes.util.find_library("fuse3") is None or shutil.which("fusermount3") is None:
        return "libfuse is not installed (Debian: fuse3)"
    capabilities = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())["CapEff"]
    if not int(capabilities, 16) >> _CAP_SYS_ADMIN & 1:
        return "mounting is not permitted here"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be used ({error.strerror})"
    return None


class BadDisk:
    """The files of `behind`, seen and changed at `at`, an empty folder or none. To be used in a `with`.

    Its server is a process of its own, which ends, and unmounts, with the process that made it.
    """

    def __init__(self, behind: Path, at: Path):
        self.at = at.absolute()
        self._behind = behind.absolute()
        self._lock = threading.Lock()

    def __enter__(self) -> "BadDisk":
        _unmount(self.at)  # of a server that was killed
        self.at.mkdir(parents=True, exist_ok=True)
        self._behind.mkdir(parents=True, exist_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.drill.passthrough", self._behind, self.at],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run on the disk
        )
        try:
            self._answer(limit_s=_START_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def misbehave(
        self,
        kind: str,
        on: str = "*",
        operations: Sequence[str] = (),
        *,
        times: int | None = None,
        seconds: float | None = None,
        delay_s: float = 5.0,
    ) -> int:
        """Refuse or delay operations from now on; returns a number for `met`.

        Args:
            kind: an error's name ("EIO"), "delay", or "undeletable".
            on: a pattern of paths below `at`, as "*/manifest.json"; a rename is met at either of its paths.
            operations: some of `OPERATIONS`; empty: all that such an error has.
            times: as often as that; None: without end. The kernel itself asks again once where a handle is stale
                (ESTALE) or a page could not be read ahead, so that a caller sees the error from 2 on.
            seconds: for so long; None: until `heal`.
            delay_s: how long a delay is.
        """
        operations = operations or _BY_KIND.get(kind, OPERATIONS)
        if unknown := set(operations) - set(OPERATIONS):
            raise ValueError(f"no such operations: {sorted(unknown)}; there are {', '.join(OPERATIONS)}")
        number = {"delay": 0, "undeletable": errno.EACCES}.get(kind)
        return self._ask(
            "misbehave",
            name=kind,
            number=getattr(errno, kind) if number is None else number,
            on=on,
            operations=list(operations),
            times=times,
            seconds=seconds,
            delay_s=delay_s if kind == "delay" else 0.0,
        )

    def heal(self) -> None:
        """End all misbehaviour; what waits because of a delay goes on at once."""
        self._ask("heal")

    def met(self, number: int | None = None) -> Counter[str]:
        """How often each "<operation> <path>" was refused or delayed, by one misbehaviour; None: by all."""
        return Counter(self._ask("met", of=number))

    def _ask(self, what: str, **values: Any) -> Any:
        with self._lock:
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps({"what": what, **values}) + "\n")
            self._server.stdin.flush()
            return self._answer(limit_s=None)

    def _answer(self, limit_s: float | None) -> Any:
        """The server's next line; it is killed if there is none in time."""
        assert self._server.stdout is not None and self._server.stderr is not None
        timer = threading.Timer(limit_s or 0.0, self._server.kill)
        if limit_s is not None:
            timer.start()
        line = self._server.stdout.readline()
        timer.cancel()
        if not line:
            raise RuntimeError(f"the server of {self.at} has ended: {self._server.stderr.read()}")
        return json.loads(line)

    def _end(self) -> None:
        _unmount(self.at)
        with contextlib.suppress(BrokenPipeError):
            self._server.communicate()  # it ends where its input does


def _unmount(at: Path) -> None:
    """Take the disk away, also while somebody uses it; nothing if there is none."""
    subprocess.run(["umount", "--lazy", at], stderr=subprocess.DEVNULL, check=False)
