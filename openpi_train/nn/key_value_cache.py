"""Keys and values of earlier tokens, for generation. Read next: `decoder.py: prefill, extend`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from openpi_train.types import pytree, tree_of


@pytree
class KeyValueCache:
    """Each layer's keys and values in `s` slots per row: slot i is that of the row's token at position i.

    The first `length` slots of a row are in use. What is in the others is not read. Rows are independent of each
    other: they may be of any lengths, and may be taken, put and reordered on the first axis of all fields.
    """

    keys: tuple[Float[Array, "b k s c"], ...]
    values: tuple[Float[Array, "b k s c"], ...]
    length: Int[Array, " b"]

    @property
    def num_slots(self) -> int:
        """The number of tokens that a row can hold."""
        return self.keys[0].shape[2]

    def grown(self, num_slots: int) -> "KeyValueCache":
        """This cache with `num_slots` more free slots per row."""

        def grow(kept: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(jnp.pad(one, [(0, 0), (0, 0), (0, num_slots), (0, 0)]) for one in kept)

        return tree_of(KeyValueCache, keys=grow(self.keys), values=grow(self.values), length=self.length)

    def cut(self, num_slots: int) -> "KeyValueCache":
        """The first `num_slots` slots."""
        keys, values = (tuple(one[:, :, :num_slots] for one in kept) for kept in (self.keys, self.values))
        return tree_of(KeyValueCache, keys=keys, values=values, length=self.length)

    def with_first(self, first: "KeyValueCache") -> "KeyValueCache":
        """This cache with its first slots and its lengths replaced by those of `first`, which was cut from it."""

        def put(kept: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(jax.lax.dynamic_update_slice(*pair, (0,) * 4) for pair in zip(kept, new, strict=True))

        keys, values = put(self.keys, first.keys), put(self.values, first.values)
        return tree_of(KeyValueCache, keys=keys, values=values, length=first.length)
