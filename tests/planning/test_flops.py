"""FLOPs counted in a traced program, against closed forms."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from openpi_train.nn.attention import attend
from openpi_train.parallel.layers import scan_layers, stack_layers
from openpi_train.parallel.remat import keep_input
from openpi_train.planning.flops import product_flops, rewritten_bytes
from openpi_train.planning.gpu import plugin
from openpi_train.planning.gpu.targets import TARGETS


def test_products_count_as_often_as_their_loop_runs():
    def layers(x, weights):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    x, weights = jnp.zeros((3, 8)), jnp.zeros((5, 8, 8))
    forward = 2 * 3 * 8 * 8 * 5
    assert product_flops(jax.make_jaxpr(layers)(x, weights).jaxpr) == forward
    both = jax.make_jaxpr(jax.grad(lambda *leaves: layers(*leaves).sum(), argnums=(0, 1)))(x, weights)
    assert product_flops(both.jaxpr) == 3 * forward


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 4)])
def test_convolutions_count_forward_and_backward(stride, groups):
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (stride,), "VALID", feature_group_count=groups)

    x, kernel = jnp.zeros((2, 8, 21)), jnp.zeros((12, 8 // groups, 3))
    forward = 2 * 2 * 12 * ((21 - 3) // stride + 1) * (8 // groups) * 3
    assert product_flops(jax.make_jaxpr(convolve)(x, kernel).jaxpr) == forward
    of_kernel = jax.make_jaxpr(jax.grad(lambda kernel: convolve(x, kernel).sum()))(kernel).jaxpr
    assert product_flops(of_kernel) == 2 * forward
    # That of the input has padding, whose zeros count: three weights for each of 21 places, not of 19 (or 10 of 20).
    of_input = jax.make_jaxpr(jax.grad(lambda x: convolve(x, kernel).sum()))(x).jaxpr
    assert product_flops(of_input) == pytest.approx(forward * (1 + 21 / 19), rel=0.06)


def test_attention_by_cudnn_counts_as_that_by_xla_but_for_what_its_gradient_computes_again():
    query, key = jnp.zeros((2, 16, 4, 64), jnp.bfloat16), jnp.zeros((2, 32, 1, 64), jnp.bfloat16)
    h100 = next(target for target in TARGETS if target.kind == "h100")

    def flops(kind, **counted):
        def loss(*heads):
            return attend(*heads, jnp.ones((2, 16, 32), bool), kind).astype(jnp.float32).sum()

        with plugin.pretended(h100):
            return product_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(query, key, key).jaxpr, **counted)

    product = 2 * (2 * 4 * 16 * 32) * 64
    assert flops("xla") == flops("cudnn", recomputed=False) == 6 * product
    assert flops("cudnn") == 7 * product


def test_recomputed_products_count_again():
    def twice(x, weight):
        return jnp.tanh(jnp.tanh(x @ weight) @ weight).sum()

    x, weight = jnp.zeros((4, 8)), jnp.zeros((8, 8))
    once = product_flops(jax.make_jaxpr(jax.grad(twice, argnums=(0, 1)))(x, weight).jaxpr)
    again = product_flops(jax.make_jaxpr(jax.grad(jax.checkpoint(twice), argnums=(0, 1)))(x, weight).jaxpr)
    assert (once, again) == (6 * 2 * 4 * 8 * 8, 8 * 2 * 4 * 8 * 8)


@pytest.mark.parametrize("remat", ["none", "products", "dots", "attention", "full"])
def test_the_models_own_products_are_the_same_whatever_is_recomputed(remat):
    def loss(x, weights):
        layer = toy_stack(weights)
        return scan_layers(layer, lambda layer, x, _: (jnp.tanh(layer(x)), None), x, remat=remat)[0].sum()

    x, weights = jnp.zeros((4, 8)), jnp.zeros((5, 8, 8))
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, weights).jaxpr
    forward = 2 * 4 * 8 * 8 * 5
    assert product_flops(jaxpr, recomputed=False) == 3 * forward
    again = 1 if remat in ("attention", "full") else 0  # `dots` keeps the products with weights
    assert product_flops(jaxpr) == (3 + again) * forward


@pytest.mark.parametrize(("remat", "times"), [("none", 0), ("products", 0), ("dots", 1), ("attention", 1), ("full", 1)])
def test_inputs_of_products_are_written_again_where_they_are_not_stored(remat, times):
    def loss(x, weights):
        layers = toy_stack(weights)
        return scan_layers(layers, lambda one, x, _: (one(keep_input(jnp.tanh(x))), None), x, remat=remat)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(jnp.zeros((4, 8)), jnp.zeros((5, 8, 8))).jaxpr
    assert rewritten_bytes(jaxpr, lambda aval: aval.size * aval.dtype.itemsize) == times * 5 * 4 * 8 * 4


def toy_stack(weights):
    """A stack of layers that multiply."""
    stack = stack_layers(lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs), 5, nnx.Rngs(0))
    stack.kernel[...] = weights
    return stack


def test_what_every_device_computes_by_itself_counts_on_all_of_them():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.sharding.PartitionSpec("b")
    product = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"b"})
    assert product_flops(jax.make_jaxpr(product)(jnp.zeros((8, 16))).jaxpr) == 4 * 2 * 2 * 16 * 2
