"""Real-time chunking: a new chunk goes on where the one that is being carried out is, by guided flow sampling.

Black, Galliker, Levine 2025, "Real-Time Execution of Action Chunking Flow Policies" (arXiv:2506.07339): while a chunk
is computed, `delay` actions of the one before are carried out. The new chunk is inpainted: its first `delay` actions
are to be those, and the overlap behind them counts less and less, so that it neither jumps nor ignores what it sees.
The flow's velocity is corrected by the gradient of the weighted distance between where it leads and that target
(equations 2 to 5). Time runs from 1 (noise) to 0 (actions) here: the paper's tau is 1 - t. Read next: `flow.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from openpi_train.types import pytree

# Noisy actions [b, h, a] and times [b] to velocities [b, h, a].
Velocity = Callable[[Float[Array, "b h a"], Float[Array, " b"]], Float[Array, "b h a"]]
# The paper's clip of the guidance: with few denoising steps more of it diverges.
MAX_GUIDANCE = 5.0


@pytree
class Guide:
    """Where chunks are to lead, and how much each of their numbers is to be the target's (`prefix_weights`)."""

    target: Float[Array, "b h a"]
    weights: Float[Array, "b h a"]


def prefix_weights(horizon: int, delay: int, execute: int) -> Float[np.ndarray, " h"]:
    """How much each action of the new chunk is to be that of the old one: the soft mask (equation 5), float32.

    1 for the first `delay`; then falling, for actions that the old chunk plans too; 0 for the last `execute`, of which
    it knows nothing. Raises ValueError where delay, execute and horizon do not fit.
    """
    if not 0 <= delay <= horizon - execute or execute < 1:
        raise ValueError(
            f"a delay of {delay} and {execute} executed actions do not fit a chunk of {horizon}: the delay may be at "
            f"most {horizon - execute}, the horizon less the executed ones"
        )
    place = np.arange(horizon)
    share = np.clip((horizon - execute - place) / (horizon - execute - delay + 1), 0, 1)
    soft = share * np.expm1(share) / np.expm1(1)
    return np.where(place < delay, 1.0, soft).astype(np.float32)


def guided_velocity(
    velocity: Velocity,
    actions: Float[Array, "b h a"],
    time: Float[Array, " b"],
    guide: Guide,
    max_guidance: float = MAX_GUIDANCE,
) -> Float[Array, "b h a"]:
    """The velocity, corrected towards where the flow would lead to the target (equations 2 to 4)."""
    t = time[:, None, None]

    def destination(actions):
        found = velocity(actions, time)
        return actions - t * found, found

    leads_to, pull_back, plain = jax.vjp(destination, actions, has_aux=True)
    (correction,) = pull_back(guide.weights * (guide.target - leads_to))
    # (1 - tau) / (tau r^2) with r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2): infinite at both ends, and clipped.
    strength = jnp.minimum((t**2 + (1 - t) ** 2) / jnp.maximum(t * (1 - t), 1e-12), max_guidance)
    return plain - strength * correction
