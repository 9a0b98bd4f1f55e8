"""Bytes that a transformer stack keeps for its backward pass: an estimate, from shapes. Used by `models/`.

Counts the arrays that reverse-mode differentiation saves under each rematerialisation policy, plus what the one layer
that is being recomputed holds. The compiler fuses some of them away: the estimate is an upper one.
"""

import dataclasses

from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.nn.layers import Remat
from openpi_train.nn.siglip import SiglipConfig


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
    num_key_heads: int
    gated: bool
    # Whether gradients go back through it: not where nothing in or before it trains.
    has_backward: bool = True

    @classmethod
    def of_decoder(cls, sizes: GemmaConfig, tokens: int, *, has_backward: bool = True) -> "Stack":
        """One expert of Gemma's decoder over so many tokens."""
        return cls(
            tokens=tokens,
            width=sizes.width,
            depth=sizes.depth,
            mlp_dim=sizes.mlp_dim,
            query_dim=sizes.num_heads * sizes.head_dim,
            key_dim=sizes.num_kv_heads * sizes.head_dim,
            num_heads=sizes.num_heads,
            num_key_heads=sizes.num_kv_heads,
            gated=True,
            has_backward=has_backward,
        )

    @classmethod
    def of_tower(cls, sizes: SiglipConfig, tokens: int, *, has_backward: bool = True) -> "Stack":
        """SigLIP's layers over the tokens of one image."""
        return cls(
            tokens=tokens,
            width=sizes.width,
            depth=sizes.depth,
            mlp_dim=sizes.mlp_dim,
            query_dim=sizes.width,
            key_dim=sizes.width,
            num_heads=sizes.num_heads,
            num_key_heads=sizes.num_heads,
            gated=False,
            has_backward=has_backward,
        )

    def shared(self, tensor_devices: int) -> "Stack":
        """What one of a tensor group's devices has of it (`sharding/tensor.py`)."""
        return dataclasses.replace(
            self,
            mlp_dim=self.mlp_dim // tensor_devices,
            query_dim=self.query_dim // tensor_devices,
            key_dim=self.key_dim // (tensor_devices if self._shares_keys(tensor_devices) else 1),
            num_heads=self.num_heads // tensor_devices,
        )

    def _shares_keys(self, tensor_devices: int) -> bool:
        return self.num_key_heads % tensor_devices == 0

    def summed_bytes(self, remat: Remat, itemsize: int, tensor_devices: int) -> float:
        """Bytes that the devices of a tensor group add up in a step for one row, not counting weights.

        In every layer after attention and after the MLP, forward, and backward before them; where whole layers are
        recomputed once more after attention. Of keys and values that all devices have, the gradients.
        """
        sums = (4 + (remat == "full") if self.has_backward else 2) * self.width
        keys = 0 if self._shares_keys(tensor_devices) or not self.has_backward else 2 * self.key_dim
        return float(itemsize * self.depth * self.tokens * (sums + keys))

    @property
    def _products(self) -> int:
        """Elements of one layer's products with weights: query, key, value, output, and the MLP's."""
        up = 2 if self.gated else 1
        return self.tokens * (2 * self.width + self.query_dim + 2 * self.key_dim + up * self.mlp_dim)

    @property
    def _attention(self) -> int:
        """Elements of what attention reads and gives in one layer, and of the residual after it."""
        return self.tokens * (2 * self.query_dim + 2 * self.key_dim + self.width)

    @property
    def _rest(self) -> int:
        """Elements of one layer's other intermediates: norms, residual, attended values, activations."""
        return self.tokens * (3 * self.width + self.query_dim + 2 * self.mlp_dim)

    @property
    def _all(self) -> int:
        """Elements of all that the backward pass of one layer reads, but norms and what is there between tokens."""
        wide = 8 if self.gated else 6  # inside the MLP, its activation's own derivative included
        return self.tokens * (2 * self.width + 2 * self.query_dim + 2 * self.key_dim + wide * self.mlp_dim)

    def bytes(self, remat: Remat, itemsize: int, attended_tokens: int) -> float:
        """Bytes for one row. `attended_tokens`: how many tokens every token may look at."""
        # float32 logits and probabilities, and the probabilities in the activations' type.
        attention = self.num_heads * self.tokens * attended_tokens * (8 + itemsize)
        layer = itemsize * (self._products + self._rest) + attention
        if not self.has_backward:
            return itemsize * self.tokens * self.width + layer
        inputs = itemsize * self.depth * self.tokens * self.width
        match remat:
            case "full":
                return inputs + layer
            case "attention":
                return inputs + itemsize * self.depth * self._attention + layer
            case "dots":
                kept = self._products + self.tokens * self.query_dim  # and the attended values
                return inputs + itemsize * self.depth * kept + layer
            case "none":
                norms = 4 * 6 * self.tokens * self.width  # two norms, in float32
                scores = self.num_heads * self.tokens * attended_tokens * (4 + itemsize)
                return self.depth * (itemsize * self._all + norms + scores) + layer
