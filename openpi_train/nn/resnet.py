"""ResNet-18 without batch statistics, and pooling of its last feature map: the image encoder of small policies.

The network is torchvision's `resnet18` (He et al. 2016). Diffusion policies have a group norm of 16 channels per group
in place of every batch norm (`model/vision/multi_image_obs_encoder.py` of diffusion_policy at 5ba07ac), because an
average of weights (EMA) does not work with batch statistics. ACT keeps batch norms with fixed statistics, those of the
published weights. Read next: `models/diffusion_policy/diffusion_policy_network.py`, `models/act/act_network.py`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from openpi_train.nn.wide_norms import EPSILON, WideGroupNorm

Pooling = Literal["average", "spatial_softmax"]
Norm = Literal["group", "frozen_batch"]

# Blocks per stage of torchvision's resnet18, and the width of the first stage of ResNets.
BLOCKS = 2
_WIDTH = 64
_CHANNELS_PER_GROUP = 16
# torch's initial weights of convolutions and linear layers: evenly in +-1 / sqrt(inputs).
TORCH_INIT = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class FrozenBatchNorm(nnx.Module):
    """A batch norm in evaluation mode, over the last axis: `(x - mean) / sqrt(variance + 1e-5) * scale + bias`.

    A run must keep its four parameters fixed (`ParamRules.frozen`), as torchvision's `FrozenBatchNorm2d` does, whose
    order of operations this is. Computed in float32 and returned in the type of its input.
    """

    def __init__(self, channels: int):
        self.scale, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))
        self.mean, self.variance = nnx.Param(jnp.zeros(channels)), nnx.Param(jnp.ones(channels))

    def __call__(self, x: Float[Array, "b height width c"]) -> Float[Array, "b height width c"]:
        factor = self.scale[...] * jax.lax.rsqrt(self.variance[...] + EPSILON)
        return (x.astype(jnp.float32) * factor + (self.bias[...] - self.mean[...] * factor)).astype(x.dtype)


def _norm(channels: int, kind: Norm, rngs: nnx.Rngs) -> WideGroupNorm | FrozenBatchNorm:
    if kind == "frozen_batch":
        return FrozenBatchNorm(channels)
    return WideGroupNorm(channels, channels // _CHANNELS_PER_GROUP, rngs=rngs)


def _conv(inputs: int, outputs: int, size: int, stride: int, dtype: DTypeLike | None, rngs: nnx.Rngs) -> nnx.Conv:
    # torchvision's initial weights for convolutions before a ReLU.
    init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    others: Any = {"padding": size // 2, "use_bias": False, "kernel_init": init, "dtype": dtype}
    return nnx.Conv(inputs, outputs, (size, size), stride, **others, rngs=rngs)


class BasicBlock(nnx.Module):
    """Two convolutions with a skip connection."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        *,
        norm: Norm = "group",
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        self.conv_1 = _conv(inputs, outputs, 3, stride, dtype, rngs)
        self.norm_1 = _norm(outputs, norm, rngs)
        self.conv_2 = _conv(outputs, outputs, 3, 1, dtype, rngs)
        self.norm_2 = _norm(outputs, norm, rngs)
        self.changes_shape = stride > 1 or inputs != outputs
        if self.changes_shape:
            self.shortcut = _conv(inputs, outputs, 1, stride, dtype, rngs)
            self.shortcut_norm = _norm(outputs, norm, rngs)

    def __call__(self, x: Float[Array, "b height width c"]) -> Float[Array, "b h2 w2 d"]:
        hidden = nnx.relu(self.norm_1(self.conv_1(x)))
        hidden = self.norm_2(self.conv_2(hidden))
        return nnx.relu(hidden + (self.shortcut_norm(self.shortcut(x)) if self.changes_shape else x))


class ResNet18(nnx.Module):
    """Maps images to features. `widths` are those of the four stages; tests use smaller ones.

    `average` returns the mean of the last feature map: `widths[-1]` numbers, 512 in ResNet-18. `spatial_softmax`
    applies `SpatialSoftmax` to it. `dtype` is the type of the convolutions; None: that of images and parameters. Norms,
    the mean and the softmax are computed in float32.
    """

    def __init__(
        self,
        pooling: Pooling = "average",
        *,
        widths: Sequence[int] = (_WIDTH, 128, 256, 512),
        num_keypoints: int = 32,
        norm: Norm = "group",
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        self.stem = _conv(3, widths[0], 7, 2, dtype, rngs)
        self.stem_norm = _norm(widths[0], norm, rngs)
        blocks, inputs = [], widths[0]
        for stage, outputs in enumerate(widths):
            for block in range(BLOCKS):
                stride = 2 if stage and not block else 1
                blocks.append(BasicBlock(inputs, outputs, stride, norm=norm, dtype=dtype, rngs=rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        is_average = pooling == "average"
        self.head = None if is_average else SpatialSoftmax(inputs, num_keypoints, dtype=dtype, rngs=rngs)

    @jax.named_scope("resnet")
    def __call__(self, images: Float[Array, "b height width 3"]) -> Float[Array, "b d"]:
        """The features of images in [-1, 1], of any size; float32."""
        x = self.feature_map(images)
        return x.astype(jnp.float32).mean(axis=(1, 2)) if self.head is None else self.head(x)

    def feature_map(self, images: Float[Array, "b height width 3"]) -> Float[Array, "b h2 w2 d"]:
        """The last feature map, with a 32nd of the rows and columns of images, rounded up (of four stages)."""
        x = nnx.relu(self.stem_norm(self.stem(images)))
        x = _max_pool(x)
        for block in self.blocks:
            x = block(x)
        return x


def num_features(pooling: Pooling, widths: Sequence[int], num_keypoints: int) -> int:
    """Number of features of a `ResNet18` per image."""
    return widths[-1] if pooling == "average" else 2 * num_keypoints


class SpatialSoftmax(nnx.Module):
    """Keypoints: the mean position of the softmax over the pixels of each of `num_keypoints` maps; then a linear layer.

    Positions are (x, y) in [-1, 1], x to the right and y down. robomimic's (`models/base_nets.py:
    SpatialSoftmax`, with the linear layer of its `VisualCore`; Finn et al. 2016), as in diffusion_policy's hybrids.
    """

    def __init__(self, channels: int, num_keypoints: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs):
        # A convolution of one pixel.
        self.maps = nnx.Linear(channels, num_keypoints, kernel_init=TORCH_INIT, dtype=dtype, rngs=rngs)
        self.outputs = nnx.Linear(2 * num_keypoints, 2 * num_keypoints, kernel_init=TORCH_INIT, rngs=rngs)

    def __call__(self, features: Float[Array, "b height width c"]) -> Float[Array, "b d"]:
        places = expected_places(self.maps(features).astype(jnp.float32))
        return self.outputs(places.reshape(features.shape[0], -1))


def expected_places(maps: Float[Array, "b height width k"]) -> Float[Array, "b k 2"]:
    """The mean position (x, y) in [-1, 1] of each map's softmax over its pixels."""
    b, height, width, keypoints = maps.shape
    share = jax.nn.softmax(maps.reshape(b, height * width, keypoints), axis=1).reshape(maps.shape)
    x = jnp.einsum("bhwk,w->bk", share, jnp.linspace(-1.0, 1.0, width))
    y = jnp.einsum("bhwk,h->bk", share, jnp.linspace(-1.0, 1.0, height))
    return jnp.stack([x, y], axis=-1)


def _max_pool(x: Float[Array, "b height width c"]) -> Float[Array, "b h2 w2 c"]:
    """Max pooling of 3 x 3 with stride 2."""
    window, strides, padding = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)
