"""The cost of one row on a device, counted in the traced gradient of a micro-batch. Read next: `estimate.py`,
`flops.py`.

`training/prepare.py` traces it, for the rematerialisation policies that a run may choose.
"""

import dataclasses
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr
from numpy.typing import DTypeLike

from openpi_train.parallel.mesh import TENSOR
from openpi_train.planning.estimate import peak_bytes
from openpi_train.planning.flops import product_flops, rewritten_bytes
from openpi_train.planning.traffic import summed_bytes
from openpi_train.runtime.device_kinds import product_rate

# Rows of the traced micro-batch. Arrays whose sizes are multiples of this prime are per row, others are not.
ROWS = 8191


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematCost:
    """A rematerialisation policy's cost per row: FLOPs executed (and those of them that are not recomputation), bytes
    of activations at once on a device, bytes summed in tensor groups, and bytes of the row itself.

    `remat` None: the model has no policies. `rewritten_bytes_per_row` are written again by the backward pass
    (`flops.py`). `product_rate` is that of products in the model's type, as a share of bfloat16's.
    """

    remat: str | None
    flops_per_row: float
    model_flops_per_row: float
    activation_bytes_per_row: float
    summed_bytes_per_row: float = 0.0
    rewritten_bytes_per_row: float = 0.0
    batch_bytes_per_row: float = 0.0
    product_rate: float = 1.0


def cost(remat: str | None, jaxpr: Jaxpr, dtype: DTypeLike) -> RematCost:
    """The cost of a row under the policy of this name, of the traced loss and gradient of `ROWS` rows on one device, or
    one tensor group, computed in `dtype`."""
    return RematCost(
        remat=remat,
        flops_per_row=product_flops(jaxpr) / ROWS,
        model_flops_per_row=product_flops(jaxpr, recomputed=False) / ROWS,
        activation_bytes_per_row=max(peak_bytes(jaxpr, bytes_per_row), 1.0),
        summed_bytes_per_row=summed_bytes(jaxpr, TENSOR, bytes_per_row),
        rewritten_bytes_per_row=rewritten_bytes(jaxpr, bytes_per_row),
        batch_bytes_per_row=sum(bytes_per_row(var.aval) for var in jaxpr.invars),
        product_rate=product_rate(np.dtype(dtype).itemsize),
    )


def bytes_per_row(aval: Any) -> float:
    """Bytes per row of an array of this shape and type; 0 if its size does not depend on the rows."""
    size = getattr(aval, "size", 0)
    return 0.0 if size % ROWS else size // ROWS * aval.dtype.itemsize
