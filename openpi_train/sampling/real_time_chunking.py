"""Real-time chunking: guided flow sampling that makes a new chunk continue the one being executed.

Black, Galliker, Levine 2025, "Real-Time Execution of Action Chunking Flow Policies" (arXiv:2506.07339): while a chunk
is computed, `delay` actions of the previous one are executed. The new chunk is inpainted: its first `delay` actions
should equal those, and the rest of the overlap has decreasing weight, so that the motion is continuous but reactive.
The flow's velocity is corrected by the gradient of the weighted distance between its predicted result and that target
(equations 2 to 5). Time runs from 1 (noise) to 0 (actions) here: the paper's tau is 1 - t.

A model that was trained to continue clean prefixes (`FlowMatching.max_delay`) needs no gradient: the prefix stays as it
is, and its time is 0. Read next: `flow.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from openpi_train.types import pytree

# (noisy actions [b, h, a], times [b]) -> velocities [b, h, a].
Velocity = Callable[[Float[Array, "b h a"], Float[Array, " b"]], Float[Array, "b h a"]]
# The paper's clip of the guidance, its code's `max_guidance_weight`: larger values diverge with few denoising steps,
# such as the 5 of its simulations. LeRobot's `RTCConfig` has 10.
MAX_GUIDANCE = 5.0


@pytree
class Guide:
    """Target chunks, the weight of each of their values (`prefix_weights`), and the largest strength."""

    target: Float[Array, "b h a"]
    weights: Float[Array, "b h a"]
    max_guidance: Float[Array, " b"] | float = MAX_GUIDANCE


def prefix_weights(horizon: int, delay: int, execute: int) -> Float[np.ndarray, " h"]:
    """Weight of the old chunk for each action of the new one: the soft mask (equation 5), float32.

    1 for the first `delay`; then decreasing over the actions that the old chunk also has; 0 for the last `execute`,
    which it does not have. Raises ValueError if delay, execute and horizon do not fit.
    """
    if not 0 <= delay <= horizon - execute or execute < 0:
        raise ValueError(
            f"a delay of {delay} and {execute} executed actions do not fit a chunk of {horizon}: the delay may be at "
            f"most {horizon - execute}, the horizon less the executed ones"
        )
    place = np.arange(horizon)
    share = np.clip((horizon - execute - place) / (horizon - execute - delay + 1), 0, 1)
    soft = share * np.expm1(share) / np.expm1(1)
    return np.where(place < delay, 1.0, soft).astype(np.float32)


def held_velocity(
    velocity: Callable[[Float[Array, "b h a"], Float[Array, "b h"]], Float[Array, "b h a"]],
    actions: Float[Array, "b h a"],
    time: Float[Array, " b"],
    held: Bool[Array, "b h"],
) -> Float[Array, "b h a"]:
    """The velocity of a model that takes a time of each action, beside `held` actions, which are clean and stay."""
    found = velocity(actions, jnp.where(held, 0.0, time[:, None]))
    return jnp.where(held[..., None], 0.0, found)


def guided_velocity(
    velocity: Velocity, actions: Float[Array, "b h a"], time: Float[Array, " b"], guide: Guide
) -> Float[Array, "b h a"]:
    """The velocity, corrected so that the flow leads towards the target (equations 2 to 4)."""
    t = time[:, None, None]

    def destination(actions):
        found = velocity(actions, time)
        return actions - t * found, found

    leads_to, pull_back, plain = jax.vjp(destination, actions, has_aux=True)
    (correction,) = pull_back(guide.weights * (guide.target - leads_to))
    # (1 - tau) / (tau r^2) with r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2): infinite at both ends, and clipped.
    most = jnp.reshape(guide.max_guidance, (-1, 1, 1))
    strength = jnp.minimum((t**2 + (1 - t) ** 2) / jnp.maximum(t * (1 - t), 1e-12), most)
    return plain - strength * correction
