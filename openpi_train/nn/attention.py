"""Attention of grouped query heads, rotary positions, and which token may see which.

Read next: `gemma.py`, which projects to heads and back.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Added weight zero without the NaN that -inf gives in a row with nothing to see (padding). Gemma's own constant.
_MASKED = -2.3819763e38


def rotary_angles(
    positions: Int[Array, "b t"], head_width: int, max_wavelength: float = 10_000.0
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """Sines and cosines that `rotate` needs, in float32; the same for all layers and heads."""
    exponents = np.arange(head_width // 2, dtype=np.float32) * np.float32(2.0 / head_width)
    timescale = max_wavelength ** jnp.asarray(exponents)
    angles = positions[..., None, None].astype(jnp.float32) / timescale
    return jnp.sin(angles), jnp.cos(angles)


def rotate(
    heads: Float[Array, "b t n c"], sine: Float[Array, "b t 1 half"], cosine: Float[Array, "b t 1 half"]
) -> Float[Array, "b t n c"]:
    """Rotary position encoding (Su et al. 2021); first and second half of a head pair up. Computed in float32."""
    first, second = jnp.split(heads, 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(heads.dtype)


def attend(
    query: Float[Array, "b t n c"],
    key: Float[Array, "b s k c"],
    value: Float[Array, "b s k c"],
    mask: Bool[Array, "b t s"],
) -> Float[Array, "b t n c"]:
    """Values averaged by softmax(query . key / sqrt(c)); `n / k` query heads share a key head. Softmax in float32."""
    b, t, n, c = query.shape
    k = key.shape[2]
    grouped = (query * c**-0.5).reshape(b, t, k, n // k, c)
    logits = jnp.einsum("btkgc,bskc->bkgts", grouped, key, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[:, None, None], logits, _MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskc->btkgc", weights, value).reshape(b, t, n, c)


def block_mask(
    valid: Bool[Array, "b t"], block: Int[np.ndarray, " t"], branch: Int[np.ndarray, " t"]
) -> Bool[Array, "b t t"]:
    """Row i, column j: whether token i sees token j.

    It does where both are valid, j's block is not later than i's, and j lies on the common trunk (branch 0) or on
    i's own branch. Blocks make a prefix that sees itself only; branches let several flow draws share that prefix.
    """
    visible = block[None, :] <= block[:, None]
    visible &= (branch[None, :] == 0) | (branch[None, :] == branch[:, None])
    return jnp.asarray(visible) & valid[:, None, :] & valid[:, :, None]
