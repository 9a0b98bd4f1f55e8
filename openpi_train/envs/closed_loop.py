"""Closed-loop evaluation: a policy acts in every task from initial states that no dataset holds; how often it succeeds.

An episode is a function of (seed, task, attempt) and the policy alone. Episodes are numbered attempt by attempt, all
tasks of one before the next, and run in batches, of which every process acts in its own rows.
Read next: `rollout.py`, `score.py`, `evaluation/closed_loop_success.py` for the policy that is being trained.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Key

from openpi_train.envs.env import Env, NoEnv
from openpi_train.envs.rollout import Policy, rollout
from openpi_train.envs.score import EpisodeResult, Score
from openpi_train.envs.video import VideoRecorder
from openpi_train.fields import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """What is run in which environment."""

    # The world to act in; without one there is no closed loop.
    env: Env = dataclasses.field(default_factory=NoEnv)
    # Optimizer steps between closed loops, a multiple of --eval.interval; 0: before the first and after the last step.
    interval: int = at_least(0, 0)
    # Initial states per task, the same at every evaluation.
    episodes_per_task: int = at_least(1, 10)
    # Actions of each chunk that are carried out before the policy is asked again; None: half of the chunk.
    execute: int | None = at_least(1, None)
    # Control steps after which an episode counts as failed; None: as the environment has it.
    max_steps: int | None = at_least(1, None)
    # The first episodes to make videos of, one task after the other.
    num_videos: int = at_least(0, 4)
    # Episodes on one device at a time.
    episodes_per_device: int = at_least(1, 16)
    # Of initial states and of the policy's noise.
    seed: int = 0
    # Which of the run's datasets has the robot that acts here, and its norm stats.
    dataset: int = 0

    @property
    def num_episodes(self) -> int:
        """Over all tasks."""
        return len(self.env.tasks) * self.episodes_per_task


def evaluate(
    begin: Callable[[], Policy],
    config: ClosedLoop,
    *,
    execute: int,
    history: int = 1,
    batch_size: int | None = None,
    rows: np.ndarray | None = None,
    gather: Callable[[str, Any], list[Any]] = lambda name, value: [value],
    all_done: Callable[[bool], bool] = bool,
    recorder: VideoRecorder | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Score | None:
    """The score of a policy; None where `stop_requested` said so meanwhile.

    Args:
        begin: gives the policy for each batch of episodes: it may remember what it said before.
        execute: actions of a chunk that are carried out, where `config` leaves it open.
        history: observations that the policy sees (`rollout`).
        batch_size: episodes at a time, over all processes; None: all of them.
        rows: which of each batch this process acts in; None: all. The rows of all processes are the whole batch.
        gather: hands every process's JSON value to all, as `runtime/agree.py` does.
        all_done: whether all processes are done with a batch, where they must ask the policy together (`rollout`).
        recorder: makes the videos.
    """
    env, episodes = config.env, []
    batch_size = config.num_episodes if batch_size is None else batch_size
    rows = np.arange(batch_size) if rows is None else rows
    for start in range(0, config.num_episodes, batch_size):
        numbers = start + rows
        numbers = numbers[numbers < config.num_episodes]
        count = len(numbers)
        # A process without an episode of the last batch goes along with one that another counts.
        acted = numbers if count else np.array([config.num_episodes - 1])
        tasks = acted % len(env.tasks)
        outcome = rollout(
            begin(),
            env,
            episode_keys(config, acted),
            tasks,
            execute=execute if config.execute is None else config.execute,
            max_steps=config.max_steps,
            history=history,
            all_done=all_done,
            watch=recorder.watch(numbers, tasks) if recorder is not None and count else None,
            stop_requested=stop_requested,
        )
        if outcome is None:
            return None
        mine = zip(numbers.tolist(), tasks.tolist(), outcome.success.tolist(), outcome.steps.tolist(), strict=False)
        episodes += [[number, env.tasks[task], success, steps] for number, task, success, steps in mine]
    found = [
        EpisodeResult(number=n, task=t, success=s, steps=k)
        for part in gather("outcomes", episodes)
        for n, t, s, k in part
    ]
    return Score(episodes=tuple(sorted(found, key=lambda episode: episode.number)))


def episode_keys(config: ClosedLoop, numbers: np.ndarray) -> Key[Array, " b"]:
    """A key per episode, of seed, task and attempt: the other tasks, and how many attempts there are, change none."""
    names = config.env.tasks
    tasks = np.asarray([zlib.crc32(names[number % len(names)].encode()) for number in numbers], np.uint32)
    return _keys(config.seed, jnp.asarray(tasks), jnp.asarray(numbers // len(names)))


@jax.jit
def _keys(seed: Any, tasks: Integer[Array, " b"], attempts: Integer[Array, " b"]) -> Key[Array, " b"]:
    def key(task, attempt):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), task), attempt)

    return jax.vmap(key)(tasks, attempts)
