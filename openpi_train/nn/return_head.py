"""`ReturnHead`: how likely each return is, from what a policy computes of an observation.

A value function as a distribution over bins (C51: Bellemare et al. 2017; over the returns of stored episodes, as in
RECAP: Physical Intelligence 2025). Returns lie in [-1, 0]. Read next: `objectives/return_distribution.py`, which trains
it; `value_head.py`, the critic of RL.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

# Units of each of the two hidden layers, as in `value_head.py`.
_WIDTH = 256


class ReturnHead(nnx.Module):
    """An MLP, float32. All returns are equally likely at first. Its gradient reaches its inputs.

    Args:
        width: the number of features.
        num_bins: the number of returns that are told apart.
    """

    def __init__(self, width: int, num_bins: int, rngs: nnx.Rngs):
        self.layer_in = nnx.Linear(width, _WIDTH, rngs=rngs)
        self.layer_mid = nnx.Linear(_WIDTH, _WIDTH, rngs=rngs)
        self.layer_out = nnx.Linear(_WIDTH, num_bins, kernel_init=nnx.initializers.zeros_init(), rngs=rngs)

    @jax.named_scope("return_head")
    def __call__(self, features: Float[Array, "b d"]) -> Float[Array, "b bins"]:
        """The logits of the bins, float32."""
        x = nnx.swish(self.layer_in(features.astype(jnp.float32)))
        return self.layer_out(nnx.swish(self.layer_mid(x)))


def bin_returns(num_bins: int) -> Float[Array, " bins"]:
    """The return of each bin: evenly from -1 to 0."""
    return jnp.linspace(-1.0, 0.0, num_bins)


def in_bins(returns: Float[Array, " b"], num_bins: int) -> Float[Array, "b bins"]:
    """Each return as a distribution over the two nearest bins, whose mean it is (the projection of C51).

    Returns beyond [-1, 0] are those of the nearest end. RECAP takes the nearest bin alone.
    """
    place = (jnp.clip(returns, -1.0, 0.0) + 1.0) * (num_bins - 1)
    distance = jnp.abs(place[:, None] - jnp.arange(num_bins))  # b bins
    return jnp.maximum(1.0 - distance, 0.0)


def mean_return(logits: Float[Array, "b bins"]) -> Float[Array, " b"]:
    """The value: the mean of the distribution."""
    return jax.nn.softmax(logits, axis=-1) @ bin_returns(logits.shape[-1])
