"""Dropout: how much is dropped, by the row's key alone, and what is left."""

import jax
import jax.numpy as jnp
import numpy as np

from openpi_train.keys import row_keys
from openpi_train.nn.dropout import dropped, numbered


def test_values_are_dropped_by_the_key_of_their_row_and_the_others_grow():
    keys, x = row_keys(0, 0, jnp.arange(4)), jnp.ones((4, 50, 40), jnp.bfloat16)
    found = np.asarray(dropped(x, keys, 0.25), np.float32)
    kept = found > 0
    # Of 8,000 values, within four standard deviations.
    assert abs(kept.mean() - 0.75) < 4 * (0.75 * 0.25 / kept.size) ** 0.5
    np.testing.assert_array_equal(found[kept], np.float32(jnp.bfloat16(1 / 0.75)))
    np.testing.assert_array_equal(found[2:], dropped(x[2:], keys[2:], 0.25).astype(jnp.float32))
    assert len({row.tobytes() for row in kept}) == 4
    assert (dropped(x, None, 0.25) == x).all() and (dropped(x, keys, 0.0) == x).all()


def test_keys_of_other_numbers_are_others():
    keys = row_keys(0, 0, jnp.arange(2))
    found = [jax.random.key_data(numbered(keys, number)) for number in (0, 1)]
    assert not (found[0] == found[1]).all() and numbered(None, 1) is None
