"""The frequencies of rotary positions, with the scalings that extend a model's context.

Read next: `attention.py: rotate`, `decoder_sizes.py`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryFrequencies:
    """Frequencies base^(-2i/c), divided by `factor`: all of them, or with `original_length` as Llama 3.1 does."""

    base: float = 10_000.0
    # Factor on the wavelengths.
    factor: float = 1.0
    # Llama 3.1's rule, with the context length before the extension: wavelengths that fit into it `high_frequency`
    # times or more are kept, those that fit `low_frequency` times or less are scaled, those between are interpolated.
    original_length: int | None = None
    low_frequency: float = 1.0
    high_frequency: float = 4.0

    def of_head(self, head_dim: int) -> Float[np.ndarray, " half"]:
        """Radians per position, float32, highest first, as in transformers' `modeling_rope_utils.py`."""
        plain = self.base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        stretched = plain / self.factor
        if self.original_length is None:
            return stretched.astype(np.float32)
        turns = self.original_length * plain / (2 * np.pi)
        kept = np.clip((turns - self.low_frequency) / (self.high_frequency - self.low_frequency), 0.0, 1.0)
        return (kept * plain + (1 - kept) * stretched).astype(np.float32)


def angles_at(
    positions: Int[Array, "b t"], frequencies: Float[np.ndarray, " half"]
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """Sines and cosines that `rotate` needs, in float32."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.sin(angles), jnp.cos(angles)
