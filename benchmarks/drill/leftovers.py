"""What ended starts of a run have left on the hosts and in its directory, and whether new ones hold more.

Read next: `drill_loop.py`, which asks after each fault.
"""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.drill import run_processes
from benchmarks.drill.laboratory import Laboratory
from benchmarks.drill.netns import Host
from benchmarks.drill.run_processes import Footprint, RunProcess
from benchmarks.drill.running import Running

_SETTLE_S = 30.0
_DRAFT = re.compile(r"(\d+)\.(saving|deleting|damaged|interrupted|passed-over).*|.*\.(partial|draft|tmp)")
_LISTENER = re.compile(r'\S+:(\d+)\s.*?\("([^"]+)",pid=(\d+)')
# Of a host's /tmp: the launcher's status files, and the run's own local saves.
_TEMPORARY = re.compile(r"openpi_train_\w+")
# Of a start that lost its power there: the next one on that host removes it.
_OF_JAX_START = re.compile(r"openpi_train-jax-\w+")
# What a start may hold more than the first, at least for a moment of so many: Orbax has event loops and files of
# its own for each save, which go with the next collection of garbage.
_MORE, _SAMPLES, _PAUSE_S = Footprint(files=40, threads=16, memory_bytes=150 << 20), 8, 0.2
_MORE_OF_LAUNCHER = Footprint(files=4, threads=4, memory_bytes=30 << 20)


class Baseline:
    """The state of hosts and processes during the first start, with which later ones are compared."""

    def __init__(self, lab: Laboratory, run: Running):
        self._lab, self._run = lab, run
        self._processes = _footprints(run)
        self._launcher = run_processes.footprint(run.launched.process.pid)
        self._temporary = {host.name: _names(host, "tmp") for host in lab.network.hosts}
        self._shared_memory = {host.name: len(_names(host, "dev/shm")) for host in lab.network.hosts}

    def problems(self, allowed: Collection[int]) -> list[str]:
        """What is wrong now, once passing things have had time to pass; `allowed` are processes that may be left."""
        deadline = time.monotonic() + _SETTLE_S
        while (found := self._left(allowed)) and time.monotonic() < deadline:
            time.sleep(0.3)
        return found + self._growth()

    def _left(self, allowed: Collection[int]) -> list[str]:
        run, present = self._run, self._run.present()
        now = {one.pid for one in present.values()} | set(allowed)
        found = [f"process {one.pid} of an earlier start is left on node{one.host}" for one in _old(run, now)]
        for index, host in enumerate(self._lab.network.hosts):
            if not host.is_on():
                continue
            own = [one for one in present.values() if one.host == index]
            found += _ports(host, [one.pid for one in own] + list(allowed))
            if len(remote := host.find("openpi_train.launch.remote")) > bool(own):
                found.append(f"{len(remote)} launchers' ends are on {host.name}, for {len(own)} processes")
            if len(blocks := _names(host, "dev/shm")) > self._shared_memory[host.name]:
                found.append(f"shared memory is left on {host.name}: {', '.join(sorted(blocks))}")
            names = _names(host, "tmp")
            temporary = [name for name in names if _TEMPORARY.fullmatch(name)]
            others = names - set(temporary) - self._temporary[host.name] - {"local_checkpoints"}
            others -= set() if own else set(filter(_OF_JAX_START.fullmatch, names))
            if len(temporary) > bool(own) or others:
                found.append(f"temporary files are left on {host.name}: {', '.join([*temporary, *sorted(others)])}")
        return found + _drafts(run)

    def _growth(self) -> list[str]:
        found = []
        for rank, now in _footprints(self._run).items():
            more = _more(f"process {rank}", self._processes.get(rank, now), now, _MORE)
            found += more + ([run_processes.open_files(self._run.present()[rank].pid)] if more else [])
        launcher = run_processes.footprint(self._run.launched.process.pid)
        if launcher and self._launcher:
            found += _more("the launcher", self._launcher, launcher, _MORE_OF_LAUNCHER)
        return found


def _footprints(run: Running) -> Mapping[int, Footprint]:
    """The least that each process has held during some saves, by rank."""
    found: dict[int, list[Footprint]] = {rank: [] for rank in run.present()}
    for _ in range(_SAMPLES):
        for rank, one in run.present().items():
            if (held := run_processes.footprint(one.pid)) is not None:
                found[rank].append(held)
        time.sleep(_PAUSE_S)
    return {rank: _least(samples) for rank, samples in found.items() if samples}


def _least(samples: Sequence[Footprint]) -> Footprint:
    return Footprint(*(min(values) for values in zip(*map(dataclasses.astuple, samples), strict=True)))


def _old(run: Running, now: Collection[int]) -> list[RunProcess]:
    return [one for one in run.processes() if one.pid not in now]


def _more(who: str, before: Footprint, now: Footprint, allowed: Footprint) -> list[str]:
    return [
        f"{who} holds {getattr(now, name):,} {name}, in the first start {getattr(before, name):,}"
        for name in ("files", "threads", "memory_bytes")
        if getattr(now, name) > getattr(before, name) + getattr(allowed, name)
    ]


def _names(host: Host, folder: str) -> set[str]:
    """The names in a folder of a host."""
    try:
        return set(os.listdir(f"/proc/{host.pid}/root/{folder}"))
    except OSError:  # it has no power
        return set()


def _ports(host: Host, pids: Collection[int]) -> list[str]:
    """The listening ports of processes that are neither the host's nor of these."""
    inner = {_inner(pid) for pid in pids}
    listeners = [_LISTENER.search(line) for line in host.run("ss", "-Hltnp").splitlines()]
    return [
        f"port {found[1]} on {host.name} is held by {found[2]} ({found[3]})"
        for found in listeners
        if found and found[2] != "sshd" and int(found[3]) not in inner
    ]


def _inner(pid: int) -> int:
    """The number of a process on its host."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
    return 0


def _drafts(run: Running) -> list[str]:
    """What saves and clean-ups have left in the run's directory; a save that is under way is later than all others."""
    newest = max(run.checkpoints(), default=0)
    found = {path.name: _DRAFT.fullmatch(path.name) for path in run.files().iterdir()}
    left = [name for name, match in found.items() if match and (match[1] is None or int(match[1]) < newest)]
    return [f"the run directory has {', '.join(sorted(left))}"] if left else []
