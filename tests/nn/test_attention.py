"""Attention, rotary positions and masks against their formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from openpi_train.nn.attention import attend, block_mask, rotary_angles, rotate


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def test_grouped_attention_equals_the_formula_head_by_head():
    query, key, value = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 2, 8), normal(2, 2, 7, 2, 8)
    mask = jax.random.bernoulli(jax.random.key(3), 0.6, (2, 5, 7)).at[:, :, 0].set(True)
    result = attend(query, key, value, mask)
    for b in range(2):
        for head in range(4):
            q, k, v = (
                np.asarray(x, np.float64) for x in (query[b, :, head], key[b, :, head // 2], value[b, :, head // 2])
            )
            logits = np.where(mask[b], q @ k.T / np.sqrt(8), -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            np.testing.assert_allclose(result[b, :, head], weights @ v, atol=1e-5)


def test_a_row_that_sees_nothing_is_finite():
    result = attend(normal(0, 1, 1, 2, 4), normal(1, 1, 3, 1, 4), normal(2, 1, 3, 1, 4), jnp.zeros((1, 1, 3), bool))
    assert np.isfinite(result).all()


def test_rotary_products_depend_on_the_distance_only():
    query, key = normal(0, 1, 1, 1, 16), normal(1, 1, 1, 1, 16)

    def product(i, j):
        left = rotate(query, *rotary_angles(jnp.array([[i]]), 16))
        right = rotate(key, *rotary_angles(jnp.array([[j]]), 16))
        return float(jnp.sum(left * right))

    np.testing.assert_allclose(product(3, 10), product(103, 110), rtol=1e-4)
    np.testing.assert_allclose(product(0, 0), float(jnp.sum(query * key)), rtol=1e-6)
    assert abs(product(3, 10) - product(3, 11)) > 1e-3


def test_blocks_and_branches_say_who_sees_whom():
    valid = jnp.array([[True, False, True, True, True, True]])
    block, branch = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 0, 0, 1, 1, 2])
    mask = block_mask(valid, block, branch)[0].astype(int)
    assert mask.tolist() == [
        [1, 0, 0, 0, 0, 0],  # the prefix sees its valid tokens
        [0, 0, 0, 0, 0, 0],  # padding sees nothing and is seen by nothing
        [1, 0, 1, 0, 0, 0],  # the trunk of the suffix sees the prefix and itself
        [1, 0, 1, 1, 1, 0],  # the first branch
        [1, 0, 1, 1, 1, 0],
        [1, 0, 1, 0, 0, 1],  # the second one does not see it
    ]
