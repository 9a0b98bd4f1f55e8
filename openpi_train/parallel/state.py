"""The state of a run on the devices, as one tree of arrays. Read next: `training/step.py`, which updates it."""

import optax
from jaxtyping import Array, Int

from openpi_train.optim import LossScale
from openpi_train.parallel.params import Params
from openpi_train.types import pytree


@pytree
class TrainState:
    """Everything that a step reads and writes.

    `params` holds the trainable leaves (float32 master copies) by path, `frozen` the frozen leaves
    (bfloat16 if the run computes in it), `ema` the average of `params` or None. Paths join the module's
    attribute names with "/". `scale` is set if the model computes in float16.
    """

    step: Int[Array, ""]
    params: Params
    frozen: Params
    ema: Params | None
    opt_state: optax.OptState
    scale: LossScale | None = None
