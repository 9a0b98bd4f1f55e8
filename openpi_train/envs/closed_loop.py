"""Closed-loop evaluation: measures how often a policy succeeds in every task from initial states outside all datasets.

An episode depends only on (seed, task, attempt) and the policy. Episodes are numbered attempt by attempt, all tasks of
an attempt before the next, and run in batches; every process simulates its own rows of a batch.
Read next: `rollout.py`, `score.py`, `evaluation/closed_loop_success.py` for the policy that is being trained.
"""

import dataclasses
import logging
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Integer, Key

from openpi_train.envs.env import Env, NoEnv
from openpi_train.envs.rollout import Policy, rollout
from openpi_train.envs.score import EpisodeResult, Score
from openpi_train.envs.task_choice import chosen_tasks
from openpi_train.envs.video import VideoRecorder
from openpi_train.fields import at_least

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """Config of a closed-loop evaluation."""

    # The environment to act in; the default is none, without closed-loop evaluation.
    env: Env = dataclasses.field(default_factory=NoEnv)
    # Its tasks that are evaluated, by name or by number from 0; None: all.
    tasks: tuple[str, ...] | None = None
    # Steps between closed-loop evaluations, a multiple of --eval.interval; 0: before the first and after the last step.
    interval: int = at_least(0, 0)
    # Initial states per task, the same at every evaluation.
    episodes_per_task: int = at_least(1, 10)
    # Number of actions of each chunk that are executed before the next query; None: the model's own number.
    execute: int | None = at_least(1, None)
    # Control steps after which an episode counts as failed; None: the environment's own limit.
    max_steps: int | None = at_least(1, None)
    # Number of episodes to make videos of: the first ones, alternating between tasks.
    num_videos: int = at_least(0, 4)
    # Number of episodes on one device at a time.
    episodes_per_device: int = at_least(1, 16)
    # Seed of initial states and of the policy's noise.
    seed: int = 0
    # Number of the run's dataset whose robot and norm stats are used.
    dataset: int = 0

    @property
    def task_numbers(self) -> tuple[int, ...]:
        """The numbers of `tasks` in the environment. Raises ValueError if it lacks one."""
        return chosen_tasks(self.env, self.tasks)

    @property
    def num_episodes(self) -> int:
        """Number of episodes over all tasks."""
        return len(self.task_numbers) * self.episodes_per_task


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
    """The score of a policy; None if `stop_requested` returned True meanwhile.

    Args:
        begin: makes the policy for each batch of episodes, since a policy may keep state within one.
        execute: number of actions of a chunk that are executed, if `config` does not specify it.
        history: number of observations that the policy sees (`rollout`).
        batch_size: number of episodes at a time, over all processes; None: all of them.
        rows: the rows of each batch that this process simulates; None: all. All processes together have every row.
        gather: all-gathers a JSON value, as `runtime/agree.py` does.
        all_done: whether all processes are done with a batch, if they must query the policy together (`rollout`).
        recorder: makes the videos.
    """
    env, chosen, episodes = config.env, np.asarray(config.task_numbers), []
    batch_size = config.num_episodes if batch_size is None else batch_size
    rows = np.arange(batch_size) if rows is None else rows
    for start in range(0, config.num_episodes, batch_size):
        numbers = start + rows
        numbers = numbers[numbers < config.num_episodes]
        count = len(numbers)
        # A process without an episode in the last batch simulates one that another process counts.
        acted = numbers if count else np.array([config.num_episodes - 1])
        tasks = chosen[acted % len(chosen)]
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
        if not start and outcome.beyond.any():
            _tell_beyond(outcome.beyond, env)
        mine = zip(numbers.tolist(), tasks.tolist(), outcome.success.tolist(), outcome.steps.tolist(), strict=False)
        episodes += [[number, env.tasks[task], success, steps] for number, task, success, steps in mine]
    found = [
        EpisodeResult(number=n, task=t, success=s, steps=k)
        for part in gather("outcomes", episodes)
        for n, t, s, k in part
    ]
    return Score(episodes=tuple(sorted(found, key=lambda episode: episode.number)))


def protocol(config: ClosedLoop, execute: int) -> str:
    """A line that says how the episodes were run, for a table of results."""
    limit = config.env.max_steps if config.max_steps is None else config.max_steps
    return (
        f"{config.episodes_per_task} episodes per task from seed {config.seed}; at most {limit} control steps at "
        f"{config.env.control_hz:g} Hz; a new chunk after {execute}"
    )


def _tell_beyond(shares: np.ndarray, env: Env) -> None:
    """Say which dims of the actions lie beyond the bounds that the environment declares."""
    dims = ", ".join(f"dim {dim}: {share:.0%}" for dim, share in enumerate(shares) if share)
    logger.warning(
        "actions of the first episodes lie beyond the bounds that %s declares (%s). It gets them as they are, as the "
        "policy chose them; --env.clip clips them",
        env.name,
        dims,
    )


def episode_keys(config: ClosedLoop, numbers: np.ndarray) -> Key[Array, " b"]:
    """A key per episode, from seed, task and attempt; independent of other tasks and of the number of attempts."""
    names = [config.env.tasks[task] for task in config.task_numbers]
    tasks = np.asarray([zlib.crc32(names[number % len(names)].encode()) for number in numbers], np.uint32)
    return _keys(config.seed, jnp.asarray(tasks), jnp.asarray(numbers // len(names)))


@jax.jit
def _keys(seed: ArrayLike, tasks: Integer[Array, " b"], attempts: Integer[Array, " b"]) -> Key[Array, " b"]:
    def key(task, attempt):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), task), attempt)

    return jax.vmap(key)(tasks, attempts)
