"""Guidance by an indicator: a flow policy is told whether a chunk was better than expected, and asked for such chunks.

    v = v_none + guidance * (v_better - v_none)      (CFGRL, Frans et al. 2025; RECAP, Physical Intelligence 2025)

0 is the policy that is told nothing, 1 the one that is told `BETTER`; more than 1 goes beyond it. Read next: `flow.py`,
`objectives/indicator_flow.py` and `advantage_conditioned_flow.py`, which train it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from openpi_train.keys import for_purpose
from openpi_train.types import Network, Tree

# What a policy is told of a chunk. `NONE` adds nothing to the network: it is the policy that knows no indicator.
NONE, BETTER, WORSE = 0, 1, 2
NUM_TOLD = 2


def conditioned_velocity(
    model: Network, seen: Tree, noisy: Float[Array, "b r h a"], time: Float[Array, "b r *each"], guidance: float | None
) -> Float[Array, "b r h a"]:
    """The model's velocity, guided, float32; with `guidance` None that of a model without indicator.

    Both velocities are draws of the same row in one pass, which share what the model sees. Where only one counts, only
    that one is computed.
    """
    if guidance is None:
        return model.velocity(seen, noisy, time).astype(jnp.float32)
    if guidance in (0.0, 1.0):
        told = jnp.full(time.shape, BETTER if guidance else NONE)
        return model.velocity(seen, noisy, time, told).astype(jnp.float32)
    told = jnp.concatenate([jnp.full(time.shape, NONE), jnp.full(time.shape, BETTER)], axis=1)
    twice = (jnp.concatenate([one, one], axis=1) for one in (noisy, time))
    none, better = jnp.split(model.velocity(seen, *twice, told).astype(jnp.float32), 2, axis=1)
    return none + guidance * (better - none)


def check_guidance(flag: str, guidance: float | None) -> list[str]:
    """Why this guidance cannot be, as a sentence."""
    if guidance is None or 0 <= guidance < float("inf"):
        return []
    return [f"{flag} {guidance} must be at least 0: 0 is the policy without indicator, 1 the one that is told `better`"]


def dropped(keys: Key[Array, " n"], num_draws: int, drop: float) -> Bool[Array, "n r"]:
    """Which draws of each row are told nothing in training: each with probability `drop`."""

    def of_row(key: Key[Array, ""]) -> Float[Array, " r"]:
        return jax.random.uniform(key, (num_draws,))

    return jax.vmap(of_row)(for_purpose(keys, "indicator")) < drop


def check_drop(flag: str, drop: float) -> list[str]:
    """Why this probability cannot be, as a sentence."""
    if 0 < drop < 1:
        return []
    return [
        f"{flag} {drop} must be between 0 and 1: without draws that are told nothing there is no guidance, and without "
        "the others no indicator"
    ]


def velocities_per_draw(guidance: float | None) -> int:
    """How many velocities one guided velocity takes."""
    return 1 if guidance in (None, 0.0, 1.0) else 2
