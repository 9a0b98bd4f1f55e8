"""The `data collect` verb: record demonstrations by an environment's scripted expert in a zarr replay buffer.

An attempt depends only on (environment, task, seed, its number). Attempts run in small rounds, as many rounds
at a time as demonstrations are still missing, so the set of attempts depends on their outcomes and not on the
number of processes: the same command always writes the same files. Each round's demonstrations are kept
in `<out>.rounds` until the store is complete, so a killed command continues where it stopped.

Read next: `envs/env.py` (`Env.demonstrate`), `data/formats/zarr/zarr_writer.py`.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import multiprocessing
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jax
import numpy as np

from openpi_train import keys as row_randomness
from openpi_train.data.core import files, tables
from openpi_train.data.core.workers import start_worker
from openpi_train.data.formats.zarr.store import ArrayInfo
from openpi_train.data.formats.zarr.zarr_writer import Contents, write_store
from openpi_train.envs.env import Env
from openpi_train.envs.task_choice import chosen_tasks
from openpi_train.runtime import locks

logger = logging.getLogger(__name__)

# Part of what identifies rounds on disk: increase it with every change of how they are made.
REVISION = 1
# Attempts of a round: simulated at the same time, in one process.
ROUND_SIZE = 4
# Consecutive failures after which an expert counts as unable.
MOST_FAILURES = 16
CHUNK_ROWS = 100
# Names in a round's file beside its columns.
_LENGTHS, _FAILED = "episode lengths", "failed attempts"
_PLAN = "plan.json"
_REPORT_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """The result of one task: demonstrations kept, attempts made, and the numbers of failed attempts."""

    task: str
    kept: int
    attempts: int
    failed: tuple[int, ...]

    def text(self) -> str:
        """The result as a sentence."""
        numbers = f"; failed and left out: {', '.join(map(str, self.failed))}" if self.failed else ""
        return f"{self.task}: {self.kept} demonstrations of {self.attempts} attempts{numbers}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Attempts `number * ROUND_SIZE` and following of one task, to be kept in `path`."""

    env: Env
    task: int
    number: int
    seed: int
    path: Path

    @property
    def attempts(self) -> range:
        """Their numbers."""
        return range(self.number * ROUND_SIZE, (self.number + 1) * ROUND_SIZE)


def collect(
    env: Env,
    out: Path,
    *,
    tasks: Sequence[str] | None = None,
    episodes_per_task: int = 20,
    seed: int = 0,
    workers: int = 1,
) -> list[Collected]:
    """Write `out`, a zarr replay buffer of `episodes_per_task` successful episodes per task; returns the result of
    each.

    Args:
        tasks: names of tasks of the environment, all by default.
        workers: processes that simulate; 1 simulates in this one.

    Raises ValueError for an unknown task, an environment without an expert, or arguments that differ from those of
    the rounds in `<out>.rounds`; FileExistsError if `out` exists; RuntimeError if an expert never succeeds, or a
    process was lost.
    """
    env = env.for_demonstrations()
    numbers = _numbers(env, tasks)
    if min(episodes_per_task, workers) < 1:
        raise ValueError(f"episodes_per_task {episodes_per_task} and workers {workers} must be at least 1")
    if out.exists():
        raise FileExistsError(f"{out} is there already: give another --out, or remove it")
    rounds = out.with_name(f"{out.name}.rounds")
    with tables.explain_cache_errors(rounds, "--out"), locks.held(rounds / tables.LOCK, f"collecting {out.name}"):
        _claim(rounds, env, seed)
        with _processes(workers) as run:
            done = _rounds(env, numbers, episodes_per_task, seed, rounds, run)
        kept = {task: _kept(done[task], episodes_per_task) for task in numbers}
        write_store(_contents(env, kept, f"{_identity(env, seed)}, {episodes_per_task} of each"), out)
        told = [_told(env.tasks[task], done[task], episodes_per_task) for task in numbers]
    shutil.rmtree(rounds)
    return told


def _numbers(env: Env, names: Sequence[str] | None) -> list[int]:
    if not env.has_expert:
        raise ValueError(f"{type(env).__name__} has no scripted expert, which demonstrations need")
    return list(chosen_tasks(env, None if names is None else tuple(dict.fromkeys(names))))


def _identity(env: Env, seed: int) -> str:
    return f"revision {REVISION}, {env!r}, seed {seed}"


def _claim(rounds: Path, env: Env, seed: int) -> None:
    """Create the folder, or continue in it. Raises ValueError if its rounds were made with other arguments."""
    made_with = _identity(env, seed)
    if not (rounds / _PLAN).is_file():
        files.write_json(rounds / _PLAN, {"made with": made_with})
    elif (known := files.read_json(rounds / _PLAN)["made with"]) != made_with:
        raise ValueError(f"{rounds} was begun with {known}, not {made_with}: give the same again, or remove it")


def _rounds(
    env: Env, tasks: Sequence[int], wanted: int, seed: int, folder: Path, run: Callable[[list[Round]], Iterable[object]]
) -> dict[int, list[Path]]:
    """Run rounds until every task has the wanted demonstrations; returns the files of each task's rounds in order.

    Raises RuntimeError if an expert never succeeds.
    """
    done: dict[int, list[Path]] = {task: [] for task in tasks}
    kept = dict.fromkeys(tasks, 0)
    started = said = time.monotonic()
    while min(kept.values()) < wanted:
        due = []
        for task in tasks:
            first, count = len(done[task]), -(-max(wanted - kept[task], 0) // ROUND_SIZE)
            paths = [folder / f"{env.tasks[task]}-{number}.npz" for number in range(first, first + count)]
            done[task] += paths
            due += [Round(env=env, task=task, number=first + n, seed=seed, path=path) for n, path in enumerate(paths)]
        left = [one for one in due if not one.path.is_file()]
        for number, _ in enumerate(run(left), 1):
            if time.monotonic() - said > _REPORT_S:
                said = time.monotonic()
                logger.info("%d of %d rounds done, %.0f s so far", number, len(left), said - started)
        for task in tasks:
            kept[task] = sum(len(_read(path, _LENGTHS)) for path in done[task])
            if not kept[task] and len(done[task]) * ROUND_SIZE >= MOST_FAILURES:
                raise RuntimeError(
                    f"{type(env).__name__}'s expert failed {env.tasks[task]} {len(done[task]) * ROUND_SIZE} times of "
                    "as many: leave the task out with --tasks"
                )
    return done


@contextlib.contextmanager
def _processes(workers: int) -> Iterator[Callable[[list[Round]], Iterable[Any]]]:
    """Yield a function that runs rounds and reports finished ones, in this process or in `workers` others.

    Raises RuntimeError if one of those is lost.
    """
    if workers == 1:
        yield lambda rounds: map(run_round, rounds)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_process)
    try:
        yield lambda rounds: (future.result() for future in as_completed([pool.submit(run_round, r) for r in rounds]))
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a process that simulated was lost, killed or out of memory ({error}): the same command goes on from here"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process() -> None:
    start_worker(0, 1)
    jax.config.update("jax_platforms", "cpu")


def run_round(one: Round) -> None:
    """Simulate a round, and save its successful attempts."""
    attempts = np.array(one.attempts)
    seeds = [zlib.crc32(f"{one.seed}/{one.env.tasks[one.task]}/{number}".encode()) for number in one.attempts]
    keys = jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))
    columns, lengths = _demonstrated(one.env, keys, np.full(len(keys), one.task))
    rows = [(np.arange(length), number) for number, length in enumerate(lengths) if length]
    content = {
        name: np.concatenate([column[steps, number] for steps, number in rows]) if rows else column[:0, 0]
        for name, column in columns.items()
    }
    content |= {_LENGTHS: lengths[lengths > 0], _FAILED: attempts[lengths == 0]}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **content)
    files.write_bytes(one.path, file.getvalue())


def _demonstrated(env: Env, keys: Any, tasks: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Observations and commands before each control step, [steps, b, ...] by column; steps to success, 0 for none."""
    states = env.reset(row_randomness.for_purpose(keys, "env/reset"), tasks)
    of_step = jax.jit(jax.vmap(jax.random.fold_in, (0, None)))
    seen: list[dict[str, np.ndarray]] = []
    lengths = np.zeros(len(tasks), int)
    while len(seen) < env.max_steps and not lengths.all():
        observation = env.observe(states)
        commands, carried_out = env.demonstrate(states, of_step(keys, len(seen)))
        step = {"state": observation.state, "action": commands, **observation.images}
        seen.append({name: np.asarray(value) for name, value in step.items()})
        states = env.step(states, carried_out)
        lengths[np.asarray(env.success(states)) & (lengths == 0)] = len(seen)
    return {name: np.stack([step[name] for step in seen]) for name in seen[0]}, lengths


def _kept(rounds: Sequence[Path], wanted: int) -> list[tuple[Path, int, int]]:
    """The first `wanted` demonstrations of a task: file, first row and end row of each."""
    ends = [(path, np.cumsum(_read(path, _LENGTHS))) for path in rounds]
    found = [(path, start, end) for path, stops in ends for start, end in itertools.pairwise([0, *stops.tolist()])]
    return found[:wanted]


def _contents(env: Env, kept: dict[int, list[tuple[Path, int, int]]], identity: str) -> Contents:
    episodes = [episode for task in kept for episode in kept[task]]
    ends = np.cumsum([end - start for _, start, end in episodes])
    with np.load(episodes[0][0], allow_pickle=False) as content:
        columns = {name: content[name] for name in content if name not in (_LENGTHS, _FAILED)}
    arrays = {
        name: ArrayInfo((int(ends[-1]), *column.shape[1:]), column.dtype, CHUNK_ROWS)
        for name, column in columns.items()
    }

    def read(name: str, first: int, end: int) -> np.ndarray:
        low, high = np.searchsorted(ends, [first, end - 1], side="right")
        pieces = []
        for number in range(low, high + 1):
            path, start, _ = episodes[number]
            begin = start - (ends[number - 1] if number else 0)  # the file's row of the store's row 0
            pieces.append(_column(path, name)[max(first + begin, start) : min(end, ends[number]) + begin])
        return np.concatenate(pieces)

    return Contents(
        arrays=arrays,
        read=read,
        episode_ends=ends,
        tasks=[(env.tasks[task], env.instruction(task)) for task in kept],
        task_ids=np.repeat(np.arange(len(kept)), [len(kept[task]) for task in kept]),
        identity={"demonstrations": identity},
    )


@functools.lru_cache(maxsize=2)
def _column(path: Path, name: str) -> np.ndarray:
    return _read(path, name)


def _read(path: Path, name: str) -> np.ndarray:
    with np.load(path, allow_pickle=False) as content:
        return content[name]


def _told(task: str, rounds: Sequence[Path], wanted: int) -> Collected:
    """The result of a task; attempts after the last one that was needed do not count."""
    failed = np.concatenate([_read(path, _FAILED) for path in rounds])
    succeeded = np.setdiff1d(np.arange(len(rounds) * ROUND_SIZE), failed)[:wanted]
    attempts = int(succeeded[-1]) + 1
    return Collected(task=task, kept=wanted, attempts=attempts, failed=tuple(failed[failed < attempts].tolist()))
