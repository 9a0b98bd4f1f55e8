"""The gated feed-forward layer of Gemma, Llama and their like. Read next: `gemma.py`, `decoder.py`."""

from collections.abc import Callable
from typing import Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from openpi_train.nn.lora import LoraWeight
from openpi_train.parallel.params import ParamKind
from openpi_train.parallel.remat import keep_input
from openpi_train.parallel.shard import spread, summed

# gelu is the tanh approximation, as in all Gemma models.
Activation = Literal["gelu", "silu"]
_ACTIVATIONS = {"gelu": nnx.gelu, "silu": nnx.silu}


class GatedMlp(nnx.Module):
    """down(activation(gate x) * (up x)). A tensor group splits its width.

    `weight` makes a weight from a shape, an initializer and its kind.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        weight: Callable[[tuple[int, ...], nnx.Initializer, ParamKind], LoraWeight],
        activation: Activation = "gelu",
    ):
        gated = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        self.gate_up = weight((2, width, mlp_dim), gated, ParamKind(by_entry=True, wide=True))
        self.down = weight((mlp_dim, width), nnx.initializers.lecun_normal(), ParamKind(wide=True))
        self.activation: Activation = activation

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        x = spread(x, self.gate_up.part)
        gate = self.gate_up(x, "btd,dm->btm", "btd,dl->btl", "btl,lm->btm", index=0)
        up = self.gate_up(x, "btd,dm->btm", "btd,dl->btl", "btl,lm->btm", index=1)
        wide = keep_input(_ACTIVATIONS[self.activation](gate) * up)
        return summed(self.down(wide, "btm,md->btd", "btm,ml->btl", "btl,ld->btd"))
