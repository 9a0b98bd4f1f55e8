"""SigLIP's vision transformer (Zhai et al. 2023), as PaliGemma uses it: one token per patch, no pooling.

Read next: `models/pi0/pi0.py`, which puts the tokens before the prompt.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from openpi_train.nn.attention import Attention, Heads, flash_attend, uses_cudnn
from openpi_train.nn.matmul import product
from openpi_train.nn.norms import LayerNorm
from openpi_train.parallel.layers import scan_layers, stack_layers
from openpi_train.parallel.remat import Remat, keep, keep_input
from openpi_train.parallel.shard import spread, summed, varies


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipConfig:
    """Sizes of the image tower; the defaults are So400m/14."""

    # Width of the patches' tokens inside the tower.
    width: int = 1152
    # Number of layers.
    depth: int = 27
    # Width inside the feed-forward layer.
    mlp_dim: int = 4304
    # Attention heads; they divide the width.
    num_heads: int = 16
    # Height and width of a patch in pixels; it divides the image's.
    patch_size: int = 14

    def check(self, image_size: int) -> list[str]:
        """What is wrong with the sizes, as sentences."""
        problems = []
        if self.width % self.num_heads:
            problems.append(f"siglip.width {self.width} is not a multiple of siglip.num_heads {self.num_heads}")
        if image_size % self.patch_size:
            problems.append(f"image_size {image_size} is not a multiple of siglip.patch_size {self.patch_size}")
        return problems

    @property
    def heads(self) -> Heads:
        """Of every layer's attention."""
        return Heads(self.num_heads, self.num_heads, self.width // self.num_heads)

    def num_tokens(self, image_size: int) -> int:
        """Number of tokens of a square image of `image_size` pixels."""
        return (image_size // self.patch_size) ** 2


def float_images(images: UInt8[Array, "*b 3"] | Float[Array, "*b 3"]) -> Float[Array, "*b 3"]:
    """float32 images in [-1, 1] from uint8 ones; float images are assumed to be in [-1, 1] already."""
    if images.dtype == jnp.uint8:
        return images.astype(jnp.float32) / 255.0 * 2.0 - 1.0
    return images.astype(jnp.float32)


def normalize_images(images: Float[Array, "*b 3"], mean: Sequence[float], std: Sequence[float]) -> Float[Array, "*b 3"]:
    """Images in [-1, 1], with the mean subtracted and divided by the deviation of pixels in [0, 1], per colour."""
    if (*mean, *std) == (0.5,) * 6:
        return images  # they lie in this range already
    return ((images + 1) / 2 - jnp.asarray(mean)) / jnp.asarray(std)


class PatchEmbedding(nnx.Module):
    """A convolution whose stride is its size, done as one matrix product (so is its gradient). In float32."""

    def __init__(self, config: SiglipConfig, *, rngs: nnx.Rngs):
        shape = (config.patch_size, config.patch_size, 3, config.width)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(config.width))

    @jax.named_scope("patches")
    def __call__(self, images: Float[Array, "b height width 3"]) -> Float[Array, "b t d"]:
        b, height, width, _ = images.shape
        size = self.kernel.shape[0]
        patches = images.reshape(b, height // size, size, width // size, size, 3)
        x = jnp.einsum("biyjxc,yxcd->bijd", patches, self.kernel[...].astype(jnp.float32)) + self.bias[...]
        return x.reshape(b, -1, x.shape[-1])


def _linear(layer: nnx.Linear | nnx.LinearGeneral, x: Float[Array, "*n"]) -> Float[Array, "r *m"]:
    """The layer's product with tokens, as rows, and its bias; parts are summed before a whole bias is added.

    Heads and their dims are one axis of the product: XLA for GPUs then adds the bias within it, and else writes a bias
    as large as the tokens first.
    """
    assert layer.bias is not None
    kernel, bias = layer.kernel[...], layer.bias[...].astype(layer.dtype)
    inputs, outputs = math.prod(kernel.shape[: kernel.ndim - bias.ndim]), bias.size
    found = product("ri,io->ro", x.reshape(-1, inputs).astype(layer.dtype), kernel.reshape(inputs, outputs))
    found = (found if varies(bias) else summed(found)) + bias.reshape(outputs)
    return found.reshape(-1, *bias.shape)


class SelfAttention(nnx.Module):
    """Attention of all patches to all patches, in `dtype` throughout (softmax too, as openpi's tower does).

    cuDNN's kernels compute the softmax in float32.
    """

    def __init__(self, config: SiglipConfig, *, dtype: DTypeLike, attention: Attention, rngs: nnx.Rngs):
        self.attention: Attention = attention
        heads = (config.num_heads, config.width // config.num_heads)
        xavier = nnx.initializers.xavier_uniform()

        def into_heads():
            return nnx.LinearGeneral(config.width, heads, kernel_init=xavier, dtype=dtype, rngs=rngs)

        self.query, self.key, self.value = into_heads(), into_heads(), into_heads()
        self.out = nnx.LinearGeneral(heads, config.width, axis=(-2, -1), kernel_init=xavier, dtype=dtype, rngs=rngs)

    @jax.named_scope("attention")
    def __call__(self, rows: Float[Array, "r d"], num_tokens: int) -> Float[Array, "r d"]:
        rows = spread(rows, self.query.kernel[...])
        heads = (_linear(layer, rows) for layer in (self.query, self.key, self.value))
        query, key, value = (keep(one.reshape(-1, num_tokens, *one.shape[1:])) for one in heads)  # b t n c
        if uses_cudnn(self.attention, query.shape[-1], query.dtype):
            return _linear(self.out, flash_attend(query, key, value, None))
        query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
        weights = jax.nn.softmax(jnp.einsum("btnc,bsnc->bnts", query, key), axis=-1)
        return _linear(self.out, keep(jnp.einsum("bnts,bsnc->btnc", weights, value)))


@jax.custom_jvp
def gelu(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """GELU by tanh, x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3). Its derivative is by the sigmoid.

    With a tanh in both, XLA for GPUs stores the tanh for the two kernels of the backward pass that need it.
    """
    return nnx.gelu(x)


@gelu.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    wide, factor = x.astype(jnp.float32), 2 * math.sqrt(2 / math.pi)
    share = jax.nn.sigmoid(factor * (wide + 0.044715 * wide**3))
    slope = share * (1 + (1 - share) * wide * factor * (1 + 3 * 0.044715 * wide**2))
    return gelu(x), (slope * tangent).astype(x.dtype)


class SiglipMlp(nnx.Module):
    """Two dense layers around a (tanh-approximated) GELU."""

    def __init__(self, config: SiglipConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def dense(inputs: int, outputs: int) -> nnx.Linear:
            xavier, small = nnx.initializers.xavier_uniform(), nnx.initializers.normal(stddev=1e-6)
            return nnx.Linear(inputs, outputs, kernel_init=xavier, bias_init=small, dtype=dtype, rngs=rngs)

        self.up = dense(config.width, config.mlp_dim)
        self.down = dense(config.mlp_dim, config.width)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "r d"]) -> Float[Array, "r d"]:
        hidden = keep_input(gelu(_linear(self.up, spread(x, self.up.kernel[...]))))
        return _linear(self.down, hidden)


class SiglipLayer(nnx.Module):
    """One pre-norm transformer layer, of the tokens of all images as rows: its products read and write these.

    XLA for GPUs then adds within a product what is added to it, and else copies the tokens first, to overwrite that
    (jaxlib 0.10.2).
    """

    def __init__(self, config: SiglipConfig, *, dtype: DTypeLike, attention: Attention, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(config.width)
        self.attention = SelfAttention(config, dtype=dtype, attention=attention, rngs=rngs)
        self.mlp_norm = LayerNorm(config.width)
        self.mlp = SiglipMlp(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "r d"], num_tokens: int) -> Float[Array, "r d"]:
        x = keep(x + self.attention(keep_input(self.attention_norm(x)), num_tokens))
        return x + self.mlp(keep_input(self.mlp_norm(x)))


class Siglip(nnx.Module):
    """Images to tokens of the language model's width. Patches and positions in float32, the layers in `dtype`.

    Without an `out_width` the tokens keep the tower's.
    """

    def __init__(
        self,
        config: SiglipConfig,
        image_size: int,
        out_width: int | None,
        *,
        dtype: DTypeLike,
        remat: Remat,
        attention: Attention = "auto",
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = dtype
        self.remat: Remat = remat
        self.patch_embedding = PatchEmbedding(config, rngs=rngs)
        positions = (1, config.num_tokens(image_size), config.width)
        self.position_embedding = nnx.Param(
            nnx.initializers.normal(stddev=config.width**-0.5)(rngs.params(), positions, jnp.float32)
        )
        self.layers = stack_layers(
            lambda rngs: SiglipLayer(config, dtype=dtype, attention=attention, rngs=rngs), config.depth, rngs
        )
        self.norm = LayerNorm(config.width)
        # openpi's head starts at zero; the norm that follows then multiplies its first gradients by 1000
        # (1 / sqrt(1e-6)), after which clipping stops everything else in a run without start weights.
        self.head = None if out_width is None else nnx.Linear(config.width, out_width, dtype=dtype, rngs=rngs)

    @jax.named_scope("siglip")
    def __call__(self, images: Float[Array, "b height width 3"]) -> Float[Array, "b t d"]:
        """One token per patch, row by row, in `dtype`; images are float32 in [-1, 1]."""
        x = self.patch_embedding(images)
        x = (x + self.position_embedding[...]).astype(self.dtype)
        num_tokens, rows = x.shape[1], x.reshape(-1, x.shape[-1])
        rows, _ = scan_layers(
            self.layers, lambda layer, rows, _: (layer(rows, num_tokens), None), rows, remat=self.remat
        )
        x = self.norm(rows.reshape(x.shape))
        return x if self.head is None else self.head(x)
