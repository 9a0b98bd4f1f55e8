"""`ValueHead`: what a critic expects, from what a policy already computes of an observation.

Read next: `objectives/policy_gradient.py`, which trains it.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

# Units of each of the two hidden layers.
_WIDTH = 256


class ValueHead(nnx.Module):
    """An MLP, float32. Values are 0 at first.

    Its gradient ends at its inputs, as with RLinf's `detach_critic_input`: the policy does not learn to predict values.

    Args:
        width: the number of features.
    """

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.layer_in = nnx.Linear(width, _WIDTH, rngs=rngs)
        self.layer_mid = nnx.Linear(_WIDTH, _WIDTH, rngs=rngs)
        self.layer_out = nnx.Linear(_WIDTH, 1, kernel_init=nnx.initializers.zeros_init(), rngs=rngs)

    @jax.named_scope("value_head")
    def __call__(self, features: Float[Array, "b d"]) -> Float[Array, " b"]:
        """The values, float32."""
        x = jax.lax.stop_gradient(features).astype(jnp.float32)
        x = nnx.swish(self.layer_in(x))
        return self.layer_out(nnx.swish(self.layer_mid(x)))[:, 0]
