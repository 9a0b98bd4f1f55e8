"""Products whose weights' gradients are not rounded to the type of the activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.nn.matmul import product
from openpi_train.planning.jaxprs import bodies

SIZES = {"b": 2, "t": 5, "d": 8, "n": 3, "c": 4, "p": 2, "k": 1, "l": 3, "m": 6}


def factors(equation: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Activations and a cotangent in bfloat16, and a float32 weight."""
    (of_x, of_weight), of_result = equation.split("->")[0].split(","), equation.split("->")[1]
    keys = jax.random.split(jax.random.key(3), 3)
    x, weight, cotangent = (
        jax.random.normal(key, [SIZES[letter] for letter in letters], jnp.float32)
        for key, letters in zip(keys, (of_x, of_weight, of_result), strict=True)
    )
    return x.astype(jnp.bfloat16), weight, cotangent.astype(jnp.bfloat16)


def gradients(function, x, weight, cotangent):
    result, back = jax.vjp(function, x, weight)
    assert result.dtype == x.dtype
    return result, *back(cotangent)


@pytest.mark.parametrize("equation", ["btd,pkdc->btpkc", "btd,ndc->btnc", "btnc,ncd->btd", "btd,dm->btm"])
def test_the_gradient_of_a_weight_is_that_of_its_factors_in_float32(equation):
    x, weight, cotangent = factors(equation)
    result, in_x, in_weight = gradients(lambda x, w: product(equation, x, w), x, weight, cotangent)
    plain, plain_in_x, rounded = gradients(
        lambda x, w: jnp.einsum(equation, x, w.astype(x.dtype)), x, weight, cotangent
    )
    np.testing.assert_array_equal(result, plain)
    np.testing.assert_array_equal(in_x, plain_in_x)
    (of_x, of_weight), of_result = equation.split("->")[0].split(","), equation.split("->")[1]
    exact = np.einsum(f"{of_x},{of_result}->{of_weight}", np.asarray(x, np.float64), np.asarray(cotangent, np.float64))
    assert in_weight.dtype == jnp.float32
    # Sums of at most 16 exact products in float32.
    np.testing.assert_allclose(in_weight, exact, rtol=1e-5, atol=1e-6)
    assert np.abs(rounded - exact).max() > 100 * np.abs(in_weight - exact).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_weight_that_is_no_wider_has_the_gradient_of_einsum(dtype):
    x, weight, cotangent = factors("btd,dm->btm")
    x, weight, cotangent = x.astype(jnp.float32), weight.astype(dtype), cotangent.astype(jnp.float32)
    found = gradients(lambda x, w: product("btd,dm->btm", x, w), x, weight, cotangent)
    plain = gradients(lambda x, w: jnp.einsum("btd,dm->btm", x, w.astype(x.dtype)), x, weight, cotangent)
    jax.tree.map(np.testing.assert_array_equal, found, plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("equation", "rows"), [("btnc,ncd->btd", 10), ("btd,dm->btm", 10), ("btd,ndc->btnc", None)])
def test_sums_of_last_axes_with_first_ones_are_products_of_matrices(equation, rows, dtype):
    """To what is added to their results XLA for GPUs adds within the product, without a copy."""
    x, weight, _ = factors(equation)
    [dot] = [
        one
        for one in jax.make_jaxpr(lambda x, w: product(equation, x, w))(x, weight.astype(dtype)).jaxpr.eqns
        for one in (one, *(inner for body in bodies(one) for inner in body.eqns))
        if one.primitive.name == "dot_general"
    ]
    shape = dot.outvars[0].aval.shape
    assert (shape[0] == rows and len(shape) == 2) == (rows is not None)


def test_a_sum_over_one_operand_alone_is_differentiated_too():
    equation = "btl,nlc->btc"
    found = gradients(lambda x, w: product(equation, x, w), *factors(equation))
    plain = gradients(lambda x, w: jnp.einsum(equation, x, w.astype(x.dtype)), *factors(equation))
    jax.tree.map(np.testing.assert_array_equal, found, plain)
