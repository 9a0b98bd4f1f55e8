"""A pole that falls while the policy thinks: Gymnasium's InvertedPendulum-v5 at 50 Hz, with noise, and an expert.

An unstable system: an error of the pole's angle grows by a tenth in each control step (the largest eigenvalue of the
linearised system is 1.095). An episode succeeds if the pole stands, within 0.2 rad, at its end. Gaussian noise on the
actions is what Black, Galliker, Levine 2025 (arXiv:2506.07339) add to their simulated tasks.
Read next: `real_time_delay.py`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from openpi_train.envs.gym_env import GymEnv, GymEpisodes

# Standard deviation of the disturbances; an action, the force on the cart, lies in [-3, 3].
NOISE = 0.03
# Of the expert's own actions, which correct it as they correct all else. It is recorded, as a person's is.
_EXPERT_NOISE = 0.1
# Range of initial positions and velocities; Gymnasium's own is 0.01.
_RESET_NOISE = 0.05
_NUM_STEPS = 200
# The linear-quadratic regulator of the system, linearised by finite differences where the pole stands, for the costs
# 1 of position and angle, 0.1 of their velocities, and 1 of the action (scipy.linalg.solve_discrete_are).
_GAIN = np.array([0.861, 6.63, 0.996, 1.12])


def pole(noise: float = NOISE) -> Any:
    """The environment, for `--env gym:benchmarks/pole.py:pole`."""
    import gymnasium

    class Disturbed(gymnasium.Wrapper):
        """Adds noise to actions, drawn from the episode's own seed."""

        def step(self, action):
            disturbed = action + noise * self.unwrapped.np_random.standard_normal(action.shape)
            seen, reward, terminated, truncated, told = self.env.step(disturbed)  # MuJoCo clips it
            return seen, reward, terminated, truncated, {**told, "is_success": not terminated}

    given = {"reset_noise_scale": _RESET_NOISE, "frame_skip": 1, "max_episode_steps": -1, "disable_env_checker": True}
    return Disturbed(gymnasium.make("InvertedPendulum-v5", **given))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoleEnv(GymEnv):
    """The pole, with an expert."""

    source: str = f"{Path(__file__).resolve()}:pole"
    prompt: str | None = "balance"
    success_at: str = "last"  # pyright: ignore[reportIncompatibleVariableOverride]
    step_limit: int | None = _NUM_STEPS

    @property
    def has_expert(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    def for_demonstrations(self) -> "PoleEnv":
        """Without disturbances: what follows of a chunk's beginning is then what the expert did about it."""
        return dataclasses.replace(self, make=("noise=0.0",))

    def demonstrate(
        self, states: GymEpisodes, keys: Key[Array, " b"]
    ) -> tuple[Float[np.ndarray, "b a"], Float[np.ndarray, "b a"]]:
        """The regulator's actions with noise, both as recorded and as carried out."""
        noise = _EXPERT_NOISE * np.asarray(jax.vmap(jax.random.normal)(keys))
        actions = (np.stack(states.observations) @ _GAIN + noise)[:, None].astype(np.float32)
        return actions, actions
