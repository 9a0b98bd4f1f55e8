"""How the layers of a model compute: one value, which says what is chosen and what is left open.

Read next: `compute_config.py`, whose fields it is made of; `model_config.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from openpi_train.nn.attention import Attention, Heads
from openpi_train.parallel.remat import Remat
from openpi_train.parallel.tensor import check_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """How the layers of a model compute. Defaults: in float32, without anything to choose.

    Attributes:
        dtype: the type of activations in its stacks of layers, which read their weights in it.
        remat: what its backward pass recomputes; `none` while that is left open, as in programs without one.
        remat_choices: every rematerialisation policy that is left open, least recomputation first; None: it has none.
        attention: who computes its attention; None: it has none, or no choice.
        heads: the heads of all its attention, if cuDNN can compute it.
        shared_sizes: the sizes, by field, that the devices of a tensor group share out; none: no layers can be shared.
    """

    dtype: Any = jnp.float32
    remat: Remat = "none"
    remat_choices: tuple[Remat | None, ...] = (None,)
    attention: Attention | None = None
    heads: Sequence[Heads] = ()
    shared_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def needs_loss_scale(self) -> bool:
        """Whether the loss must be scaled up for the backward pass: gradients are float16 on their way."""
        return jnp.dtype(self.dtype) == jnp.float16

    @property
    def open_heads(self) -> Sequence[Heads]:
        """The heads of all its attention, if it is left open who computes it; else none."""
        return self.heads if self.attention == "auto" else ()

    def check_tensor(self, tensor_devices: int) -> list[str]:
        """Why the layers cannot be shared out over so many devices, as sentences."""
        if not self.shared_sizes and tensor_devices > 1:
            return [
                f"--sharding.tensor-devices {tensor_devices}: the model has no layers that devices can share out; "
                "allowed: 1"
            ]
        return check_sizes(self.shared_sizes, tensor_devices)
