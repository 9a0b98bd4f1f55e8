"""The product of activations and a weight, with the weight's gradient in the weight's own order.

jax derives the gradient as (gradient of the result) x (activations), transposed. XLA then copies the wide gradient of
a feed-forward layer to transpose it: on a CPU that takes a quarter of the layer's time. Read next: `lora.py`.
"""

import functools

import jax
from jaxtyping import Array, Float

from openpi_train.nn.shard import as_varied


def product(x: Float[Array, "*n"], weight: Float[Array, "*m"], inputs: int = 1) -> Float[Array, "*k"]:
    """The sum over the last `inputs` axes of `x`, which are the first ones of the weight."""
    # The rule below is local to a device: sums over devices are made by the gradients of these.
    return _product(as_varied(x, weight), as_varied(weight, x), inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, weight: Array, inputs: int) -> Array:
    summed = range(x.ndim - inputs, x.ndim), range(inputs)
    return jax.lax.dot_general(x, weight, (summed, ((), ())))


def _forward(x: Array, weight: Array, inputs: int) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight, inputs), (x, weight)


def _backward(inputs: int, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = kept
    rows = x.ndim - inputs
    outputs = range(rows, gradient.ndim), range(inputs, weight.ndim)
    of_x = jax.lax.dot_general(gradient, weight, (outputs, ((), ())))
    of_weight = jax.lax.dot_general(x, gradient, ((range(rows), range(rows)), ((), ())))
    return of_x, of_weight


_product.defvjp(_forward, _backward)
