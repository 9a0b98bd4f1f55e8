"""`Leased`: the simulators of a batch of episodes, which are idle again once no states of the batch are referenced.

Making a simulator takes longer than an episode. A simulator cannot go back, so only the newest states of a batch can be
stepped. Read next: `gym_env.py`.
"""

import collections
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Key, UInt64

# Idle simulators by how they are made: a function and its arguments.
_IDLE: dict[tuple[Callable[..., Any], Hashable], list[Any]] = collections.defaultdict(list)


class Leased(list[Any]):
    """Simulators that `make(*arguments)` makes where none is idle; `num_steps` are the control steps of the batch."""

    def __init__(self, make: Callable[..., object], arguments: Sequence[tuple[Hashable, ...]]):
        keys: list[tuple[Callable[..., Any], Hashable]] = [(make, one) for one in arguments]
        super().__init__(_IDLE[make, one].pop() if _IDLE[make, one] else make(*one) for one in arguments)
        self.num_steps = 0
        weakref.finalize(self, _give_back, keys, tuple(self)).atexit = False

    def check_newest(self, num_steps: int) -> None:
        """Raise RuntimeError if the states after so many control steps were already stepped."""
        if num_steps != self.num_steps:
            raise RuntimeError(
                f"these states are those after {num_steps} control steps of {self.num_steps}, and a simulator cannot "
                "go back: keep the newest states"
            )


def add_idle(make: Callable[..., object], arguments: tuple[Hashable, ...], simulator: object) -> None:
    """Whoever next needs what `make(*arguments)` makes gets this one."""
    _IDLE[make, arguments].append(simulator)


def forget_idle() -> None:
    """Make new simulators from now on."""
    _IDLE.clear()


def numbers_of(keys: Key[jax.Array, " b"]) -> UInt64[np.ndarray, " b"]:
    """A number for each key, whose lowest 32 bits seed a simulator."""
    return np.asarray(jax.random.key_data(keys)).astype(np.uint64) @ np.array([0x9E3779B1, 1], np.uint64)


def _give_back(keys: list[tuple[Callable[..., Any], Hashable]], simulators: tuple[object, ...]) -> None:
    for key, simulator in zip(keys, simulators, strict=True):
        _IDLE[key].append(simulator)
