"""Configurations of the networks that denoise the chunks of a diffusion policy: sizes, limits, and `build`.

Read next: `diffusion_policy.py`, which has one of each and uses the one that `--model.denoiser` names.
"""

import abc
import dataclasses
from typing import TYPE_CHECKING

from flax import nnx

from openpi_train.nn.denoising_mlp import DenoisingMlp
from openpi_train.nn.denoising_transformer import DenoisingTransformer
from openpi_train.nn.unet1d import ConditionalUnet1d

if TYPE_CHECKING:
    from openpi_train.models.diffusion_policy.diffusion_policy import DiffusionPolicyConfig

DenoisingNetwork = ConditionalUnet1d | DenoisingTransformer | DenoisingMlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Denoiser(abc.ABC):
    """The sizes of one kind of network. Its fields are arguments of the network."""

    def problems(self, horizon: int | None) -> list[str]:
        """What is wrong with the sizes, as sentences; with a `horizon`, also why chunks of this length do not fit."""
        del horizon
        return []

    @abc.abstractmethod
    def build(self, policy: "DiffusionPolicyConfig", rngs: nnx.Rngs) -> DenoisingNetwork:
        """Build the network, which maps (noisy chunks, diffusion steps, condition per step) to chunks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnetSizes(Denoiser):
    """Sizes of the 1-D UNet."""

    # Width of each level; the horizon is halved from one to the next.
    widths: tuple[int, ...] = (256, 512, 1024)
    # Kernel size of the convolutions, in steps.
    kernel_size: int = 5
    # Groups of the group norms.
    num_groups: int = 8

    def problems(self, horizon: int | None) -> list[str]:
        found, unit = [], 2 ** (len(self.widths) - 1)
        if horizon is not None and horizon % unit:
            found.append(
                f"action_horizon {horizon} must be a multiple of {unit}: a UNet of {len(self.widths)} levels halves it "
                "from one to the next"
            )
        if any(width % self.num_groups or width % 8 for width in self.widths):
            found.append(f"unet.widths {self.widths} must be multiples of num_groups {self.num_groups} and of 8")
        return found

    def build(self, policy: "DiffusionPolicyConfig", rngs: nnx.Rngs) -> ConditionalUnet1d:
        condition = policy.n_obs_steps * policy.condition_width
        more = {"step_width": policy.diffusion_step_embed_dim, "dtype": policy.compute.dtype}
        return ConditionalUnet1d(policy.action_dim, condition, **vars(self), **more, rngs=rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerSizes(Denoiser):
    """Sizes of the transformer (defaults: diffusion_policy's image tasks)."""

    # Width of a token.
    width: int = 256
    # Number of layers.
    depth: int = 8
    # Number of attention heads.
    num_heads: int = 4

    def problems(self, horizon: int | None) -> list[str]:
        if self.width % (2 * self.num_heads):
            return [f"transformer.width {self.width} is not a multiple of twice its {self.num_heads} heads"]
        return []

    def build(self, policy: "DiffusionPolicyConfig", rngs: nnx.Rngs) -> DenoisingTransformer:
        lengths = {"horizon": policy.action_horizon, "num_obs_steps": policy.n_obs_steps}
        more = {**lengths, "dtype": policy.compute.dtype}
        return DenoisingTransformer(policy.action_dim, policy.condition_width, **more, **vars(self), rngs=rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpSizes(Denoiser):
    """Sizes of the residual MLP."""

    # Width of the hidden layers.
    width: int = 512
    # Number of residual blocks.
    depth: int = 3

    def build(self, policy: "DiffusionPolicyConfig", rngs: nnx.Rngs) -> DenoisingMlp:
        condition = policy.n_obs_steps * policy.condition_width
        sizes = {"horizon": policy.action_horizon, "step_width": policy.diffusion_step_embed_dim, **vars(self)}
        return DenoisingMlp(policy.action_dim, condition, **sizes, dtype=policy.compute.dtype, rngs=rngs)
