"""The config of a diffusion policy (Chi et al. 2023): cameras, sizes, and the denoising network.

Defaults are RoboTwin's (`policy/DP/diffusion_policy/config/robot_dp_14.yaml`, branch stable_2.0); fields that
diffusion_policy also has keep its names. Read next: `denoisers.py`, `diffusion_policy_network.py`.
"""

import dataclasses
from typing import Any, ClassVar, Literal

from flax import nnx

from openpi_train.data.robot.windows import WindowShape
from openpi_train.fields import at_least, setting
from openpi_train.models.compute_config import ComputeConfig
from openpi_train.models.diffusion_policy.denoisers import Denoiser, MlpSizes, TransformerSizes, UnetSizes
from openpi_train.models.diffusion_policy.diffusion_policy_network import UNIT_RANGE, DiffusionPolicy
from openpi_train.models.exact_policy import ExactPolicyConfig, ExactRows
from openpi_train.models.model_config import Base, below_one, check_chosen
from openpi_train.nn.resnet import Pooling, ResNet18, num_features
from openpi_train.nn.return_head import ReturnHead
from openpi_train.nn.value_head import ValueHead
from openpi_train.parallel.remat import Remat, RematChoice


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusionPolicyConfig(ComputeConfig, ExactPolicyConfig):
    """A diffusion policy from images and states, or states alone.

    `action_horizon` actions begin with the first of the observed steps.
    """

    provides: ClassVar[frozenset[str]] = frozenset(
        {"denoise", "velocity", "sample", "indicator", "value", "return_logits"}
    )
    remat_policies: ClassVar[tuple[Remat, ...]] = ("none",)

    # Type of the activations. Parameters, norms, the condition and the last layer are float32.
    dtype: Literal["bfloat16", "float32", "float16"] = "float32"
    # Nothing is recomputed but what XLA itself recomputes, norms among it; for less memory: `dtype`, or --grad-accum.
    remat: RematChoice = setting("none", on_resume="accept")

    # Steps of a chunk.
    action_horizon: int = 8
    # Steps of the observation, the current one last.
    n_obs_steps: int = 3
    # How many actions of a chunk are executed, from the current step on.
    n_action_steps: int = 6
    # Camera slots of the run's robots.
    cameras: tuple[str, ...] = ("head_camera",)
    # Instructions that the policy distinguishes, one-hot encoded beside the state; () for a single task.
    instructions: tuple[str, ...] = ()
    # Mean of the pixels in [0, 1], per colour, that is subtracted; by default they are scaled to [-1, 1].
    image_mean: tuple[float, float, float] = UNIT_RANGE
    # Their standard deviation, by which is divided.
    image_std: tuple[float, float, float] = UNIT_RANGE
    # One image encoder for all cameras, or one for each.
    share_encoder: bool = False
    # Pooling of an encoder's last feature map: its mean, or keypoints and a linear layer.
    pooling: Pooling = "average"
    # Keypoints of spatial_softmax.
    num_keypoints: int = 32
    # A ReLU after the encoders, as LeRobot and robomimic have it.
    relu_features: bool = False
    # Widths of the encoder's stages (ResNet-18's).
    encoder_widths: tuple[int, ...] = (64, 128, 256, 512)
    # The denoising network.
    denoiser: Literal["unet", "transformer", "mlp"] = "unet"
    # Sizes of the UNet.
    unet: UnetSizes = dataclasses.field(default_factory=UnetSizes)
    # Sizes of the transformer.
    transformer: TransformerSizes = dataclasses.field(default_factory=TransformerSizes)
    # Sizes of the MLP.
    mlp: MlpSizes = dataclasses.field(default_factory=MlpSizes)
    # Width of the diffusion step's encoding in the UNet and the MLP.
    diffusion_step_embed_dim: int = 128
    # The diffusion step that corresponds to flow matching's time 1.
    num_diffusion_steps: int = 100
    # Velocities can be told whether their chunk is better than expected, by two learned vectors that are added to the
    # diffusion step's encoding (with AdvantageConditionedFlow or IndicatorFlow). A start may lack them.
    indicator: bool = False
    # A head says what the policy will earn, for RL with a critic (PolicyGradient with a value_weight above 0). A start
    # may lack it.
    critic: bool = False
    # A head says how likely each of so many returns is (ReturnDistribution; RECAP has 201); 0: there is none. A start
    # may lack it.
    return_bins: int = at_least(0, 0)

    def problems(self) -> list[str]:
        problems = super().problems() + below_one(self, "n_obs_steps", "n_action_steps")
        if self.n_obs_steps - 1 + self.n_action_steps > self.action_horizon:
            problems.append(
                f"a chunk of {self.action_horizon} steps begins with the first of {self.n_obs_steps} observed ones, so "
                f"that {self.action_horizon - self.n_obs_steps + 1} can be executed, not n_action_steps "
                f"{self.n_action_steps}"
            )
        for denoiser in (self.transformer, self.unet, self.mlp):
            problems += denoiser.problems(self.action_horizon if denoiser is self.network else None)
        if any(width % 16 for width in self.encoder_widths):
            problems.append(f"encoder_widths {self.encoder_widths} must be multiples of 16, the channels of a group")
        if self.remat not in ("auto", *self.remat_policies):
            problems.append(
                f"remat {self.remat}: recomputing a diffusion policy's blocks takes time and frees little memory: "
                "XLA recomputes their norms as it is; leave it out, and for less memory give --model.dtype bfloat16 or "
                "a larger --grad-accum"
            )
        if min(self.image_std) <= 0:
            problems.append(f"image_std {self.image_std} must be above 0")
        if len(set(self.instructions)) < len(self.instructions):
            problems.append(f"instructions name one twice: {', '.join(self.instructions)}")
        return problems

    @property
    def rows(self) -> ExactRows:
        """The observed steps, and a chunk that begins with the first of them (diffusion_policy's sampler); min-max, as
        the samplers limit actions to [-1, 1]."""
        window = WindowShape(
            horizon=self.action_horizon,
            history=self.n_obs_steps,
            first_action=1 - self.n_obs_steps,
            pad_before=self.n_obs_steps - 1,
            pad_after=self.n_action_steps - 1,
            execute=self.n_action_steps,
        )
        return dataclasses.replace(super().rows, window=window, normalization="min_max", instructions=self.instructions)

    @property
    def condition_width(self) -> int:
        """Width of the condition of each observation step."""
        features = num_features(self.pooling, self.encoder_widths, self.num_keypoints)
        return len(self.cameras) * features + self.used_state_dim + len(self.instructions)

    @property
    def network(self) -> Denoiser:
        """The sizes of the denoising network."""
        return {"unet": self.unet, "transformer": self.transformer, "mlp": self.mlp}[self.denoiser]

    def check_objective(self, name: str, needs: frozenset[str]) -> list[str]:
        return super().check_objective(name, needs) + check_chosen(self, name, needs)

    @property
    def base(self) -> Base | None:
        """The same model without the indicator, whose vectors start at 0, and without heads for values."""
        plain = dataclasses.replace(self.without_critic(), indicator=False)
        return None if plain == self else Base(model=plain)

    def without_critic(self) -> "DiffusionPolicyConfig":
        return dataclasses.replace(self, critic=False, return_bins=0)

    def build(self, rngs: nnx.Rngs) -> DiffusionPolicy:
        names = ["shared"] if self.share_encoder and self.cameras else self.cameras
        sizes: dict[str, Any] = {"widths": self.encoder_widths, "num_keypoints": self.num_keypoints}
        encoders = {name: ResNet18(self.pooling, **sizes, dtype=self.compute.dtype, rngs=rngs) for name in names}
        denoiser, seen = self.network.build(self, rngs), self.n_obs_steps * self.condition_width
        return DiffusionPolicy(
            encoders,
            denoiser,
            num_diffusion_steps=self.num_diffusion_steps,
            num_instructions=len(self.instructions),
            image_mean=self.image_mean,
            image_std=self.image_std,
            relu_features=self.relu_features,
            indicator_width=denoiser.step_width if self.indicator else None,
            value_head=ValueHead(seen, rngs) if self.critic else None,
            return_head=ReturnHead(seen, self.return_bins, rngs) if self.return_bins else None,
        )
