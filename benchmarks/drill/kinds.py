"""The kinds of faults, their weights, and what is expected of each. Read next: `drill_loop.py`, which makes them.

A kind is a harm in windows of the program. Shares are roughly those of the logs of real clusters: half of the faults
are of GPUs (in the words of jaxlib's errors), an eighth of the network, a tenth each of hosts and of programs, a
twentieth of storage, and the rest are requests to stop.
"""

import dataclasses
import random
import signal
from collections.abc import Sequence

from benchmarks.drill import harms, windows
from benchmarks.drill.experiments import Drilled
from benchmarks.drill.harms import Outside
from openpi_train.faults import HARDWARE, KILLED_BY, PEER_LOST, PREEMPTED

_KILLED = frozenset(KILLED_BY + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT))
# A process that is told to stop before it has anything to save, or while others are lost.
_TERMINATED = KILLED_BY + signal.SIGTERM
# On a laptop the shares of a second: a limit of the watchdog's, and ssh's own.
_STUCK_S, _LOST_S, _PHASE_S = 30.0, 30.0, 110.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault.

    Attributes:
        harm: what the victim does to itself (`inside/sitecustomize.py`), with `value`, in `times` calls; "hold" waits
            in the window for what is done from `outside`.
        running, starting: the windows that it may strike in; of `starting` ones while another fault is mended.
        codes: the exit codes, one of which the launcher's line must have; empty: the run must go on without a restart,
            None: it may.
        names_host: the launcher's line must name the victim's host.
        noticed_s: how long the run may take to notice.
        more_lost: how many checkpoints more than the newest may be lost.
        needs: what the laboratory or the experiment must have.
        short: whether a drill of seconds can have it.
    """

    weight: float
    harm: str = "hold"
    value: object = None
    times: int = 1
    outside: Outside | None = None
    running: tuple[str, ...] = tuple(windows.RUNNING)
    starting: tuple[str, ...] = ()
    codes: frozenset[int] | None = frozenset()
    names_host: bool = True
    noticed_s: float = 5.0
    more_lost: int = 0
    needs: tuple[str, ...] = ()
    says: str = ""
    short: bool = True


_ALL_STARTING = tuple(windows.STARTING)
_SAVING = ("save copy", "save write", "commit", "naming")


def _gpu(weight: float, text: str, code: int = HARDWARE) -> Kind:
    places = {"running": ("step", "evaluation", "acting"), "starting": ("first step",)}
    return Kind(weight=weight, harm="jax", value=f"INTERNAL: {text}", codes=frozenset({code}), **places)


def _signal(weight: float, number: int, **changed: object) -> Kind:
    kind = Kind(
        weight=weight, harm="signal", value=int(number), codes=frozenset({KILLED_BY + number}), starting=_ALL_STARTING
    )
    return dataclasses.replace(kind, **changed)


def _disk(weight: float, kind: str, on: str, operations: tuple[str, ...], times: int = 3) -> Kind:
    return Kind(
        weight=weight,
        outside=harms.disk(kind, on, operations, times=times),
        codes=None,
        names_host=False,
        needs=("bad disk",),
        running=("step", "save copy", "save write", "commit", "delete"),
    )


KINDS = {
    "GPU: uncorrectable memory error": _gpu(13, "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"),
    "GPU: fell off the bus": _gpu(7, "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"),
    "GPU: launch failed": _gpu(7, "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
    "GPU: illegal address": _gpu(7, "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"),
    "GPU: link to another": _gpu(5, "CUDA_ERROR_NVLINK_UNCORRECTABLE: uncorrectable NVLink error detected"),
    "GPU: no memory for a step": dataclasses.replace(
        _gpu(3, ""), value="RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.", starting=()
    ),
    "GPU: a kernel never ends": Kind(
        weight=4,
        harm="hang",
        running=("step",),
        codes=frozenset({PEER_LOST}),
        noticed_s=_STUCK_S,
        short=False,
    ),
    "GPU: gone at the restart": Kind(
        weight=5, harm="devices", running=(), starting=("look at the devices",), codes=frozenset({HARDWARE})
    ),
    "network: NCCL's remote error": _gpu(2, "NCCL operation failed: ncclRemoteError", PEER_LOST),
    "network: cable out": Kind(
        weight=3,
        outside=harms.cut,
        starting=_ALL_STARTING,
        codes=frozenset({PEER_LOST}),
        noticed_s=_LOST_S,
        needs=("ssh",),
        short=False,
    ),
    "network: away for seconds": Kind(weight=2, outside=harms.cut_for_seconds),
    "network: slow, and loses packets": Kind(weight=2, outside=harms.slow),
    "network: two hosts do not reach each other": Kind(
        weight=1.5,
        outside=harms.partition,
        codes=frozenset({PEER_LOST}),
        names_host=False,
        noticed_s=_STUCK_S,
        short=False,
    ),
    "network: the launcher's ssh is cut": Kind(weight=1, outside=harms.cut_ssh, codes=frozenset({PEER_LOST})),
    "host: power lost": Kind(
        weight=3,
        outside=harms.power_off,
        starting=_ALL_STARTING,
        codes=frozenset({PEER_LOST}),
        noticed_s=_LOST_S,
        needs=("ssh",),
        short=False,
    ),
    "host: memory exhausted": Kind(
        weight=2, harm="memory", codes=_KILLED, starting=("compile", "first step"), noticed_s=10.0, needs=("memory",)
    ),
    "host: frozen": _signal(
        2, signal.SIGSTOP, codes=frozenset({PEER_LOST}), noticed_s=_LOST_S, starting=(), short=False
    ),
    "host: kill -9 of a process": _signal(3, signal.SIGKILL),
    "program: segmentation fault": _signal(3, signal.SIGSEGV),
    "program: bus error": _signal(1, signal.SIGBUS),
    "program: abort": _signal(2, signal.SIGABRT, harm="abort", codes=_KILLED | {PEER_LOST}),
    "program: hang": Kind(
        weight=2,
        harm="hang",
        running=("evaluation", "save copy", "save write", "commit", "naming", "local save"),
        starting=_ALL_STARTING,
        codes=frozenset({PEER_LOST}),
        noticed_s=_PHASE_S,
        short=False,
    ),
    "program: the launcher is killed": Kind(
        weight=2, outside=harms.kill_launcher, codes=None, names_host=False, noticed_s=20.0
    ),
    "program: an old process stays": Kind(
        weight=1, harm="child", value=int(signal.SIGKILL), outside=harms.stay, codes=_KILLED, running=("step",)
    ),
    "disk: errors of a save": _disk(0.7, "EIO", "*.saving*", ("create", "write", "fsync", "close")),
    "disk: stale handles": _disk(0.5, "ESTALE", "*", ("open", "read", "lookup"), 6),
    "disk: quota": _disk(0.5, "EDQUOT", "*.saving*", ("create", "write", "mkdir")),
    "disk: read only": _disk(0.4, "EROFS", "*.saving*", ("create", "mkdir", "rename")),
    "disk: no space for a save": _disk(0.5, "ENOSPC", "*.saving*", ("create", "write", "mkdir")),
    "disk: slow": _disk(0.6, "delay", "*", ("write", "open", "fsync"), 4),
    "disk: nothing can be deleted": _disk(0.5, "undeletable", "*", ("unlink", "rmdir"), 20),
    "disk: full": Kind(
        weight=0.4, outside=harms.fill_shared_disk, names_host=False, needs=("own disk",), running=("step",)
    ),
    "disk: full on a host": Kind(
        weight=0.4, outside=harms.fill_local_disk, names_host=False, needs=("local",), running=("step",)
    ),
    "disk: damaged checkpoint": _signal(
        1, signal.SIGKILL, outside=harms.tear_checkpoint, more_lost=1, starting=(), needs=("no local",)
    ),
    "disk: torn record": _signal(0.5, signal.SIGKILL, outside=harms.tear_record, starting=()),
    "disk: unreadable at the restart": Kind(
        weight=0.5,
        outside=harms.disk("EIO", "*", ("open", "read"), times=6),
        running=(),
        starting=("rendezvous", "restore"),
        codes=None,
        names_host=False,
        needs=("bad disk",),
    ),
    "stop: SIGTERM to a process": _signal(7, signal.SIGTERM, codes=frozenset({PREEMPTED, _TERMINATED})),
    "stop: the host is taken": Kind(
        weight=3,
        outside=harms.kill_soon,
        running=("step", "save write"),
        codes=frozenset({PREEMPTED, _TERMINATED, PEER_LOST}),
        names_host=False,
        noticed_s=_LOST_S,
        needs=("ssh",),
        short=False,
    ),
}


def possible(names: Sequence[str], missing: Sequence[str], drilled: Drilled, *, short: bool) -> list[str]:
    """Those of the kinds that can be made here."""
    lacks = {*missing, "no local" if drilled.is_local else "local"}
    return [name for name in names if not lacks & set(KINDS[name].needs) and (KINDS[name].short or not short)]


def possible_windows(kind: Kind, drilled: Drilled, *, is_next: bool) -> list[str]:
    """The windows of a kind that the experiment comes to."""
    absent = {"save copy"} if drilled.is_local else {"local save"}  # a local save's copy is that of the next save
    absent |= set() if drilled.acts else {"acting"}
    return [window for window in (kind.starting if is_next else kind.running) if window not in absent]


def sequence(count: int, names: Sequence[str], overlapping: float, rng: random.Random) -> list[tuple[str, ...]]:
    """`count` faults in random order, in proportion to their weights. Those that come while the one before is being
    mended, the share `overlapping`, stand behind it."""
    starting = [name for name in names if KINDS[name].starting]
    running = [name for name in names if KINDS[name].running]
    num_next = round(overlapping * count) if starting else 0
    first = _drawn(count - num_next, running, rng)
    restarted = [index for index, name in enumerate(first) if KINDS[name].codes]
    groups = [(name,) for name in first]
    places = rng.sample(restarted, min(num_next, len(restarted)))
    for index, name in zip(places, _drawn(len(places), starting, rng), strict=True):
        groups[index] += (name,)
    return groups


def _drawn(count: int, names: Sequence[str], rng: random.Random) -> list[str]:
    """`count` names in random order, in proportion to their weights, but each once if there is room for all."""
    total = sum(KINDS[name].weight for name in names)
    rare = [name for name in names if KINDS[name].weight * count < total] if count >= len(names) else []
    others = [name for name in names if name not in rare]
    total, rest = sum(KINDS[name].weight for name in others), count - len(rare)
    exact = {name: KINDS[name].weight * rest / total for name in others}
    numbers = {name: int(share) for name, share in exact.items()}
    by_rest = sorted(others, key=lambda name: (numbers[name] - exact[name], rng.random()))
    for name in by_rest[: rest - sum(numbers.values())]:
        numbers[name] += 1
    numbers |= dict.fromkeys(rare, 1)
    order = [name for name in names for _ in range(numbers[name])]
    rng.shuffle(order)
    return order
