"""Sizes and kinds of a language model's layers: the differences between Gemma, Llama, Qwen, Mistral and SmolLM.

Read next: `decoder.py`, which uses them, and `models/language/hf_config.py`, which reads them from published files.
"""

import dataclasses
import math

from openpi_train.nn.attention import Heads
from openpi_train.nn.gated_mlp import Activation
from openpi_train.nn.rotary_frequencies import RotaryFrequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """One language model. The defaults of its kinds are Llama's."""

    # Rows of the token table.
    vocab_size: int
    # Width of the tokens.
    width: int
    # Number of layers.
    depth: int
    # Width inside the feed-forward layer.
    mlp_dim: int
    # Query heads.
    num_heads: int
    # Key and value heads; query heads share them evenly.
    num_kv_heads: int
    # Width of a head.
    head_dim: int
    # Of the feed-forward layer; gelu is the form with tanh.
    activation: Activation = "silu"
    # Norms multiply by 1 + their scale (Gemma), not by the scale itself.
    norms_from_one: bool = False
    # Added to the mean square in norms.
    norm_eps: float = 1e-6
    # Norms also after attention and after the feed-forward layer (Gemma 2 and 3).
    post_norms: bool = False
    # Embeddings are multiplied by the square root of their width (Gemma).
    scaled_embeddings: bool = False
    # Queries, keys and values have biases (Qwen2).
    biases: bool = False
    # Queries and keys are normalised before rotation (Qwen3, Gemma 3).
    query_key_norms: bool = False
    # Attention logits are divided by the square root of this; None: of head_dim.
    query_divisor: float | None = None
    # Soft cap of attention logits (Gemma 2).
    attention_cap: float | None = None
    # Soft cap of the logits over the vocabulary (Gemma 2).
    score_cap: float | None = None
    # Tokens that a layer with a sliding window attends to, its own included; None: no layer has one.
    window: int | None = None
    # The layers with a sliding window, counted from 0.
    sliding_layers: tuple[int, ...] = ()
    # Base of the rotary wavelengths.
    rope_base: float = 10_000.0
    # Factor on the wavelengths, for longer contexts.
    rope_factor: float = 1.0
    # Context length before the extension, in Llama 3.1's rule; None: all wavelengths are scaled.
    rope_original_length: int | None = None
    # In that rule, wavelengths that fit into that length at most this often are fully scaled.
    rope_low_frequency: float = 1.0
    # In that rule, wavelengths that fit into that length at least this often are not scaled.
    rope_high_frequency: float = 4.0
    # Base in layers with a sliding window, which are never scaled (Gemma 3); None: as in the other layers.
    sliding_rope_base: float | None = None
    # Logits are computed with the embedding table.
    tied: bool = True

    @property
    def heads(self) -> Heads:
        """Of every layer's attention."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def rope(self) -> RotaryFrequencies:
        """The frequencies of layers without a window."""
        return RotaryFrequencies(
            base=self.rope_base,
            factor=self.rope_factor,
            original_length=self.rope_original_length,
            low_frequency=self.rope_low_frequency,
            high_frequency=self.rope_high_frequency,
        )

    @property
    def sliding_rope(self) -> RotaryFrequencies:
        """The frequencies of layers with a sliding window."""
        return self.rope if self.sliding_rope_base is None else RotaryFrequencies(base=self.sliding_rope_base)

    @property
    def query_scale(self) -> float:
        """The factor on attention logits."""
        return (self.head_dim if self.query_divisor is None else self.query_divisor) ** -0.5

    def check(self) -> list[str]:
        """What cannot be built, as sentences."""
        problems = [
            f"{name} {getattr(self, name)} must be at least 1"
            for name in ("vocab_size", "width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
            if getattr(self, name) < 1
        ]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        problems += [
            f"{name} {value} must be above 0"
            for name in (
                *("norm_eps", "query_divisor", "attention_cap", "score_cap", "rope_base", "rope_factor"),
                *("rope_original_length", "rope_low_frequency", "sliding_rope_base"),
            )
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf
        ]
        if not self.rope_low_frequency < self.rope_high_frequency < math.inf:
            problems.append(
                f"rope_high_frequency {self.rope_high_frequency} must be above rope_low_frequency "
                f"{self.rope_low_frequency}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} must be even")
        if outside := [layer for layer in self.sliding_layers if not 0 <= layer < self.depth]:
            problems.append(f"sliding_layers {outside} are none of the {self.depth} layers")
        if bool(self.sliding_layers) != (self.window is not None):
            problems.append("window and sliding_layers go together: give both, or neither")
        if self.window is not None and self.window < 1:
            problems.append(f"window {self.window} must be at least 1")
        return problems
