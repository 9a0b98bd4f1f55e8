"""Whether cuDNN's attention computes on this device what the formula says, before a run relies on it.

Read next: `attention.py`, whose forms are compared; `training/prepare.py`, which asks.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from openpi_train.nn.attention import Heads, all_seen, attend, flash_attend
from openpi_train.runtime.exits import brief

# Rows, and tokens of queries and of keys, which do not fill the kernels' tiles.
ROWS, QUERIES, KEYS = 2, 202, 330
# The distance from float32's results, as a share of their norm, up to which a result counts as right. Rounding to
# bfloat16 makes less than 0.006, a wrong mask or scale more than 0.1 (tests/nn/test_attention_check.py).
TOLERANCE = 0.02

# Of queries, keys, values and a mask, which may be None.
AttentionForm = Callable[[Array, Array, Array, Array | None], Array]


def flash_problem(heads: Sequence[Heads], dtype: DTypeLike, form: AttentionForm = flash_attend) -> str | None:
    """What is wrong with `form`, which trains in `dtype`, on this process's first device; None: nothing is.

    Its outputs and gradients are compared with those of the formula in float32, with a mask and without.
    """
    try:
        for one in heads:
            for masked in (True, False):
                with jax.default_matmul_precision("highest"):
                    expected = results(formula, one, jnp.float32, masked=masked)
                found = distances(results(form, one, dtype, masked=masked), expected)
                if not all(share < TOLERANCE for share in found):  # nor is NaN
                    shares = ", ".join(f"{share:.2g}" for share in found)
                    return (
                        f"for {one.queries} heads of {one.width} outputs and gradients are off by {shares} of their "
                        f"norm, of which {TOLERANCE} are allowed"
                    )
    except Exception as error:  # jax, XLA and cuDNN each have their own for what they cannot do
        return brief(error)
    return None


def formula(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    """XLA's form."""
    return attend(query, key, value, all_seen(query, key) if mask is None else mask, "xla")


def results(form: AttentionForm, heads: Heads, dtype: DTypeLike, *, masked: bool) -> list[np.ndarray]:
    """Outputs, and gradients of queries, keys and values, in float32, of the same random inputs for every form.

    With a mask some queries see nothing, as padding does; their outputs are never used.
    """
    queries, keys, width = heads
    random = np.random.default_rng(0)

    def normal(tokens: int, number: int) -> Array:
        return jnp.asarray(random.standard_normal((ROWS, tokens, number, width)), jnp.bfloat16).astype(dtype)

    inputs = normal(QUERIES, queries), normal(KEYS, keys), normal(KEYS, keys)
    mask = jnp.asarray(random.random((ROWS, QUERIES, KEYS)) < 0.7).at[0, :3].set(False)
    used = mask.any(axis=-1)[:, :, None, None] if masked else True
    weights = random.standard_normal((ROWS, QUERIES, queries, width)).astype(np.float32)

    def loss(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        out = jnp.where(used, form(query, key, value, mask if masked else None).astype(jnp.float32), 0.0)
        return jnp.sum(out * weights), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return [np.asarray(x, np.float32) for x in (out, *gradients)]


def distances(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> list[float]:
    """Norms of the differences, as shares of the norms of what is expected."""
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(found, expected, strict=True)]
