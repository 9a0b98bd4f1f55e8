"""Keys and values of earlier tokens, for generation. Read next: `decoder.py: prefill, extend`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openpi_train.types import pytree, tree_of


@pytree
class KeyValueCache:
    """Keys and values of all layers in `s` slots, of which the first `length` are in use.

    `is_token` is False for slots with padding. All rows write to the same slot, each with its own position.
    """

    keys: Float[Array, "layers b s k c"]
    values: Float[Array, "layers b s k c"]
    positions: Int[Array, "b s"]
    is_token: Bool[Array, "b s"]
    length: Int[Array, ""]

    def grown(self, num_slots: int) -> "KeyValueCache":
        """This cache with `num_slots` more free slots."""

        def padded(x: Array, axis: int) -> Array:
            return jnp.pad(x, [(0, num_slots if dim == axis else 0) for dim in range(x.ndim)])

        return tree_of(
            KeyValueCache,
            keys=padded(self.keys, 2),
            values=padded(self.values, 2),
            positions=padded(self.positions, 1),
            is_token=padded(self.is_token, 1),
            length=self.length,
        )


def put(slots: Array, new: Array, at: Int[Array, ""], axis: int) -> Array:
    """`slots` with `new` written from `at` on along `axis`, in place if a loop carries `slots`."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), at, axis)
