"""The config of SmolVLA (Shukor et al. 2025): sizes, what stays fixed, and the rows that it reads.

Fields that LeRobot's `SmolVLAConfig` also has keep its names and defaults (lerobot 0.6.1), but for `chunk_size`,
`max_action_dim` and `tokenizer_max_length`, which have the names that they have in every policy here. The sizes are
those of SmolVLM2-500M. Read next: `smolvla_network.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from flax import nnx

from openpi_train.data.robot.windows import WindowShape
from openpi_train.models.compute import Compute
from openpi_train.models.model_config import below_one
from openpi_train.models.param_rules import ParamRules
from openpi_train.models.prompted import PromptedConfig, PromptedRows
from openpi_train.models.row_text import PromptText
from openpi_train.models.smolvla.smolvla_network import SmolVla
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.siglip import SiglipConfig

_TOWER = SiglipConfig(width=768, depth=12, mlp_dim=3072, num_heads=12, patch_size=16)
# Of the expert's feed-forward layers: two thirds of four times the width, in multiples of this.
_MLP_UNIT = 256
_VISION, _BACKBONE = "image_encoder/.*", "(image_encoder|connector|language)/.*"
# The language model's own answers, which nothing here asks for; checkpoints keep them.
_UNUSED = ("language/head", "language/final_norm/scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVlaConfig(PromptedConfig):
    """The first layers of SmolVLM2, and an action expert that reads their keys and values."""

    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample", "action_times"})

    # Steps of an action chunk.
    action_horizon: int = 50
    # Maximum number of prompt tokens; rows are as long as the run's longest prompt.
    max_token_len: int = 48
    # Tokens that the language model knows: at least as many as the tokenizer has.
    vocab_size: int = 49_280
    # Height and width of the images in pixels.
    image_size: int = 512
    # Sizes of the image tower.
    siglip: SiglipConfig = _TOWER
    # Side of the squares of patches that become one token.
    pixel_shuffle: int = 4
    # Layers of the language model, counted from its first.
    num_vlm_layers: int = 16
    # Width of the language model's tokens.
    width: int = 960
    # Width inside the language model's feed-forward layers.
    mlp_dim: int = 2560
    # Query heads, of the language model and of the expert.
    num_heads: int = 15
    # Key and value heads of both; query heads share them evenly.
    num_kv_heads: int = 5
    # Width of a head.
    head_dim: int = 64
    # Width of the expert's tokens, as a share of the language model's.
    expert_width_multiplier: float = 0.75
    # Every so many layers of the expert, from the first on, actions attend to each other; in the others to the
    # language model alone.
    self_attn_every_n_layers: int = 2
    # Keep the image tower fixed.
    freeze_vision_encoder: bool = True
    # Keep image tower, connector and language model fixed.
    train_expert_only: bool = True
    # Train the projection of the state, which the language model reads.
    train_state_proj: bool = True

    def problems(self) -> list[str]:
        problems = self.siglip.check(self.image_size)
        problems += below_one(
            self, "action_dim", "action_horizon", "max_token_len", "pixel_shuffle", "self_attn_every_n_layers"
        )
        problems += self.language.check()
        if not problems and (self.image_size // self.siglip.patch_size) % self.pixel_shuffle:
            problems.append(
                f"the {self.image_size // self.siglip.patch_size} patches of a row of the image (image_size / "
                f"siglip.patch_size) are not a multiple of pixel_shuffle {self.pixel_shuffle}"
            )
        if not problems and self.num_vlm_layers % self.self_attn_every_n_layers:
            problems.append(
                f"num_vlm_layers {self.num_vlm_layers} is not a multiple of self_attn_every_n_layers "
                f"{self.self_attn_every_n_layers}"
            )
        if not problems and (self.expert.width < 2 or self.expert.width % 2):
            problems.append(
                f"the expert's width, width {self.width} times expert_width_multiplier "
                f"{self.expert_width_multiplier}, must be even, and at least 2: it is {self.expert.width}"
            )
        return problems

    @property
    def rows(self) -> PromptedRows:
        """The present step and a chunk from it on, all of which is executed, as LeRobot does (`n_action_steps`)."""
        window = WindowShape(horizon=self.action_horizon, execute=self.action_horizon)
        return dataclasses.replace(super().rows, window=window, into_corner=True)

    @property
    def language(self) -> DecoderSizes:
        """The sizes of the language model's layers that are used."""
        return DecoderSizes(
            vocab_size=self.vocab_size,
            width=self.width,
            depth=self.num_vlm_layers,
            mlp_dim=self.mlp_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=1e-5,
            scaled_embeddings=True,
            tied=False,
        )

    @property
    def expert(self) -> DecoderSizes:
        """The sizes of the action expert's layers. The width inside its feed-forward layers follows from its width."""
        width = int(self.width * self.expert_width_multiplier)
        hidden = 4 * int(2 * width / 3)
        return dataclasses.replace(self.language, width=width, mlp_dim=-(-hidden // _MLP_UNIT) * _MLP_UNIT)

    @property
    def compute(self) -> Compute:
        """The expert's heads are the language model's."""
        return dataclasses.replace(super().compute, heads=(self.siglip.heads, self.language.heads))

    @property
    def text(self) -> PromptText:
        return PromptText(limit=self.max_token_len, with_state=False)

    @property
    def tokens_per_image(self) -> int:
        return self.siglip.num_tokens(self.image_size) // self.pixel_shuffle**2

    def num_suffix_tokens(self, draws: int) -> int:
        return draws * self.action_horizon + 1

    def build(self, rngs: nnx.Rngs) -> SmolVla:
        return SmolVla(self, rngs=rngs)

    @property
    def param_rules(self) -> ParamRules:
        return ParamRules(groups={"vision": _VISION, "backbone": _BACKBONE}, frozen=self._frozen)

    def _frozen(self, path: str) -> bool:
        """What LeRobot keeps fixed, and what computes nothing here."""
        match path.split("/")[0]:
            case "image_encoder":
                return self.freeze_vision_encoder or self.train_expert_only
            case "connector" | "language":
                return self.train_expert_only or path in _UNUSED
            case "state_proj":
                return not self.train_state_proj
        return False

    @property
    def smaller_runs(self) -> Sequence[str]:
        return () if self.train_expert_only else ("train the expert alone: --model.train-expert-only",)
