"""What a step keeps between forward and backward, against what a few lines keep by hand."""

import jax
import jax.numpy as jnp

from openpi_train.planning.residuals import residual_bytes_per_row


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_each_row_keeps_what_its_gradient_needs():
    def loss(params, rows):
        hidden = jnp.tanh(rows @ params["kernel"])  # keeps the rows [6], and the derivative of tanh [8]
        return (hidden * hidden).sum(), {}  # keeps 2 * hidden, which is added up from hidden [8] twice

    kept = residual_bytes_per_row(loss, {"kernel": shape(6, 8)}, lambda rows: shape(rows, 6))
    assert kept in {4 * (6 + 8 + 8), 4 * (6 + 8 + 8 + 8)}  # one array of hidden or two


def test_a_layer_that_is_computed_again_keeps_its_input_alone():
    def loss(params, rows):
        layer = jax.checkpoint(lambda rows: jnp.tanh(jnp.tanh(rows * params["scale"])))
        return layer(rows).sum(), {}

    kept = residual_bytes_per_row(loss, {"scale": shape(6)}, lambda rows: shape(rows, 6))
    assert kept == 4 * 6
