"""Sizes and kinds of a language model's decoder: what differs between Gemma, Llama, Qwen, Mistral and SmolLM.

Read next: `decoder.py`, which computes by them, and `models/hf_config.py`, which reads them from published files.
"""

import dataclasses

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
    # What norms multiply by is 1 + their scale (Gemma), or the scale itself.
    norms_from_one: bool = False
    # Added to the mean square in norms.
    norm_eps: float = 1e-6
    # Norms behind attention and feed-forward layer too (Gemma 2 and 3).
    post_norms: bool = False
    # Embeddings are multiplied by the square root of their width (Gemma).
    scaled_embeddings: bool = False
    # Queries, keys and values have biases (Qwen2).
    biases: bool = False
    # Queries and keys are normed before they are rotated (Qwen3, Gemma 3).
    query_key_norms: bool = False
    # Products of queries and keys are divided by the square root of this; None: of head_dim.
    query_divisor: float | None = None
    # Bound of these products (Gemma 2); None: none.
    attention_cap: float | None = None
    # Bound of the scores of tokens (Gemma 2); None: none.
    score_cap: float | None = None
    # Tokens that a sliding layer sees, the present one among them; None: no layer slides.
    window: int | None = None
    # The layers that slide, counted from 0.
    sliding_layers: tuple[int, ...] = ()
    # Rotary positions: the base of their wavelengths.
    rope_base: float = 10_000.0
    # By how much wavelengths are stretched for longer texts.
    rope_factor: float = 1.0
    # Stretched by Llama 3.1's rule, which goes by this length of the first training's texts; None: all of them are.
    rope_original_length: int | None = None
    # In that rule, waves that fit in no more often are stretched wholly.
    rope_low_frequency: float = 1.0
    # In that rule, waves that fit in at least so often are not stretched.
    rope_high_frequency: float = 4.0
    # The base in sliding layers, where nothing is stretched (Gemma 3); None: they have the frequencies of the others.
    sliding_rope_base: float | None = None
    # Tokens are scored by the table that embeds them.
    tied: bool = True

    @property
    def rope(self) -> RotaryFrequencies:
        """The frequencies of layers that see everything."""
        return RotaryFrequencies(
            base=self.rope_base,
            factor=self.rope_factor,
            original_length=self.rope_original_length,
            low_frequency=self.rope_low_frequency,
            high_frequency=self.rope_high_frequency,
        )

    @property
    def sliding_rope(self) -> RotaryFrequencies:
        """The frequencies of layers that slide."""
        return self.rope if self.sliding_rope_base is None else RotaryFrequencies(base=self.sliding_rope_base)

    @property
    def query_scale(self) -> float:
        """The factor on products of queries and keys."""
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
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} must be even")
        if outside := [layer for layer in self.sliding_layers if not 0 <= layer < self.depth]:
            problems.append(f"sliding_layers {outside} are none of the {self.depth} layers")
        if bool(self.sliding_layers) != (self.window is not None):
            problems.append("window and sliding_layers go together: give both, or neither")
        if self.window is not None and self.window < 1:
            problems.append(f"window {self.window} must be at least 1")
        return problems
