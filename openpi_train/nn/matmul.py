"""Products of activations with weights, whose gradients are not rounded to the activations' type.

Read next: `lora.py` and `siglip.py`, which use them.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from openpi_train.parallel.shard import as_varied


def product(equation: str, x: Float[Array, "*n"], weight: Float[Array, "*m"]) -> Float[Array, "*k"]:
    """einsum(equation, x, weight), computed and returned in the type of `x`.

    The gradient of a wider `weight` leaves its product in the weight's type (float32 from bfloat16 factors): it is
    rounded once less, and on a GPU it is written once and not also widened for the sum over devices.

    Args: `equation` has neither repeated letters nor an ellipsis. If it sums an axis of one operand alone, the gradient
    is rounded to the type of `x`.
    """
    (of_x, of_weight), of_result = _letters(equation)
    sums_one = (set(of_x) ^ set(of_weight)) - set(of_result)
    if weight.dtype.itemsize <= x.dtype.itemsize or sums_one:
        return _as_matrices(equation, x, weight.astype(x.dtype))
    return _product(equation, weight.dtype, as_varied(x, weight), as_varied(weight, x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, dtype: DTypeLike, x: Array, weight: Array) -> Array:
    return _as_matrices(equation, x, weight.astype(x.dtype))


def _forward(equation: str, dtype: DTypeLike, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    narrow = weight.astype(x.dtype)
    return _as_matrices(equation, x, narrow), (x, narrow)


def _backward(equation: str, dtype: DTypeLike, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, narrow = kept
    (of_x, of_weight), of_result = _letters(equation)
    in_x = jnp.einsum(f"{of_result},{of_weight}->{of_x}", gradient, narrow)
    in_weight = jnp.einsum(f"{of_x},{of_result}->{of_weight}", x, gradient, preferred_element_type=dtype)
    return in_x, in_weight


def _as_matrices(equation: str, x: Array, weight: Array) -> Array:
    """The einsum as a product of two matrices, if it sums the last axes of `x` and the first ones of `weight`."""
    (of_x, of_weight), of_result = _letters(equation)
    summed = next((of_x[n:] for n in range(len(of_x)) if of_weight.startswith(of_x[n:])), "")
    if not summed or of_x.removesuffix(summed) + of_weight.removeprefix(summed) != of_result:
        return jnp.einsum(equation, x, weight)
    size = math.prod(weight.shape[: len(summed)])
    rows = x.reshape(-1, size) @ weight.reshape(size, -1)
    return rows.reshape(*x.shape[: x.ndim - len(summed)], *weight.shape[len(summed) :])


def _letters(equation: str) -> tuple[list[str], str]:
    operands, result = equation.split("->")
    return operands.split(","), result


_product.defvjp(_forward, _backward)
