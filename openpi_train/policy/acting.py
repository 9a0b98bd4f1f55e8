"""Adapts a loaded policy to `rollout.Policy`, with or without real-time chunking. Read next: `policy.py`."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Key

from openpi_train.envs.env import Env, EnvObservation
from openpi_train.policy.observation import DELAY, PREFIX, PROMPT, ObservationError
from openpi_train.policy.policy import Policy, PreparedObservation
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.real_time_chunking import MAX_GUIDANCE, prefix_weights


class Acting:
    """A `rollout.Policy` that returns a loaded policy's chunks from the present step on, in the robot's units."""

    def __init__(self, policy: Policy, env: Env):
        self._policy, self._env = policy, env

    def __call__(self, observation: EnvObservation, keys: Key[Array, " b"]) -> np.ndarray:
        """The chunks [b, h, a]. Raises UsageError if the policy cannot read what the environment shows."""
        answers = self._policy.answer(self._prepared(observation), _draws(keys))
        return np.stack([answer["actions"] for answer in answers])

    def _prepared(
        self, observation: EnvObservation, prefixes: np.ndarray | None = None, delay: int = 0
    ) -> list[PreparedObservation]:
        """The observations of a batch, with the prefixes [b, p, a] of their chunks if there are any."""
        features, seen = self._policy.form.robot.cameras.values(), observation.images
        called = {feature: self._env.camera_of(feature) for feature in features}
        images = {feature: np.asarray(seen[camera]) for feature, camera in called.items() if camera in seen}
        images |= {name: np.asarray(image) for name, image in seen.items() if name not in called.values()}
        states = np.asarray(observation.state)
        given = [
            {
                **{name: image[row] for name, image in images.items()},
                "state": states[row],
                **({PROMPT: text} if (text := self._env.instruction(int(task))) else {}),
                **({} if prefixes is None else {PREFIX: prefixes[row], DELAY: delay}),
            }
            for row, task in enumerate(np.asarray(observation.task))
        ]
        try:
            return [self._policy.prepare(one) for one in given]
        except ObservationError as error:
            hint = "" if PROMPT not in str(error) else ". Give the environment an instruction with --env.prompt"
            raise UsageError(f"{type(self._env).__name__} does not suit the policy: {error}{hint}") from error


class ActingInRealTime(Acting):
    """A policy whose chunks are ready `delay` control steps after they were requested, for one batch of episodes.

    Meanwhile the previous chunk is executed; the new one continues it (real-time chunking), or without `joins` is
    computed without it, and the motion can jump. Queries are `execute` actions apart.
    """

    def __init__(
        self,
        policy: Policy,
        env: Env,
        *,
        delay: int,
        execute: int,
        max_guidance: float = MAX_GUIDANCE,
        joins: bool = True,
    ):
        """Raises ValueError if delay and execute do not fit the chunk, or the largest guidance is not above 0."""
        super().__init__(policy, env)
        if not 0 < max_guidance < float("inf"):
            raise ValueError(f"a largest guidance of {max_guidance:g} must be above 0 and finite")
        prefix_weights(policy.form.window.num_ahead, delay, execute)
        flow = policy.sampler.flow
        if joins and flow is not None and 0 < flow.max_delay < delay:
            raise ValueError(f"a delay of {delay} control steps: the policy was trained with at most {flow.max_delay}")
        self._policy = dataclasses.replace(policy, max_guidance=max_guidance)
        self._delay, self._execute, self._joins = delay, execute, joins
        self._plan: np.ndarray | None = None

    def __call__(self, observation: EnvObservation, keys: Key[Array, " b"]) -> np.ndarray:
        """The actions to execute from now on [b, h, a]: the old plan while the new chunk is computed, then that."""
        rest = None if self._plan is None else self._plan[:, self._execute :]
        prefixes = rest if self._joins else None
        answers = self._policy.answer(self._prepared(observation, prefixes, self._delay), _draws(keys))
        chunks = np.stack([answer["actions"] for answer in answers])
        self._plan = chunks if rest is None else np.concatenate([rest[:, : self._delay], chunks[:, self._delay :]], 1)
        return self._plan


def _draws(keys: Key[Array, " b"]) -> list[int]:
    """One draw number per row, from its key, for the policy's noise."""
    return (np.asarray(jax.vmap(jax.random.bits)(keys)) >> 1).tolist()
