"""Action chunks drawn from a policy: by the open-loop evaluation and by who asks a trained policy, from equal keys.

Read next: `evaluate.py`, `policy/policy.py`.
"""

from typing import Any

from jaxtyping import Array, Float, Int, Key

from openpi_train.keys import for_purpose, row_keys
from openpi_train.objectives.base import Objective, draw_noise
from openpi_train.types import Observation


def sample_keys(seed: int, draws: Int[Array, " b"]) -> Key[Array, " b"]:
    """A key for each numbered draw; evaluation numbers its held-out rows."""
    return for_purpose(row_keys(seed, 0, draws), "validation/sample")


def sample_chunks(
    objective: Objective,
    model: Any,
    observation: Observation,
    keys: Key[Array, " b"],
    num_steps: int,
    chunk: tuple[int, ...],
    towards: tuple[Float[Array, "b h a"], Float[Array, "b h a"]] | None = None,
) -> Float[Array, "b h a"]:
    """Normalised chunks of the shape `chunk` (h, a), in `num_steps` denoising steps; a row's noise is its key's.

    `towards`: a target and weights, for real-time chunking.
    """
    noise = draw_noise(keys, *chunk)
    if towards is not None:
        return objective.sample_towards(model, observation, noise, num_steps, *towards)
    return objective.sample_actions(model, observation, noise, keys, num_steps)
