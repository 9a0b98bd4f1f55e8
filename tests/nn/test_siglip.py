"""SigLIP's own parts; its outputs and gradients are compared with openpi's in `tests/models`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from openpi_train.nn.siglip import gelu


def slope(x):
    """The derivative of the tanh form, by the quotient's own rule, in float64."""
    inner, factor = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + np.tanh(inner)) + 0.5 * x * factor / np.cosh(np.minimum(np.abs(inner), 300)) ** 2


def test_gelu_and_its_derivative_are_those_of_the_tanh_form():
    x = np.concatenate([np.linspace(-8, 8, 1001), [-1e4, -30.0, 0.0, 30.0, 1e4]])
    found = jax.vmap(jax.value_and_grad(lambda x: gelu(x)))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found[0], jax.nn.gelu(jnp.asarray(x, jnp.float32)), rtol=0)
    np.testing.assert_allclose(found[1], slope(x), rtol=2e-6, atol=5e-7)
    np.testing.assert_allclose(found[0][:1001], x[:1001] * special.ndtr(x[:1001]), atol=5e-4)  # what it approximates


def test_gelu_of_bfloat16_has_a_derivative_that_is_rounded_once():
    x = jnp.linspace(-4, 4, 257, dtype=jnp.bfloat16)
    found = jax.vmap(jax.grad(gelu))(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.asarray(slope(np.asarray(x, np.float64)), jnp.bfloat16))


@pytest.mark.parametrize("at", [0.0, 3.0])
def test_gelu_has_a_second_derivative(at):
    second = jax.grad(jax.grad(gelu))(jnp.float32(at))
    np.testing.assert_allclose(second, (slope(at + 1e-5) - slope(at - 1e-5)) / 2e-5, atol=1e-5)
