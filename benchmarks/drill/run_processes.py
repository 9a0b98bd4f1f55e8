"""The processes of a run on the hosts of a network, as this machine's /proc shows them. Read next: `running.py`."""

import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drill.netns import Host

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunProcess:
    """A training process: the number of its host, its own, its rank, and the token of its start."""

    host: int
    pid: int
    rank: int
    token: str
    began: int


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a process holds of the system."""

    files: int
    threads: int
    memory_bytes: int


def find(hosts: Sequence[Host]) -> list[RunProcess]:
    """All training processes on the hosts, of any start, and those that they have left behind."""
    found = []
    for index, host in enumerate(hosts):
        for pid in host.pids():
            with contextlib.suppress(OSError, ValueError, IndexError):
                folder = Path(f"/proc/{pid}")
                state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
                words = (folder / "environ").read_bytes().split(b"\0")
                environ = {name: value.decode() for name, _, value in (word.partition(b"=") for word in words)}
                if state == "Z" or b"RANK" not in environ:
                    continue
                token = environ[b"OPENPI_TRAIN_JOB_TOKEN"]
                rank = int(environ[b"RANK"])
                found.append(RunProcess(host=index, pid=pid, rank=rank, token=token, began=int(fields[18])))
    return found


def open_files(pid: int) -> str:
    """What a process has open, the most frequent first."""
    found: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[re.sub(r"\d+", "N", os.readlink(path))] += 1
    return ", ".join(f"{count} x {name}" for name, count in found.most_common())


def footprint(pid: int) -> Footprint | None:
    """What a process holds; None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        pages = int((folder / "statm").read_text().split()[1])
        return Footprint(len(os.listdir(folder / "fd")), int(status["Threads"]), pages * _PAGE_BYTES)
    except (OSError, KeyError):
        return None
