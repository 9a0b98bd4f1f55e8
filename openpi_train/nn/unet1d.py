"""The conditional 1-D UNet of diffusion policies: along the steps of an action chunk, conditioned by FiLM.

Equal to diffusion_policy's network (`model/diffusion/conditional_unet1d.py` at 5ba07ac, with
`cond_predict_scale`; Chi et al. 2023). Read next: `denoising_transformer.py`, its alternative, and
`models/diffusion_policy/diffusion_policy_network.py`, which has either.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from openpi_train.nn.resnet import TORCH_INIT
from openpi_train.nn.sincos import sincos_encoding
from openpi_train.nn.wide_norms import WideGroupNorm, wide_mish

_linear = functools.partial(nnx.Linear, kernel_init=TORCH_INIT)
_conv = functools.partial(nnx.Conv, kernel_init=TORCH_INIT)
# Angles range from the diffusion step itself to a ten-thousandth of it (Vaswani et al. 2017).
_MIN_PERIOD, _MAX_PERIOD = 2 * np.pi, 2e4 * np.pi


def encode_step(step: Float[Array, " n"], width: int, added: Float[Array, "n d"] | None = None) -> Float[Array, "n d"]:
    """Sines and cosines of a diffusion step, plus `added`."""
    encoded = sincos_encoding(step, width, _MIN_PERIOD, _MAX_PERIOD)
    return encoded if added is None else encoded + added


class ConvBlock(nnx.Module):
    """Convolution along the steps, group norm, Mish."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel_size: int,
        num_groups: int,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        self.conv = _conv(inputs, outputs, (kernel_size,), padding=kernel_size // 2, dtype=dtype, rngs=rngs)
        self.norm = WideGroupNorm(outputs, num_groups, rngs=rngs)

    def __call__(self, x: Float[Array, "n h c"]) -> Float[Array, "n h d"]:
        return wide_mish(self.norm(self.conv(x)))


class FilmBlock(nnx.Module):
    """Two `ConvBlock`s with a skip connection; between them the condition scales and shifts every channel (FiLM)."""

    def __init__(
        self, inputs: int, outputs: int, condition_width: int, kernel_size: int, num_groups: int, *,
        dtype: DTypeLike | None = None, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.block_1 = ConvBlock(inputs, outputs, kernel_size, num_groups, dtype=dtype, rngs=rngs)
        self.block_2 = ConvBlock(outputs, outputs, kernel_size, num_groups, dtype=dtype, rngs=rngs)
        self.film = _linear(condition_width, 2 * outputs, dtype=dtype, rngs=rngs)
        self.shortcut = _conv(inputs, outputs, (1,), dtype=dtype, rngs=rngs) if inputs != outputs else None

    def __call__(self, x: Float[Array, "n h c"], condition: Float[Array, "n e"]) -> Float[Array, "n h d"]:
        scale, shift = jnp.split(self.film(jax.nn.mish(condition))[:, None], 2, axis=-1)  # n 1 d
        hidden = scale * self.block_1(x) + shift
        return self.block_2(hidden) + (x if self.shortcut is None else self.shortcut(x))


class ConditionalUnet1d(nnx.Module):
    """Maps noisy action chunks, diffusion steps and a condition to the objective's target, of the chunks' shape.

    Args:
        action_dim: dims of an action.
        condition_width: width of the condition.
        widths: widths of the levels, the first at full length; each level halves the steps of the one before.
        step_width: width of the diffusion step's encoding, which is appended to the condition.
        dtype: type of the blocks; None: that of parameters and inputs. Norms, the diffusion step's encoding and the
            last layer are float32.

    A call raises ValueError if the horizon cannot be halved at every level.
    """

    def __init__(
        self,
        action_dim: int,
        condition_width: int,
        *,
        widths: Sequence[int],
        kernel_size: int = 5,
        num_groups: int = 8,
        step_width: int = 128,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        self.step_width, self.shortest = step_width, 2 ** (len(widths) - 1)
        self.step_in = _linear(step_width, 4 * step_width, rngs=rngs)
        self.step_out = _linear(4 * step_width, step_width, rngs=rngs)
        width = condition_width + step_width

        def blocks(*sizes: int) -> Any:
            return nnx.List(
                [
                    FilmBlock(*pair, width, kernel_size, num_groups, dtype=dtype, rngs=rngs)
                    for pair in itertools.pairwise(sizes)
                ]
            )

        def change_length(kind: type[nnx.Conv] | type[nnx.ConvTranspose], size: int, width: int) -> nnx.Module:
            padding = 1 if kind is nnx.Conv else "SAME"
            return kind(width, width, (size,), 2, padding=padding, kernel_init=TORCH_INIT, dtype=dtype, rngs=rngs)

        self.down = nnx.List([blocks(a, b, b) for a, b in itertools.pairwise([action_dim, *widths])])
        self.shorten = nnx.List([change_length(nnx.Conv, 3, width) for width in widths[:-1]])
        self.middle = blocks(*[widths[-1]] * 3)
        self.up = nnx.List([blocks(2 * b, a, a) for a, b in list(itertools.pairwise(widths))[::-1]])
        self.lengthen = nnx.List([change_length(nnx.ConvTranspose, 4, width) for width in widths[-2::-1]])
        self.last_block = ConvBlock(widths[0], widths[0], kernel_size, 8, dtype=dtype, rngs=rngs)
        self.outputs = _conv(widths[0], action_dim, (1,), rngs=rngs)

    @jax.named_scope("unet")
    def __call__(
        self,
        noisy: Float[Array, "n h a"],
        step: Float[Array, " n"],
        condition: Float[Array, "n ..."],
        added: Float[Array, "n d"] | None = None,
    ) -> Float[Array, "n h a"]:
        """`condition` is flattened; `step` is the diffusion step, to whose encoding `added` is added. The result is
        float32."""
        if noisy.shape[1] % self.shortest:
            raise ValueError(
                f"a horizon of {noisy.shape[1]} steps cannot be halved {len(self.shorten)} times; use a multiple of "
                f"{self.shortest}, or fewer --model.unet.widths"
            )
        encoded = self.step_out(jax.nn.mish(self.step_in(encode_step(step, self.step_width, added))))
        condition = jnp.concatenate([encoded, condition.reshape(len(condition), -1)], axis=-1)
        x, passed = noisy, []
        for level, (first, second) in enumerate(self.down):
            x = second(first(x, condition), condition)
            passed.append(x)
            x = self.shorten[level](x) if level < len(self.shorten) else x
        for block in self.middle:
            x = block(x, condition)
        for (first, second), lengthen in zip(self.up, self.lengthen, strict=True):
            x = first(jnp.concatenate([x, passed.pop()], axis=-1), condition)
            x = lengthen(second(x, condition))
        return self.outputs(self.last_block(x).astype(jnp.float32))
