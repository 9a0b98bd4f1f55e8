"""What a training step keeps between forward and backward, from jax's own derivative. Read next: `memory.py`.

An estimate: compilers fuse much of it away, and keep more while a layer is computed again.
"""

from collections.abc import Callable
from typing import Any

import jax


def residual_bytes_per_row(loss: Callable[[Any, Any], Any], params: Any, batch_of: Callable[[int], Any]) -> float:
    """Bytes that each row more keeps for the gradient of `loss(params, batch)` in `params`, which it returns first.

    `batch_of(n)` is a batch of n rows; all are trees of shapes, and nothing is computed.
    """

    def kept(rows: int) -> int:
        def residuals(params, batch):
            return jax.vjp(lambda params: loss(params, batch), params, has_aux=True)[1]

        leaves = jax.tree.leaves(jax.eval_shape(residuals, params, batch_of(rows)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    return float(kept(2) - kept(1))
