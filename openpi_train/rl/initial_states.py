"""The initial states that a robot policy makes rollouts from: which is drawn when, and its keys.

Read next: `robot_actor.py`.
They come from keys that neither evaluations nor demonstrations use.
"""

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Integer, Key

from openpi_train.data.core import order

# Streams of `data/core/order.py` and `jax.random`, apart from those of other users of the run's seed.
_STREAM = zlib.crc32(b"practice/initial state")
_NOISE = zlib.crc32(b"practice/noise")


class InitialStates:
    """The initial states of `tasks`, drawn in an endless pass.

    With `states_per_task` there are so many of each task; a pass, reshuffled every time, has each once. Without, every
    draw has a state of its own, and a pass of as many draws as there are tasks has each task once.
    """

    def __init__(self, tasks: Sequence[str], states_per_task: int | None, seed: int):
        self._tasks, self._states_per_task, self._seed = tasks, states_per_task, seed
        self._names = np.array([zlib.crc32(task.encode()) for task in tasks], np.uint32)

    def task(self, draw: int) -> int:
        """The number of the task of this draw."""
        return self._located(draw)[0]

    def prompt_id(self, draw: int) -> int:
        """The number of the initial state; of states that are never drawn again, that of their task."""
        task, number = self._located(draw)
        return task if self._states_per_task is None else number * len(self._tasks) + task

    def reset_keys(self, draws: np.ndarray) -> Key[Array, " b"]:
        """The key of each draw's initial state."""
        located = [self._located(int(draw)) for draw in draws]
        tasks, numbers = np.array(located, np.uint32).reshape(-1, 2).T
        return _keys(self._seed, np.uint32(_STREAM), jnp.asarray(self._names[tasks]), jnp.asarray(numbers))

    def noise_keys(self, draws: np.ndarray, rollouts: np.ndarray) -> Key[Array, " b"]:
        """The key of the policy's noise in each of these rollouts at each draw."""
        words = (jnp.asarray(column.astype(np.uint32)) for column in (draws, rollouts))
        return _keys(self._seed, np.uint32(_NOISE), *words)

    def _located(self, draw: int) -> tuple[int, int]:
        """The task of a draw, and the number of its initial state among those of the task."""
        count = len(self._tasks)
        size = count * (self._states_per_task or 1)
        _, place = order.sample_at(draw, size, self._seed, _STREAM)
        number, task = divmod(int(place), count)
        return task, draw if self._states_per_task is None else number


@jax.jit
def _keys(
    seed: ArrayLike, stream: ArrayLike, first: Integer[Array, " b"], second: Integer[Array, " b"]
) -> Key[Array, " b"]:
    def key(*words: jax.Array) -> jax.Array:
        found = jax.random.fold_in(jax.random.key(seed), stream)
        for word in words:
            found = jax.random.fold_in(found, word)
        return found

    return jax.vmap(key)(first, second)
