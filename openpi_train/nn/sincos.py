"""The encoding of flow and diffusion times by sines and cosines.

Read next: `models/pi0/pi0_network.py`, `unet1d.py`.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def sincos_encoding(
    position: Float[Array, "*n"], width: int, min_period: float, max_period: float
) -> Float[Array, "*n width"]:
    """Sines, then cosines, of `position` at `width / 2` periods spaced evenly in logarithm, in float32.

    Angles reach hundreds of turns, where float32 rounding matters: the order of operations is openpi's, on purpose, and
    what does not depend on `position` is computed here as XLA does on CPUs, not by the device. A GPU's powers differ in
    the last bit, which an angle multiplies.
    """
    single, last = np.float32, max(width // 2 - 1, 1)
    fraction = np.arange(width // 2, dtype=single) * single(1 / last)
    fraction[last:] = 1
    power = np.power(max_period / min_period, fraction, dtype=np.float64).astype(single)
    frequency = single(1) / (single(min_period) * power) * single(2) * single(np.pi)
    angle = position.astype(jnp.float32)[..., None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
