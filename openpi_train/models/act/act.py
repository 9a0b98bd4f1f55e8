"""The config of ACT (Zhao et al. 2023), action chunking with transformers: sizes, cameras, and what stays fixed.

Fields that LeRobot's `ACTConfig` also has keep its names and defaults (lerobot 0.6.1), but for `chunk_size`, which is
`action_horizon` here as in every policy. Read next: `act_network.py`.
"""

import dataclasses
import re
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from openpi_train.data.robot.windows import WindowShape
from openpi_train.models.act.act_network import Act
from openpi_train.models.compute_config import TransformerConfig
from openpi_train.models.exact_policy import ExactPolicyConfig, ExactRows
from openpi_train.models.model_config import below_one
from openpi_train.models.param_rules import ParamRules

# Mean and standard deviation of ImageNet's pixels in [0, 1], red, green and blue.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The batch norms of the backbone: scale, shift and statistics of the published weights.
_BATCH_NORM = re.compile(r"backbone/(.*/)?\w*norm\w*/\w+")


def _is_batch_norm(path: str) -> bool:
    return _BATCH_NORM.fullmatch(path) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActConfig(TransformerConfig, ExactPolicyConfig):
    """ACT from images and states: the whole chunk in one forward pass, given a latent that is zero when it acts."""

    provides: ClassVar[frozenset[str]] = frozenset({"reconstruction", "sample"})

    # Steps of a chunk.
    action_horizon: int = 100
    # Camera slots of the run's robots; one backbone reads all of them.
    cameras: tuple[str, ...] = ("top",)
    # Height of the images in pixels.
    image_height: int = 480
    # Width of the images in pixels.
    image_width: int = 640
    # Mean of the pixels in [0, 1], per colour, that is subtracted.
    image_mean: tuple[float, float, float] = IMAGENET_MEAN
    # Their standard deviation, by which is divided.
    image_std: tuple[float, float, float] = IMAGENET_STD
    # Widths of the backbone's stages (ResNet-18's).
    backbone_widths: tuple[int, ...] = (64, 128, 256, 512)
    # Width of a token.
    dim_model: int = 512
    # Attention heads; they divide the width.
    n_heads: int = 8
    # Width inside the feed-forward layers.
    dim_feedforward: int = 3200
    # Layers of the encoder of latent, state and images.
    n_encoder_layers: int = 4
    # Layers of the decoder of actions; the original uses one of its seven, by a mistake that LeRobot keeps.
    n_decoder_layers: int = 1
    # Whether an encoder of the chunk draws the latent in training; without, it is zero there too.
    use_vae: bool = True
    # Numbers of the latent.
    latent_dim: int = 32
    # Layers of the encoder of the chunk.
    n_vae_encoder_layers: int = 4
    # Share of the values that the transformers drop in training.
    dropout: float = 0.1

    def problems(self) -> list[str]:
        counts = ("dim_model", "n_heads", "dim_feedforward", "latent_dim")
        layers = ("n_encoder_layers", "n_decoder_layers", "n_vae_encoder_layers")
        problems = super().problems() + below_one(self, *counts, *layers)
        if not problems and (self.dim_model % self.n_heads or self.dim_model % 4):
            problems.append(
                f"dim_model {self.dim_model} must be a multiple of its {self.n_heads} heads, and of 4: sines and "
                "cosines of rows and columns"
            )
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout {self.dropout} must lie in [0, 1)")
        if not self.backbone_widths or min(self.backbone_widths) < 1:
            problems.append(f"backbone_widths {self.backbone_widths} must name the width of each stage, at least 1")
        if min(self.image_std) <= 0:
            problems.append(f"image_std {self.image_std} must be above 0")
        if self.attention == "cudnn":
            problems.append("attention cudnn: ACT drops attention weights in training, which those kernels do not; xla")
        return problems

    @property
    def rows(self) -> ExactRows:
        """The present step and a chunk from it on, all of which is executed, as LeRobot does (`n_action_steps`)."""
        window = WindowShape(horizon=self.action_horizon, execute=self.action_horizon)
        return dataclasses.replace(super().rows, window=window)

    @property
    def start_advice(self) -> str:
        """That the backbone is random, and how it begins with ImageNet's weights; others have no published ones."""
        if not self.cameras or self.backbone_widths != ActConfig.backbone_widths:
            return super().start_advice
        return (
            "also the picture backbone, which LeRobot begins with ImageNet's weights: download resnet18-f37072fd.pth "
            "(docs/tutorials/my_robot.md), and give --weight-loader.params-path resnet18-f37072fd.pth"
        )

    @property
    def param_rules(self) -> ParamRules:
        """The backbone's batch norms are fixed, as their statistics belong to its published weights, and float32: few
        numbers, which scale everything."""
        return ParamRules(
            groups={"vision": "backbone/.*", "backbone": "backbone/.*"},
            frozen=_is_batch_norm,
            frozen_dtype=lambda path: jnp.float32 if _is_batch_norm(path) else jnp.bfloat16,
        )

    def build(self, rngs: nnx.Rngs) -> Act:
        return Act(self, rngs=rngs)
