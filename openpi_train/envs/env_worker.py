"""The worker process of `in_processes.py`: acts in some episodes of an environment and answers requests, one by one.

A request is (what, number of the batch, arguments); the answer is (value, None), or (None, what went wrong). Must not
import jax before it is told to stay on the CPU.
"""

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Mapping
from multiprocessing import parent_process, shared_memory
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # it imports jax
    from openpi_train.envs.env import Env

# Name of an entry -> offset in bytes, shape, dtype.
Layout = Mapping[str, tuple[int, tuple[int, ...], str]]


def serve(connection: Connection, pickled_env: bytes) -> None:
    """Answer until the other end is closed. Stop signals are for the main process, with which this one ends."""
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"
    worker: _Worker | None = None
    while True:
        try:
            what, batch, *arguments = connection.recv()
        except EOFError:
            return
        try:
            worker = worker or _Worker(pickle.loads(pickled_env))
            connection.send((getattr(worker, what)(batch, *arguments), None))
        except Exception:
            connection.send((None, traceback.format_exc(limit=-4).strip()))


class _Worker:
    """The states of this process's episodes, by the number of their batch. Its methods are the requests."""

    def __init__(self, env: "Env"):
        self._env = env
        self._states: dict[int, Any] = {}
        self._shared: dict[int, tuple[shared_memory.SharedMemory, Layout]] = {}

    def reset(self, batch: int, key_data: np.ndarray, tasks: np.ndarray) -> np.ndarray:
        """Begin; returns which episodes have succeeded."""
        import jax

        keys = jax.random.wrap_key_data(jax.numpy.asarray(key_data))
        self._states[batch] = self._env.reset(keys, tasks)
        return np.asarray(self._env.success(self._states[batch]))

    def step(self, batch: int, actions: np.ndarray) -> np.ndarray:
        """A control step; returns which episodes have succeeded."""
        self._states[batch] = self._env.step(self._states[batch], actions)
        return np.asarray(self._env.success(self._states[batch]))

    def observe(self, batch: int) -> dict[str, np.ndarray] | None:
        """The observation by entry; None if it is in shared memory."""
        seen = self._env.observe(self._states[batch])
        images = {f"image/{name}": np.asarray(image) for name, image in seen.images.items()}
        entries = {**images, "state": np.asarray(seen.state), "task": np.asarray(seen.task)}
        if batch not in self._shared:
            return entries
        memory, layout = self._shared[batch]
        for name, array in views(memory, layout).items():
            array[...] = entries[name]
        return None

    def reward(self, batch: int) -> np.ndarray:
        """The rewards of the last control step."""
        return np.asarray(self._env.reward(self._states[batch]))

    def pictures(self, batch: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Pictures of these episodes for videos."""
        return {name: np.asarray(one) for name, one in self._env.pictures(self._states[batch], rows).items()}

    def share(self, batch: int, name: str, layout: Layout) -> None:
        """Put observations into this block of shared memory from now on."""
        self._shared[batch] = shared_memory.SharedMemory(name), layout

    def forget(self, batch: int) -> None:
        """The batch is over."""
        self._states.pop(batch, None)
        if batch in self._shared:
            self._shared.pop(batch)[0].close()


def views(memory: shared_memory.SharedMemory, layout: Layout) -> dict[str, np.ndarray]:
    """The arrays of this layout in the block."""
    return {
        name: np.ndarray(shape, dtype, buffer=memory.buf, offset=offset)
        for name, (offset, shape, dtype) in layout.items()
    }


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
