"""Adapts a loaded policy to `rollout.Policy`, with or without real-time chunking. Read next: `policy.py`."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from openpi_train.data.robot.normalize import normalize
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.policy.observation import PROMPT, ObservationError
from openpi_train.policy.policy import Policy
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

    def _prepared(self, observation: EnvObservation) -> list[tuple[Any, np.ndarray]]:
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
            }
            for row, task in enumerate(np.asarray(observation.task))
        ]
        try:
            return [self._policy.prepare(one) for one in given]
        except ObservationError as error:
            hint = "" if PROMPT not in str(error) else ". Give the environment an instruction with --env.prompt"
            raise UsageError(f"{type(self._env).__name__} does not suit the policy: {error}{hint}") from error


class ActingInRealTime(Acting):
    """Real-time chunking for one batch of episodes: a chunk is ready `delay` control steps after it was requested.

    Meanwhile the previous chunk is executed; the new one is inpainted onto it. Queries are `execute` actions apart.
    """

    def __init__(self, policy: Policy, env: Env, *, delay: int, execute: int, max_guidance: float = MAX_GUIDANCE):
        """Raises ValueError if delay and execute do not fit the chunk, or the largest guidance is not above 0."""
        super().__init__(policy, env)
        if not 0 < max_guidance < float("inf"):
            raise ValueError(f"a largest guidance of {max_guidance:g} must be above 0 and finite")
        self._delay, self._execute = delay, execute
        self._max_guidance = max_guidance
        self._ahead = policy.form.window.num_ahead
        self._weights = prefix_weights(self._ahead, delay, execute)
        self._plan: np.ndarray | None = None

    def __call__(self, observation: EnvObservation, keys: Key[Array, " b"]) -> np.ndarray:
        """The actions to execute from now on [b, h, a]: the old plan while the new chunk is computed, then that."""
        prepared, draws = self._prepared(observation), _draws(keys)
        if self._plan is None:
            self._plan = np.stack([answer["actions"] for answer in self._policy.answer(prepared, draws)])
            return self._plan
        rest = self._plan[:, self._execute :]
        towards = self._towards(rest, np.stack([state for _, state in prepared]))
        chunks = np.stack([answer["actions"] for answer in self._policy.answer(prepared, draws, towards)])
        self._plan = np.concatenate([rest[:, : self._delay], chunks[:, self._delay :]], axis=1)
        return self._plan

    def _towards(self, rest: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rest of the plan as normalised model actions relative to the present states, weights, and bound."""
        robot, (horizon, width) = self._policy.form.robot, self._policy.sampler.chunk
        _, relative = robot.to_model(states, rest)
        assert relative is not None
        known = self._policy.translation.normalize
        actions = normalize(relative, known.stats["actions"], known.form)
        target = np.zeros((len(rest), horizon, width), np.float32)
        first = horizon - self._ahead  # earlier actions are in the past
        target[:, first : first + actions.shape[1], : actions.shape[2]] = actions
        weights = np.zeros_like(target)
        weights[:, first:] = self._weights[:, None]
        return target, weights, np.full(len(rest), self._max_guidance, np.float32)


def _draws(keys: Key[Array, " b"]) -> list[int]:
    """One draw number per row, from its key, for the policy's noise."""
    return (np.asarray(jax.vmap(jax.random.bits)(keys)) >> 1).tolist()
