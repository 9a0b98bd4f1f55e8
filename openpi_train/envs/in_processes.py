"""`ProcessEnv`: an environment whose episodes run in worker processes, so that simulators use all cores and may die.

A worker that ends or hangs is replaced. The new one resets its episodes with the same keys and executes the same
actions again: no result depends on it. Read next: `env_worker.py`, `env.py`.
"""

import atexit
import collections
import dataclasses
import itertools
import logging
import multiprocessing
import os
import pickle
import weakref
from collections.abc import Mapping
from multiprocessing import shared_memory
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.env_worker import Layout, serve, views
from openpi_train.fields import at_least
from openpi_train.runtime.exits import DataError

logger = logging.getLogger(__name__)

# A worker is replaced so often for one request.
_RESTARTS = 3
# A worker's first answer to each kind of request may take so much longer: it imports, makes simulators, compiles.
_START_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessEnv(Env):
    """`env` in worker processes. Its episodes must be functions of their keys and actions; only the newest states of a
    batch can be stepped.
    """

    env: Env
    # Worker processes; None: one less than this process's cores.
    num_workers: int | None = at_least(1, None)
    # The longest time that an episode may take for a control step or its beginning, in seconds; a worker with several
    # may take so much for each.
    timeout_s: float = 60.0

    def __post_init__(self):
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s {self.timeout_s} must be above 0")

    @property
    def name(self) -> str:
        return self.env.name

    @property
    def cameras(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.cameras

    @property
    def also_called(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.also_called

    @property
    def replan_steps(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.replan_steps

    @property
    def simulator_gib(self) -> float | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.simulator_gib

    @property
    def action_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.action_dim

    @property
    def state_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.state_dim

    @property
    def control_hz(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.control_hz

    @property
    def max_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.max_steps

    @property
    def has_reward(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.has_reward

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.env.tasks

    def instruction(self, task: int) -> str:
        return self.env.instruction(task)

    @property
    def action_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        return self.env.action_bounds

    def limited_to(self, max_steps: int) -> "ProcessEnv":
        return dataclasses.replace(self, env=self.env.limited_to(max_steps))

    def require(self) -> None:
        self.env.require()

    def for_demonstrations(self) -> "ProcessEnv":
        return dataclasses.replace(self, env=self.env.for_demonstrations())

    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> "RemoteEpisodes":
        """New episodes. Raises DataError, as all methods do, if a worker keeps ending or hanging, or `env` raises."""
        batch = _pool_of(self).begin(np.asarray(jax.random.key_data(keys)), np.asarray(tasks))
        return RemoteEpisodes(batch=batch, success=batch.ask("reset", batch.key_data, batch.tasks), num_steps=0)

    def step(self, states: "RemoteEpisodes", actions: Float[Array | np.ndarray, "b a"]) -> "RemoteEpisodes":
        """The states one control step later. Raises RuntimeError for states that were already stepped."""
        states.check_newest()
        actions, batch = np.asarray(actions), states.batch
        success = batch.ask("step", actions)
        batch.actions.append(actions)
        return RemoteEpisodes(batch=batch, success=success, num_steps=states.num_steps + 1)

    def executed(self, actions: Float[Array | np.ndarray, "b a"]) -> Float[Array | np.ndarray, "b a"]:
        return self.env.executed(actions)

    def observe(self, states: "RemoteEpisodes") -> EnvObservation:
        states.check_newest()
        entries = states.batch.observed()
        images = {name.removeprefix("image/"): one for name, one in entries.items() if name.startswith("image/")}
        return EnvObservation(images=images, state=entries["state"], task=entries["task"])

    def success(self, states: "RemoteEpisodes") -> Bool[np.ndarray, " b"]:
        return states.success

    def reward(self, states: "RemoteEpisodes") -> Float[np.ndarray, " b"]:
        states.check_newest()
        return states.batch.ask("reward")

    def pictures(self, states: "RemoteEpisodes", rows: np.ndarray) -> Mapping[str, np.ndarray]:
        states.check_newest()
        return states.batch.pictures(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteEpisodes:
    """A batch of episodes after `num_steps` control steps."""

    batch: "_Batch"
    success: np.ndarray
    num_steps: int

    def check_newest(self) -> None:
        """Raise RuntimeError if they were already stepped."""
        if self.num_steps != len(self.batch.actions):
            raise RuntimeError(
                f"these states are those after {self.num_steps} control steps of {len(self.batch.actions)}, and a "
                "simulator cannot go back: keep the newest states"
            )


class _Batch:
    """The episodes of one reset, each worker with some of the rows; and what a new worker needs to come to them."""

    def __init__(self, pool: "_Pool", number: int, key_data: np.ndarray, tasks: np.ndarray):
        self.number, self.key_data, self.tasks = number, key_data, tasks
        self.actions: list[np.ndarray] = []
        self._pool = pool
        shares = np.array_split(np.arange(len(tasks)), len(pool.workers))
        self.rows = {index: rows for index, rows in enumerate(shares) if len(rows)}
        self._blocks: dict[int, tuple[shared_memory.SharedMemory, Layout]] = {}
        weakref.finalize(self, pool.ended.append, (number, self._blocks)).atexit = False

    def ask(self, what: str, *arguments: np.ndarray) -> np.ndarray:
        """The answers of all workers to this request, joined, each with its rows of the arguments."""
        requests = {index: (what, self.number, *(one[rows] for one in arguments)) for index, rows in self.rows.items()}
        answers = self._pool.ask(self, requests)
        return np.concatenate([answers[index] for index in self.rows])

    def observed(self) -> dict[str, np.ndarray]:
        """The observation of all episodes, by entry."""
        answers = self._pool.ask(self, dict.fromkeys(self.rows, ("observe", self.number)))
        parts = []
        for index in self.rows:
            if answers[index] is None:
                parts.append(views(*self._blocks[index]))
            else:
                parts.append(answers[index])
                self._share(index, answers[index])
        # Which copies what is shared.
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def pictures(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Pictures of these rows."""
        owners = {index: np.flatnonzero(np.isin(rows, own)) for index, own in self.rows.items()}
        requests = {
            index: ("pictures", self.number, rows[places] - self.rows[index][0])
            for index, places in owners.items()
            if len(places)
        }
        answers = self._pool.ask(self, requests)
        found: dict[str, np.ndarray] = {}
        for index, part in answers.items():
            for name, one in part.items():
                found.setdefault(name, np.zeros((len(rows), *one.shape[1:]), one.dtype))[owners[index]] = one
        return found

    def replayed(self, index: int) -> list[tuple[Any, ...]]:
        """The requests that bring a new worker to the newest states of its rows."""
        rows = self.rows[index]
        requests: list[tuple[Any, ...]] = [("reset", self.number, self.key_data[rows], self.tasks[rows])]
        requests += [("step", self.number, actions[rows]) for actions in self.actions]
        if index in self._blocks:
            block, layout = self._blocks[index]
            requests.append(("share", self.number, block.name, layout))
        return requests

    def _share(self, index: int, entries: Mapping[str, np.ndarray]) -> None:
        """Make a block for observations of a worker's rows."""
        sizes = [-(-one.nbytes // 64) * 64 for one in entries.values()]
        offsets = itertools.accumulate([0, *sizes[:-1]])
        layout = {
            name: (offset, one.shape, one.dtype.str)
            for (name, one), offset in zip(entries.items(), offsets, strict=True)
        }
        block = shared_memory.SharedMemory(create=True, size=max(sum(sizes), 1))
        self._blocks[index] = block, layout
        self._pool.ask(self, {index: ("share", self.number, block.name, layout)})


class _Pool:
    """Worker processes of one environment. For one thread at a time."""

    def __init__(self, config: ProcessEnv):
        self._pickled, self._timeout_s, self.name = (
            pickle.dumps(config.env),
            config.timeout_s,
            type(config.env).__name__,
        )
        count = config.num_workers or max(len(os.sched_getaffinity(0)) - 1, 1)
        self.workers: list[_Process] = [_Process(self._pickled) for _ in range(count)]
        self._numbers = itertools.count()
        self._batches: weakref.WeakValueDictionary[int, _Batch] = weakref.WeakValueDictionary()
        # Batches that are over. Whatever thread finds that out, workers are told with the next request.
        self.ended: collections.deque[tuple[int, dict[int, Any]]] = collections.deque()

    def begin(self, key_data: np.ndarray, tasks: np.ndarray) -> _Batch:
        """A batch of episodes, which were not reset yet."""
        batch = _Batch(self, next(self._numbers), key_data, tasks)
        self._batches[batch.number] = batch
        return batch

    def ask(self, batch: _Batch, requests: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        """The answers of workers to these requests, which they work on at the same time."""
        try:
            return self._asked(batch, requests)
        except DataError:
            self.close()  # other answers may still come
            raise

    def _asked(self, batch: _Batch, requests: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        self._forget()
        lost = {index for index, request in requests.items() if not self.workers[index].send(request)}
        answers = {}
        for index, request in requests.items():
            problem = "its process has ended"
            if index not in lost:
                done, answers[index], problem = self.workers[index].answer(self._limit_s(batch, index))
                if done:
                    continue
            answers[index] = self._repeated(batch, index, request, problem)
        return answers

    def _limit_s(self, batch: _Batch, index: int) -> float:
        """How long a worker may take for its episodes of a batch, one after the other."""
        return self._timeout_s * len(batch.rows[index])

    def close(self) -> None:
        """End all workers."""
        for config in [config for config, pool in _POOLS.items() if pool is self]:
            del _POOLS[config]
        for worker in self.workers:
            worker.end()
        for batch in list(self._batches.values()):
            self.ended.append((batch.number, batch._blocks))
        self._forget(tell=False)

    def _repeated(self, batch: _Batch, index: int, request: tuple[object, ...], problem: str) -> Any:
        """The answer of a new worker, which first comes to the states of the one that was lost."""
        for _ in range(_RESTARTS):
            logger.warning("worker %d of %s: %s; it is started again", index, self.name, problem)
            self.workers[index].end()
            self.workers[index] = _Process(self._pickled)
            living = [one for one in self._batches.values() if index in one.rows]
            past = [part for one in living if one is not batch or request[0] != "reset" for part in one.replayed(index)]
            answer = None
            for one in [*past, request]:
                done = self.workers[index].send(one)
                problem = "its process has ended"
                if done:
                    done, answer, problem = self.workers[index].answer(self._limit_s(batch, index))
                if not done:
                    break
            else:
                return answer
        tasks = ", ".join(str(task) for task in sorted({int(task) for task in batch.tasks[batch.rows[index]]}))
        raise DataError(
            f"worker {index} of {self.name} was started {_RESTARTS} times again and failed every time at "
            f"{request[0]!r} after {len(batch.actions)} control steps, with tasks {tasks}: {problem}. Try the "
            "environment alone, or raise its timeout_s"
        )

    def _forget(self, tell: bool = True) -> None:
        while self.ended:
            number, blocks = self.ended.popleft()
            for worker in self.workers if tell else ():
                # A worker that is lost has nothing to forget. One that hangs is lost, too: its answer, when it comes,
                # would be taken for that to the next request.
                if worker.send(("forget", number)) and not worker.answer(self._timeout_s)[0]:
                    worker.end()
            for block, _ in blocks.values():
                block.close()
                block.unlink()
            blocks.clear()


class _Process:
    """A worker process and the connection to it."""

    def __init__(self, pickled_env: bytes):
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, pickled_env), daemon=True)
        self._process.start()
        other.close()
        self._asked: object = None
        self._answered: set[object] = set()

    def send(self, request: tuple[object, ...]) -> bool:
        """Whether the request could be sent."""
        self._asked = request[0]
        try:
            self._connection.send(request)
        except OSError:
            return False
        return True

    def answer(self, timeout_s: float) -> tuple[bool, Any, str]:
        """Whether there is an answer, the answer, and what is wrong. Raises DataError if the environment raises."""
        limit = timeout_s + (0.0 if self._asked in self._answered else _START_S)
        try:
            if not self._connection.poll(limit):
                return False, None, f"no answer in {limit:g} s"
            value, problem = self._connection.recv()
        except (EOFError, OSError):
            return False, None, f"its process has ended (exit code {self._exit_code()})"
        self._answered.add(self._asked)
        if problem is not None:
            raise DataError(f"the environment has failed:\n{problem}")
        return True, value, ""

    def end(self) -> None:
        """Kill it."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _exit_code(self) -> int | None:
        self._process.join(1.0)
        return self._process.exitcode


_POOLS: dict[ProcessEnv, _Pool] = {}


def _pool_of(config: ProcessEnv) -> _Pool:
    """The workers of this environment, which are started if there are none."""
    if config not in _POOLS:
        if not _POOLS:
            atexit.register(close_workers)
        _POOLS[config] = _Pool(config)
    return _POOLS[config]


def close_workers() -> None:
    """End all workers of all environments."""
    while _POOLS:
        next(iter(_POOLS.values())).close()
