"""Bytes that a transformer stack keeps for its backward pass: an estimate, from shapes. Used by `models/pi0.py`.

Counts the arrays that reverse-mode differentiation saves under each rematerialisation policy, plus what the one layer
that is being recomputed holds. The compiler fuses some of them away: the estimate is an upper one.
"""

import dataclasses

from openpi_train.nn.layers import Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Sizes of a stack of equal layers, for one row. `query_dim` is heads x head_dim over all query heads."""

    tokens: int
    width: int
    depth: int
    mlp_dim: int
    query_dim: int
    key_dim: int
    num_heads: int
    gated: bool

    @property
    def _products(self) -> int:
        """Elements of one layer's products with weights: query, key, value, output, and the MLP's."""
        up = 2 if self.gated else 1
        return self.tokens * (2 * self.width + self.query_dim + 2 * self.key_dim + up * self.mlp_dim)

    @property
    def _rest(self) -> int:
        """Elements of one layer's other intermediates: norms, residual, attended values, activations."""
        return self.tokens * (3 * self.width + self.query_dim + 2 * self.mlp_dim)

    def bytes(self, remat: Remat, itemsize: int, attended_tokens: int) -> float:
        """Bytes for one row. `attended_tokens`: how many tokens every token may look at."""
        # float32 logits and probabilities, and the probabilities in the activations' type.
        attention = self.num_heads * self.tokens * attended_tokens * (8 + itemsize)
        layer = itemsize * (self._products + self._rest) + attention
        inputs = itemsize * self.depth * self.tokens * self.width
        match remat:
            case "full":
                return inputs + layer
            case "dots":
                return inputs + itemsize * self.depth * self._products + layer
            case "none":
                return inputs + self.depth * layer
