"""Rollout: a policy acts in a batch of episodes until they succeed or time is up.

The code works with any environment and policy. Read next: `env.py` for the environment interface,
`double_buffering.py` for two batches at a time, `closed_loop.py` for an evaluation of many episodes.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from openpi_train import keys as row_randomness
from openpi_train.envs.env import Env, EnvObservation

# Observations of b episodes and one key per episode -> action chunks [b, h, a] in the robot's units.
Policy = Callable[[EnvObservation, Key[Array, " b"]], Float[Array | np.ndarray, "b h a"]]
# What was seen before a control step, its actions [b, a], the states after it, and which episodes had succeeded before.
Recording = Callable[[EnvObservation, np.ndarray, Any, np.ndarray], None]

# What rounding may add to a bound.
_NEARLY = 1e-4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a batch of episodes ended.

    `success` bool [b]; `steps` int [b], the control steps until success (all steps if there was none); `states`, the
    environment's last states; `beyond` float [a], the share of the actions of each dim that lay beyond the bounds that
    the environment declares.
    """

    success: np.ndarray
    steps: np.ndarray
    states: Any
    beyond: np.ndarray


class RolloutEpisodes:
    """A batch of episodes, one per key; each depends only on its own keys and task and on the policy.

    `begin`, then `query` and `execute` in turn until `is_over`. `query` does not use the environment; `begin` and
    `execute` use nothing else, so they may run in another thread while the policy acts in other episodes.

    Args:
        execute: Number of actions of each chunk that are executed before the next query of the policy.
        policy_keys: Keys of the policy's noise, one per episode, for several rollouts from the same initial state; by
            default `keys`, from which environment and policy derive separate streams.
        max_steps: Control steps before an episode counts as failed; the environment's own by default.
        history: Number of observations that the policy sees, up to the present one; before the beginning the first one
            repeats. With more than one they have the axis `o`.
        watch: Called with the states before the first and after every control step, and which episodes had succeeded.
        record: Called after every control step.
    """

    def __init__(
        self,
        policy: Policy,
        env: Env,
        keys: Key[Array, " b"],
        tasks: Int[Array | np.ndarray, " b"],
        *,
        execute: int,
        policy_keys: Key[Array, " b"] | None = None,
        max_steps: int | None = None,
        history: int = 1,
        watch: Callable[[Any, np.ndarray], None] | None = None,
        record: Recording | None = None,
    ):
        self._env = env if max_steps is None else env.limited_to(max_steps)
        self._policy, self._execute, self._history = policy, execute, history
        self._watch, self._record = watch, record
        self._limit = env.max_steps if max_steps is None else max_steps
        self._reset_keys, self._tasks = row_randomness.for_purpose(keys, "env/reset"), jnp.asarray(tasks)
        self._policy_keys = row_randomness.for_purpose(keys if policy_keys is None else policy_keys, "env/policy")
        self._done, self._steps = np.zeros(len(tasks), bool), np.full(len(tasks), self._limit)
        self._taken, self._states = 0, None
        self._seen: collections.deque[EnvObservation] = collections.deque(maxlen=history)
        self._chunk: Any = None
        # Number of actions that were executed, and of those of each dim that lay beyond the environment's bounds.
        self._acted, self._beyond = 0, np.zeros(env.action_dim)

    def begin(self) -> None:
        """Reset the environment, and observe."""
        self._states = self._env.reset(self._reset_keys, self._tasks)
        self._seen.extend([self._env.observe(self._states)] * self._history)
        if self._watch is not None:
            self._watch(self._states, self._done)

    def is_over(self, all_done: Callable[[bool], bool] = bool) -> bool:
        """Whether time is up, or `all_done` says so of whether these episodes have all succeeded."""
        return self._taken >= self._limit or all_done(bool(self._done.all()))

    def query(self) -> None:
        """Ask the policy for the next chunk. Raises ValueError if it does not fit."""
        now = jax.vmap(jax.random.fold_in, in_axes=(0, None))(self._policy_keys, self._taken)
        given = self._policy(self.observation, now)
        self._chunk = _checked(given, self._env, len(self._tasks), self._execute)

    def execute(self) -> None:
        """Carry out the chunk's first actions, and observe what the policy will see.

        Once all of these episodes have succeeded the environment rests. The policy may still have to be queried, where
        those of other processes go on; it then sees an earlier observation again.
        """
        env, count = self._env, min(self._execute, self._limit - self._taken)
        for number in range(count):
            if self._done.all():
                self._taken += count - number
                return
            actions = self._chunk[:, number]
            self._count(np.asarray(actions)[~self._done])
            self._states = env.step(self._states, actions)
            self._taken += 1
            if self._record is not None:
                self._record(self._seen[-1], np.asarray(actions), self._states, self._done.copy())
            new = np.asarray(env.success(self._states)) & ~self._done
            self._steps[new] = self._taken
            self._done |= new
            if self._watch is not None:
                self._watch(self._states, self._done)
            if count - number <= self._history or self._record is not None:  # the policy will see it
                self._seen.append(env.observe(self._states))

    @property
    def observation(self) -> EnvObservation:
        """What the policy sees now; once the episodes are over, what it would see next."""
        return _together(self._seen)

    @property
    def outcome(self) -> Outcome:
        """How the episodes ended, once they are over."""
        beyond = self._beyond / max(self._acted, 1)
        return Outcome(success=self._done, steps=self._steps, states=self._states, beyond=beyond)

    def _count(self, actions: np.ndarray) -> None:
        """Count these actions [n, a] and those beyond the bounds."""
        bounds = self._env.action_bounds
        self._acted += len(actions)
        if bounds is not None:
            low, high = bounds
            self._beyond += ((actions < low - _NEARLY) | (actions > high + _NEARLY)).sum(0)


def rollout(
    policy: Policy,
    env: Env,
    keys: Key[Array, " b"],
    tasks: Int[Array | np.ndarray, " b"],
    *,
    all_done: Callable[[bool], bool] = bool,
    stop_requested: Callable[[], bool] = lambda: False,
    **how: Any,
) -> Outcome | None:
    """The outcome of one episode per key.

    None if `stop_requested` (`runtime/preempt.py`), called before each chunk, returned True.

    Args:
        all_done: Whether the episodes of all processes are over, given whether these are. A policy that needs all
            processes must be queried the same number of times by each.
        how: Further arguments of `RolloutEpisodes`, of which `execute` is required.

    Raises:
        ValueError: `execute` is not between 1 and the chunk's length, or the chunk's shape does not fit.
    """
    episodes = RolloutEpisodes(policy, env, keys, tasks, **how)
    episodes.begin()
    while not episodes.is_over(all_done):
        if stop_requested():
            return None
        episodes.query()
        episodes.execute()
    return episodes.outcome


def _together(seen: Sequence[EnvObservation]) -> EnvObservation:
    """The present observation; several are stacked on an axis after the batch axis."""
    if len(seen) == 1:
        return seen[0]
    return EnvObservation(
        images={name: np.stack([one.images[name] for one in seen], axis=1) for name in seen[-1].images},
        state=np.stack([one.state for one in seen], axis=1),
        task=seen[-1].task,
    )


def _checked(chunk: Any, env: Env, num_rows: int, execute: int) -> Any:
    shape = np.shape(chunk)
    if len(shape) != 3 or shape[0] != num_rows or shape[2] != env.action_dim:
        raise ValueError(
            f"the policy gave actions of shape {shape}; "
            f"{num_rows} episodes need ({num_rows}, horizon, {env.action_dim})"
        )
    if not 1 <= execute <= shape[1]:
        raise ValueError(f"execute {execute} is not between 1 and the policy's chunk length {shape[1]}")
    return chunk
