"""Rollout: a policy acts in a batch of episodes until they succeed or time is up.

Read next: `env.py` for the environment interface, `closed_loop.py` for an evaluation of many episodes. The code works
with any environment and policy.
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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a batch of episodes ended.

    `success` bool [b]; `steps` int [b], the control steps until success (all steps if there was none); `states`, the
    environment's last states.
    """

    success: np.ndarray
    steps: np.ndarray
    states: Any


def rollout(
    policy: Policy,
    env: Env,
    keys: Key[Array, " b"],
    tasks: Int[Array | np.ndarray, " b"],
    *,
    execute: int,
    policy_keys: Key[Array, " b"] | None = None,
    max_steps: int | None = None,
    history: int = 1,
    all_done: Callable[[bool], bool] = bool,
    watch: Callable[[Any, np.ndarray], None] | None = None,
    record: Recording | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """The outcome of one episode per key; each depends only on its own keys and task and on the policy.

    None if `stop_requested` (`runtime/preempt.py`), called before each chunk, returned True.

    Args:
        execute: Number of actions of each chunk that are executed before the next query of the policy.
        policy_keys: Keys of the policy's noise, one per episode, for several attempts from the same initial state; by
            default `keys`, from which environment and policy derive separate streams.
        max_steps: Control steps before an episode counts as failed; the environment's own by default.
        history: Number of observations that the policy sees, up to the present one; before the beginning the first one
            repeats. With more than one they have the axis `o`.
        all_done: Whether the episodes of all processes are over, given whether these are. A policy that needs all
            processes must be queried the same number of times by each.
        watch: Called with the states before the first and after every control step, and which episodes had succeeded.
        record: Called after every control step.

    Raises:
        ValueError: `execute` is not between 1 and the chunk's length, or the chunk's shape does not fit.
    """
    limit = env.max_steps if max_steps is None else max_steps
    states = env.reset(row_randomness.for_purpose(keys, "env/reset"), jnp.asarray(tasks))
    policy_keys = row_randomness.for_purpose(keys if policy_keys is None else policy_keys, "env/policy")
    done = np.zeros(len(tasks), bool)
    steps = np.full(len(tasks), limit)
    seen = collections.deque([env.observe(states)] * history, maxlen=history)
    if watch is not None:
        watch(states, done)
    taken = 0
    while taken < limit and not all_done(bool(done.all())):
        if stop_requested():
            return None
        now = jax.vmap(jax.random.fold_in, in_axes=(0, None))(policy_keys, taken)
        chunk = _checked(policy(_together(seen), now), env, len(tasks), execute)
        count = min(execute, limit - taken)
        for number in range(count):
            states = env.step(states, chunk[:, number])
            taken += 1
            if record is not None:
                record(seen[-1], np.asarray(chunk[:, number]), states, done.copy())
            new = np.asarray(env.success(states)) & ~done
            steps[new] = taken
            done |= new
            if watch is not None:
                watch(states, done)
            if count - number <= history or record is not None:  # the policy will see it
                seen.append(env.observe(states))
    return Outcome(success=done, steps=steps, states=states)


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
