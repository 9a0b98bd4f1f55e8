"""Keys and values of earlier tokens, for generation. Read next: `decoder.py: prefill, extend`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from openpi_train.types import pytree, tree_of


@pytree
class KeyValueCache:
    """Keys and values of all layers in `s` slots per row: slot i is that of the row's token at position i.

    The first `length` slots of a row are in use. What is in the others is not read. Rows are independent of each
    other: they may be of any lengths, and may be taken, put and reordered on the first axis of all fields.
    """

    keys: Float[Array, "b layers k s c"]
    values: Float[Array, "b layers k s c"]
    length: Int[Array, " b"]

    @property
    def num_slots(self) -> int:
        """The number of tokens that a row can hold."""
        return self.keys.shape[3]

    def grown(self, num_slots: int) -> "KeyValueCache":
        """This cache with `num_slots` more free slots per row."""
        keys, values = (jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, num_slots), (0, 0)]) for x in (self.keys, self.values))
        return tree_of(KeyValueCache, keys=keys, values=values, length=self.length)
