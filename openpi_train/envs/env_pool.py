"""`Leased`: the simulators of a batch of episodes, which are idle again once no states of the batch are referenced.

Making a simulator takes longer than an episode, and some hold a gigabyte. So idle ones are used again, and for each
that is made another idle one is closed first: there are never more than batches had at one time. A simulator cannot go
back, so only the newest states of a batch can be stepped. Read next: `gym_env.py`.
"""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Key, UInt64

# How a simulator is made: a function and its arguments.
_Kind = tuple[Callable[..., Any], tuple[Hashable, ...]]
# Idle simulators, the one that was used longest ago first.
_IDLE: list[tuple[_Kind, Any]] = []


class Leased(list[Any]):
    """Simulators that `make(*arguments)` makes where none is idle; `num_steps` are the control steps of the batch."""

    def __init__(self, make: Callable[..., object], arguments: Sequence[tuple[Hashable, ...]]):
        kinds: list[_Kind] = [(make, one) for one in arguments]
        found = [_taken(kind) for kind in kinds]
        for _ in range(found.count(None)):
            _close_one()
        super().__init__(make(*kind[1]) if one is None else one for kind, one in zip(kinds, found, strict=True))
        self.num_steps = 0
        weakref.finalize(self, _give_back, kinds, tuple(self)).atexit = False

    def check_newest(self, num_steps: int) -> None:
        """Raise RuntimeError if the states after so many control steps were already stepped."""
        if num_steps != self.num_steps:
            raise RuntimeError(
                f"these states are those after {num_steps} control steps of {self.num_steps}, and a simulator cannot "
                "go back: keep the newest states"
            )


def close_idle() -> None:
    """Close the simulators that nobody uses."""
    while _IDLE:
        _close_one()


def numbers_of(keys: Key[jax.Array, " b"]) -> UInt64[np.ndarray, " b"]:
    """A number for each key, whose lowest 32 bits seed a simulator."""
    return np.asarray(jax.random.key_data(keys)).astype(np.uint64) @ np.array([0x9E3779B1, 1], np.uint64)


def _taken(kind: _Kind) -> Any:
    """The idle simulator of this kind that was used last, which is no longer idle; None if there is none."""
    for place in reversed(range(len(_IDLE))):
        if _IDLE[place][0] == kind:
            return _IDLE.pop(place)[1]
    return None


def _close_one() -> None:
    if _IDLE:
        _, simulator = _IDLE.pop(0)
        # A simulator that fails to close is lost to us anyway.
        with contextlib.suppress(Exception):
            getattr(simulator, "close", lambda: None)()


def _give_back(kinds: list[_Kind], simulators: tuple[object, ...]) -> None:
    _IDLE.extend(zip(kinds, simulators, strict=True))
