"""Many processes of one run, forked from one that has imported everything; for `scale.py`.

python -m benchmarks.scale_process PLAN.json FOLDER

PLAN.json has `processes`, two free `ports`, `bytes` and `leaves` of each item of the whole state, and whether Orbax
writes `arrays`. Each process leaves FOLDER/<life>/<index>.json with what its stages cost, and FOLDER/ends.json says how
all of them ended. In its first life a run meets, agrees, saves and restores, and loses its last process; in its second
it meets again.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.interop.manifest import sums, write_manifest
from openpi_train.parallel.state import TrainState
from openpi_train.runtime import agree, logs, session
from openpi_train.runtime.exits import run_guarded
from openpi_train.runtime.phases import phase
from openpi_train.runtime.waiting import Timeouts
from openpi_train.runtime.world import World

# Before its first step a run agrees so often.
GATHERS = 13
# As many files as Orbax leaves in a process's folder of an item.
_FILES = 4
# Where all processes share a few cores nobody is lost because it is late; a killed one is, at once.
_TIMEOUTS = Timeouts(rendezvous_s=3600.0, handshake_s=3600.0, lost_s=1800.0, stuck_s=3600.0, phase_s=3600.0)
_M_ARENA_MAX = -8  # glibc's malloc.h
_TOKEN = "the processes of a benchmark"
_LIMIT_S = 3600.0
Life = Callable[[int, Mapping[str, Any], int, Path], None]


@dataclasses.dataclass
class Stages:
    """Begin and end (by the machine's clock) and CPU seconds of each stage of this process, and what else it tells."""

    costs: dict[str, tuple[float, float, float]] = dataclasses.field(default_factory=dict)
    told: dict[str, Any] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began, used = time.monotonic(), time.process_time()
        yield
        self.costs[name] = (began, time.monotonic(), time.process_time() - used)

    def leave(self, index: int, own: Path) -> None:
        (own / f"{index}.json").write_text(json.dumps({"costs": self.costs, **self.told}))


def main(plan: Mapping[str, Any], folder: Path) -> None:
    """Start all processes of both lives, one after the other, and say how they ended."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory does not suffice, these go first
    gc.collect()
    gc.freeze()  # the collector would write to pages that all processes share
    ends = {}
    for life, port in zip((first_life, second_life), plan["ports"], strict=True):
        own = folder / life.__name__
        own.mkdir()
        gate, opens = os.pipe()
        children = {_fork(life, index, plan, port, own, (gate, opens)): index for index in range(plan["processes"])}
        os.close(gate)
        os.close(opens)
        found = {}
        while children:
            process, status = os.wait()
            found[children.pop(process)] = [os.waitstatus_to_exitcode(status), time.monotonic()]
        ends[life.__name__] = [found[index] for index in range(plan["processes"])]
    (folder / "ends.json").write_text(json.dumps(ends))


def _fork(life: Life, index: int, plan: Mapping[str, Any], port: int, own: Path, pipe: tuple[int, int]) -> int:
    """Fork a process, which begins once the pipe is closed here: all are there. Returns its number."""
    process = os.fork()
    if process:
        return process
    code: Any = 1
    try:
        gate, opens = pipe
        os.close(opens)
        os.read(gate, 1)
        os.close(gate)
        log = os.open(own / f"{index}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if index == 0:
            with contextlib.suppress(OSError):  # it has a core of its own in a run, and here only if it comes first
                os.setpriority(os.PRIO_PROCESS, 0, -10)
                ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 64)  # it has a thread for each other process
        run_guarded(lambda: life(index, plan, port, own))
    except SystemExit as ending:
        code = ending.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def first_life(index: int, plan: Mapping[str, Any], port: int, own: Path) -> None:
    """One process of the run that loses its last."""
    stages, count, run = Stages(), plan["processes"], own.parent / "run"
    _meet(stages, index, count, port)
    with stages.stage(f"{GATHERS} gathers"):
        for number in range(GATHERS):
            agree.gather(f"fact {number}", {"host": "host", "number": number})
    with stages.stage("broadcast"):
        agree.broadcast("word", "word")
    stages.told["open"] = [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
    checkpoints = Checkpoints(run, keep_last=2)
    _sum_and_check(stages, index, plan, checkpoints)
    if plan["arrays"]:
        _save_and_restore(stages, plan, checkpoints)
    stages.told["memory"] = _own_memory_mb()
    stages.leave(index, own)
    agree.barrier("all have told", _LIMIT_S)
    with phase("waiting for one that is lost"):
        if index == count - 1:
            (own / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(_LIMIT_S)


def second_life(index: int, plan: Mapping[str, Any], port: int, own: Path) -> None:
    """One process of the run that is started again, and ends well."""
    stages = Stages()
    _meet(stages, index, plan["processes"], port)
    stages.leave(index, own)
    session.stop(_LIMIT_S)


def _meet(stages: Stages, index: int, count: int, port: int) -> None:
    logs.configure(index)
    world = World(
        process_index=index,
        process_count=count,
        local_index=index,
        local_count=count,
        coordinator=f"127.0.0.1:{port}",
        source="flags",
        token=_TOKEN,
        token_is_secret=True,
    )
    with stages.stage("start: meet, start jax"):
        session.start(world, facts={}, devices_per_process=1, timeouts=_TIMEOUTS)


def _sum_and_check(stages: Stages, index: int, plan: Mapping[str, Any], checkpoints: Checkpoints) -> None:
    """The sums and the list of a save of the whole size, and the check at a restart, of files that are holes."""
    step = checkpoints.step_dir(1)
    places = {f"{item}/ocdbt.process_{index}": size for item, size in plan["bytes"].items()}
    for place, size in places.items():
        (step / place / "d").mkdir(parents=True)
        for number in range(_FILES):
            with (step / place / "d" / str(number)).open("wb") as file:
                file.truncate(size // plan["processes"] // _FILES)
    agree.barrier("all have written", _LIMIT_S)
    with stages.stage("save: checksums, manifest"):
        own = {place: sums(step / place) for place in places}
        if index > 0:
            agree.tell(f"sums/{index}", own)
        else:
            others = [agree.heard(f"sums/{other}", _LIMIT_S) for other in range(1, plan["processes"])]
            agree.forget("sums")
            write_manifest(step, {folder: inside for part in (own, *others) for folder, inside in part.items()})
        agree.barrier("the manifest is there", _LIMIT_S)
    with stages.stage("restart: check of all files"):
        assert checkpoints._newest_whole(above=-1) == 1


def _save_and_restore(stages: Stages, plan: Mapping[str, Any], checkpoints: Checkpoints) -> None:
    """Save and restore a state with the same leaves, of each of which a process has an element."""
    count = plan["processes"]
    mesh = jax.make_mesh((count,), ("fsdp",), axis_types=(AxisType.Auto,))
    jax.set_mesh(mesh)

    def make(values: np.ndarray, *cut: str) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*cut))
        return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])

    def leaves(item: str) -> dict[str, jax.Array]:
        one_each = np.arange(count, dtype=np.float32)
        return {f"leaf_{number}": make(one_each, "fsdp") for number in range(plan["leaves"][item])}

    step, params, rest = make(np.asarray(2, np.int32)), leaves("params"), leaves("train_state")
    state = TrainState(step=step, params=params, frozen={}, ema=None, opt_state=rest)
    with stages.stage("save: one element a leaf"):
        checkpoints.save(state, data_position={}, experiment={}, norm_stats={})
        checkpoints.wait()
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with stages.stage("restart: restore them"):
        restored = checkpoints.restore(like)
    assert restored is not None and restored[1]["step"] == 2
    for one, two in zip(jax.tree.leaves(restored[0]), jax.tree.leaves(state), strict=True):
        assert np.array_equal(one.addressable_data(0), two.addressable_data(0))


def _own_memory_mb() -> float:
    """Memory that this process alone has; the rest it shares with the one that it was forked from."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1024


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
