"""A limit on the memory of a host's processes: a cgroup, of version 1 or 2. Read next: `netns.py`."""

import contextlib
import os
import time
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def why_no_limit() -> str | None:
    """Why the memory of processes cannot be limited here; None if it can."""
    folder = _own_group()
    if folder is None:
        return "no memory cgroup is mounted"
    probe = folder / f"probe_{os.getpid()}"
    try:
        probe.mkdir()
        limit = next((name for name in ("memory.limit_in_bytes", "memory.max") if (probe / name).exists()), None)
        probe.rmdir()
    except OSError as error:
        return f"no memory cgroup can be made in {folder} ({error.strerror})"
    return None if limit else f"{folder} does not let its groups limit memory (cgroup.subtree_control)"


class MemoryLimit:
    """A cgroup of `size_bytes`; processes that are started behind `prefix` are in it. The kernel kills the largest."""

    def __init__(self, name: str, size_bytes: int):
        folder = _own_group()
        assert folder is not None, "ask why_no_limit first"
        self._folder = folder / f"drill_{os.getpid()}_{name}"
        self._folder.mkdir()
        limit = self._folder / "memory.limit_in_bytes"
        (limit if limit.exists() else self._folder / "memory.max").write_text(str(size_bytes))
        with contextlib.suppress(OSError):
            (self._folder / "memory.swap.max").write_text("0")
        self.prefix = ("sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "limited")

    def remove(self) -> None:
        """Remove the group; its processes must have ended."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)


def _own_group() -> Path | None:
    """The memory cgroup of this process, None if there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, kinds, place = line.split(":", 2)
        if "memory" in kinds.split(","):
            return _below(_V1, place)
        if number == "0" and (_V2 / "cgroup.controllers").exists():
            return _below(_V2, place)
    return None


def _below(root: Path, place: str) -> Path | None:
    folder = root / place.lstrip("/")
    return folder if folder.is_dir() else None
