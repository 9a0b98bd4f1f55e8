"""Attention, rotary positions and masks against their formulas in numpy."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.nn.attention import (
    attend,
    block_mask,
    cudnn_problem,
    flash_attend,
    rotary_angles,
    rotate,
    uses_cudnn,
)
from openpi_train.nn.attention_check import distances
from openpi_train.planning.gpu import plugin
from openpi_train.planning.jaxprs import bodies
from openpi_train.runtime.device_kinds import find_kind
from openpi_train.runtime.exits import UsageError


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@pytest.mark.slow
def test_grouped_attention_equals_the_formula_head_by_head():
    query, key, value = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 2, 8), normal(2, 2, 7, 2, 8)
    mask = jax.random.bernoulli(jax.random.key(3), 0.6, (2, 5, 7)).at[:, :, 0].set(True)
    result = attend(query, key, value, mask)
    for b in range(2):
        for head in range(4):
            q, k, v = (
                np.asarray(x, np.float64) for x in (query[b, :, head], key[b, :, head // 2], value[b, :, head // 2])
            )
            logits = np.where(mask[b], q @ k.T / np.sqrt(8), -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            np.testing.assert_allclose(result[b, :, head], weights @ v, atol=1e-5)


def test_a_row_that_sees_nothing_is_finite():
    result = attend(normal(0, 1, 1, 2, 4), normal(1, 1, 3, 1, 4), normal(2, 1, 3, 1, 4), jnp.zeros((1, 1, 3), bool))
    assert np.isfinite(result).all()


def with_gradients(attention, dtype, shape=(2, 27, 31, 8, 1, 64)):
    """Outputs and gradients (float32) for queries, keys and values; some queries see nothing, as padding does."""
    b, t, s, n, k, c = shape
    # Rounded, so that every type computes the same function of the same numbers.
    inputs = [
        x.astype(jnp.bfloat16).astype(dtype)
        for x in (normal(0, b, t, n, c), normal(1, b, s, k, c), normal(2, b, s, k, c))
    ]
    mask = jax.random.bernoulli(jax.random.key(3), 0.7, (b, t, s)).at[0, :3].set(False)
    sees = mask.any(axis=-1)[:, :, None, None]

    def loss(*inputs):
        # What padding reads is never used.
        seen = jnp.where(sees, attention(*inputs, mask).astype(jnp.float32), 0.0)
        return jnp.sum(seen * normal(4, b, t, n, c)), seen

    (_, seen), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return [np.asarray(x, np.float32) for x in (seen, *gradients)]


def assert_close(ours, theirs, tolerance):
    assert max(distances(ours, theirs)) < tolerance


# In bfloat16 the weights are rounded to 8 bits in both, and the queries' scale in ours only (exact for 64).
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_the_formula_equals_that_of_jax(dtype, tolerance):
    def theirs(query, key, value, mask):
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="xla")

    assert_close(with_gradients(attend, dtype), with_gradients(theirs, dtype), tolerance)


@pytest.mark.slow
def test_capped_products_have_the_gradient_of_jax():
    cap = 0.7  # less than most products

    def theirs(query, key, value, mask):
        keys, values = (jnp.repeat(x, 4, axis=2) for x in (key, value))
        products = jnp.einsum("btnc,bsnc->bnts", query, keys) / np.sqrt(query.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask[:, None], cap * jnp.tanh(products / cap), -1e30), axis=-1)
        return jnp.einsum("bnts,bsnc->btnc", weights, values)

    shape = (2, 5, 7, 8, 2, 16)
    found, expected = (
        with_gradients(one, jnp.float32, shape) for one in (functools.partial(attend, kind="xla", cap=cap), theirs)
    )
    assert_close(found, expected, 1e-5)


def test_nothing_as_large_as_the_weights_is_transposed_or_stored_for_all_layers():
    """XLA for GPUs writes what is transposed, and jax takes out of a loop what is the same in each turn."""
    b, t, n, k, c = 2, 64, 4, 2, 8
    weights = b * n * t * t

    def layer(x, scale):
        key = x[:, :, : k * c].reshape(b, t, k, c) * scale
        return x + attend(x.reshape(b, t, n, c), key, key, jnp.tril(jnp.ones((b, t, t), bool))).reshape(x.shape), None

    @jax.grad
    def gradient(scales):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), normal(0, b, t, n * c), scales)[0])

    program = jax.make_jaxpr(gradient)(jnp.ones(3)).jaxpr
    (forward, backward) = (equation for equation in program.eqns if equation.primitive.name == "scan")
    inside = [one for scan in (forward, backward) for one in equations(scan.params["jaxpr"].jaxpr)]
    assert sum(is_large(one, weights) for one in inside) > 10
    moved = [one for one in inside if one.primitive.name == "transpose" and is_large(one, weights)]
    outside = [one for one in program.eqns if one.primitive.name != "scan" and is_large(one, weights)]
    assert not moved and not outside


def test_the_backward_pass_reads_the_rounded_weights_and_not_what_they_were_computed_from():
    """XLA for GPUs would compute them again from products in float32, which it would keep, too."""
    b, t, n, k, c = 2, 8, 4, 2, 16
    mask = jnp.ones((b, t, t), bool)

    def loss(query, key, value):
        return jnp.sum(attend(query, key, value, mask, "xla").astype(jnp.float32))

    inputs = [jnp.ones((b, t, heads, c), jnp.bfloat16) for heads in (n, k, k)]
    program = list(equations(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*inputs).jaxpr))
    size = (b, k, t * n // k, t)
    barriers = (one for one in program if one.primitive.name == "optimization_barrier")
    [barrier] = (one for one in barriers if [var.aval.shape for var in one.outvars] == [size])
    [rounded], [weights] = barrier.invars, barrier.outvars
    assert weights.aval.dtype == jnp.bfloat16
    readers = [[one.primitive.name for one in program if var in one.invars] for var in (rounded, weights)]
    # Of the weights the averages, the gradient of the values, and in float32 that of the products.
    assert readers == [["optimization_barrier"], ["dot_general", "convert_element_type", "dot_general"]]


def equations(jaxpr):
    """All equations of a jaxpr, those of calls in it in place of the calls."""
    for equation in jaxpr.eqns:
        inner = bodies(equation)
        yield from (one for body in inner for one in equations(body)) if inner else [equation]


def is_large(equation, size):
    return any(var.aval.size >= size for var in equation.outvars)


# Query heads, heads of keys, their width: SigLIP, Gemma, Llama-3.2-1B, Qwen2.5-7B.
HEADS = [(16, 16, 72), (8, 1, 256), (32, 8, 64), (28, 4, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"width-{heads[2]}")
def test_cudnn_is_as_near_to_float32_as_the_formula(heads):
    """Both round the weights to bfloat16, at different places, and their results."""
    if problem := cudnn_problem(heads[-1], jnp.bfloat16, jax.local_devices()[0]):
        pytest.skip(f"cuDNN: {problem}")

    def by(kind, dtype=jnp.bfloat16):
        return with_gradients(lambda *inputs: attend(*inputs, kind), dtype, (2, 867, 867, *heads))

    with jax.default_matmul_precision("highest"):
        exact = by("xla", jnp.float32)
    formula, cudnn = distances(by("xla"), exact), distances(by("cudnn"), exact)
    print(heads, "errors of outputs and gradients of queries, keys, values: formula", formula, "cuDNN", cudnn)
    assert max(formula) < 1e-2
    assert all(x < 1.25 * y for x, y in zip(cudnn, formula, strict=True)), (formula, cudnn)


@pytest.mark.parametrize(
    ("platform", "capability", "head_dim", "dtype", "problem"),
    [
        ("gpu", "9.0", 256, "bfloat16", None),
        ("gpu", "9.0", 72, "float16", None),
        ("gpu", "8.0", 128, "bfloat16", None),
        ("gpu", "10.0", 128, "bfloat16", None),
        ("gpu", "8.0", 256, "bfloat16", "up to 128"),
        ("gpu", "10.0", 256, "bfloat16", "up to 128"),
        ("gpu", "9.0", 90, "bfloat16", "multiples of 8"),
        ("gpu", "9.0", 256, "float32", "--model.dtype"),
        ("gpu", "7.5", 64, "float16", "compute capability 8.0"),
        ("gpu", "gfx942", 64, "bfloat16", "NVIDIA"),
        ("cpu", None, 64, "bfloat16", "NVIDIA"),
    ],
)
def test_cudnn_is_used_where_it_can_train(platform, capability, head_dim, dtype, problem):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind="some device")
    found = cudnn_problem(head_dim, dtype, device)
    assert found is None if problem is None else problem in found


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about devices without cuDNN")
def test_on_a_cpu_auto_is_xla_and_cudnn_is_refused():
    assert not uses_cudnn("auto", 64, jnp.bfloat16)
    assert not uses_cudnn("xla", 64, jnp.bfloat16)
    with pytest.raises(UsageError, match=r"--model\.attention cudnn.*NVIDIA GPU.*auto or xla"):
        uses_cudnn("cudnn", 64, jnp.bfloat16)


@pytest.mark.parametrize(("queries", "used"), [(1, False), (2, True)])
def test_a_single_query_is_xla_s_in_any_case(queries, used):
    """Decoding would else pad keys and values for every token."""
    query, key = jnp.ones((1, queries, 2, 64), jnp.bfloat16), jnp.ones((1, 5, 1, 64), jnp.bfloat16)
    with plugin.pretended(find_kind("h100")):
        program = jax.make_jaxpr(lambda *x: attend(*x, jnp.ones((1, queries, 5), bool), "cudnn"))(query, key, key)
    assert ("dot_product_attention" in str(program)) == used


@pytest.mark.parametrize(("tokens", "of_kernel"), [(10, 10), (9, 16)])
def test_an_odd_number_of_tokens_is_padded_for_cudnn(tokens, of_kernel):
    x = jnp.ones((1, tokens, 2, 64), jnp.bfloat16)
    with plugin.pretended(find_kind("h100")):
        program = jax.make_jaxpr(lambda x: flash_attend(x, x, x, None))(x)
    assert f"bf16[1,{of_kernel},2,64]" in str(program) and program.out_avals[0].shape == x.shape
    assert (f"bool[1,1,{of_kernel},{of_kernel}]" in str(program)) == (tokens != of_kernel)


def test_a_rotation_multiplies_complex_numbers_of_first_and_second_half():
    heads = np.asarray(normal(0, 2, 3, 2, 8), np.float64)
    sine, cosine = rotary_angles(jnp.array([[0, 1, 5], [2, 9, 300]]), 8)
    turned = (heads[..., :4] + 1j * heads[..., 4:]) * (np.asarray(cosine) + 1j * np.asarray(sine))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(heads, jnp.float32), sine, cosine), expected, rtol=1e-5, atol=1e-6)


def test_rotary_products_depend_on_the_distance_only():
    query, key = normal(0, 1, 1, 1, 16), normal(1, 1, 1, 1, 16)

    def product(i, j):
        left = rotate(query, *rotary_angles(jnp.array([[i]]), 16))
        right = rotate(key, *rotary_angles(jnp.array([[j]]), 16))
        return float(jnp.sum(left * right))

    np.testing.assert_allclose(product(3, 10), product(103, 110), rtol=1e-4)
    np.testing.assert_allclose(product(0, 0), float(jnp.sum(query * key)), rtol=1e-6)
    assert abs(product(3, 10) - product(3, 11)) > 1e-3


def test_blocks_and_branches_say_who_sees_whom():
    valid = jnp.array([[True, False, True, True, True, True]])
    block, branch = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 0, 0, 1, 1, 2])
    mask = block_mask(valid, block, branch)[0].astype(int)
    assert mask.tolist() == [
        [1, 0, 0, 0, 0, 0],  # the prefix sees its valid tokens
        [0, 0, 0, 0, 0, 0],  # padding sees nothing and is seen by nothing
        [1, 0, 1, 0, 0, 0],  # the trunk of the suffix sees the prefix and itself
        [1, 0, 1, 1, 1, 0],  # the first branch
        [1, 0, 1, 1, 1, 0],
        [1, 0, 1, 0, 0, 1],  # the second one does not see it
    ]
