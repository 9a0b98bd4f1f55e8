"""Stacks of layers, norms and the flow time's encoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.nn.gemma import Gemma
from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.nn.norms import LayerNorm, RMSNorm, residual
from openpi_train.nn.sincos import sincos_encoding
from openpi_train.parallel.layers import scan_layers, scan_to_last, stack_layers
from openpi_train.parallel.params import ParamUse, merge_module, module_params, use_params
from openpi_train.planning.flops import product_flops
from openpi_train.planning.jaxprs import bodies


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x))


@pytest.fixture(scope="module")
def stacked():
    return stack_layers(Layer, 3, nnx.Rngs(0))


def body(layer, x, extra):
    return layer(x) + (0 if extra is None else extra), jnp.sum(x)


def test_stacked_layers_are_initialised_separately(stacked):
    kernel = stacked.dense.kernel[...]
    assert kernel.shape == (3, 4, 4)
    assert not np.allclose(kernel[0], kernel[1])


def test_a_scan_equals_the_layers_one_by_one(stacked):
    x = jnp.ones((2, 4))
    extra = jnp.arange(3.0)
    result, sums = scan_layers(stacked, body, x, extra, remat="none")
    for index in range(3):
        np.testing.assert_allclose(sums[index], x.sum(), rtol=1e-6)
        kernel, bias = stacked.dense.kernel[index], stacked.dense.bias[index]
        x = x + jnp.tanh(x @ kernel + bias) + extra[index]
    np.testing.assert_allclose(result, x, rtol=1e-6)


def test_a_stack_that_was_made_otherwise_is_refused():
    stacked = nnx.vmap(Layer)(nnx.Rngs(0).split(3))
    with pytest.raises(ValueError, match="dense/bias of these layers was not made by stack_layers"):
        scan_layers(stacked, body, jnp.ones((2, 4)), remat="none")


@pytest.mark.parametrize("remat", ["products", "dots", "attention", "full"])
def test_recomputing_changes_no_gradient(stacked, remat):
    graph, params = nnx.split(stacked)

    def loss(params, remat):
        return scan_layers(nnx.merge(graph, params), body, jnp.ones((2, 4)), remat=remat)[0].sum()

    expected, other = jax.grad(loss)(params, "none"), jax.grad(loss)(params, remat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), expected, other)


UNROLLED = ParamUse(unrolled=True)


def value_and_gradient(stacked, run, *, unrolled, frozen=()):
    """The compiled program of a sum over outputs and its gradient in all parameters, what it computes, its source."""
    graph, params = nnx.split(stacked)

    def loss(params, x):
        module = nnx.merge(graph, params)
        use_params(module, ParamUse(unrolled=unrolled), frozen)
        return run(module, x)

    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, x)
    program = lowered.compile()
    return program.as_text(), program(params, x), lowered.as_text()


def assert_rounded_otherwise(a, b):
    """Equal but for the order of sums, whose terms are at most about 16."""
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def run_with_sums(stacked, x, *, remat):
    """All layers, with an input and an output of each."""
    carry, sums = scan_layers(stacked, body, x, jnp.arange(3.0), remat=remat)
    return carry.sum() + (sums**2).sum()


@pytest.mark.parametrize(
    ("remat", "of_a_layer", "others"), [("none", 1, 2), ("dots", 2, 3), ("attention", 2, 3), ("full", 3, 4)]
)
def test_unrolled_layers_compute_what_a_loop_computes_and_recompute_as_much(stacked, remat, of_a_layer, others):
    """The code of all layers but the last has a barrier behind its gradients; both have one before what is recomputed;
    and the stack of each weight's gradients has one, so that what reads it reads no single gradients. With `full` each
    layer has one for its own gradients."""
    run = functools.partial(run_with_sums, remat=remat)
    looped, unrolled = (value_and_gradient(stacked, run, unrolled=unrolled) for unrolled in (False, True))
    jax.tree.map(assert_rounded_otherwise, looped[1], unrolled[1])
    assert " while(" in looped[0] and " while(" not in unrolled[0]
    assert unrolled[0].count(" tanh(") == (3 if remat == "none" else 6)
    # jax 0.10 writes the code of the two layers before the last once and calls it, jax 0.12 writes it twice.
    assert unrolled[2].count("stablehlo.optimization_barrier") in (of_a_layer + others, 2 * of_a_layer + others)
    stacks = [line for line in unrolled[2].splitlines() if "concatenate" in line and "-> tensor<3x4x4xf32>" in line]
    assert len(stacks) == 1


@pytest.mark.parametrize("remat", ["none", "full"])
def test_one_layer_can_be_unrolled(remat):
    one = stack_layers(Layer, 1, nnx.Rngs(0))

    def run(stacked, x):
        return scan_layers(stacked, body, x, jnp.arange(1.0), remat=remat)[0].sum()

    looped, unrolled = (value_and_gradient(one, run, unrolled=unrolled)[1] for unrolled in (False, True))
    jax.tree.map(assert_rounded_otherwise, looped, unrolled)


def everything(jaxpr):
    """All equations of a program, those inside of others, too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in bodies(equation):
            yield from everything(inner)


def backward_bodies(jaxpr):
    """What the loops of the backward pass repeat."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and equation.params["reverse"]:
            yield equation.params["jaxpr"].jaxpr
        for inner in bodies(equation):
            yield from backward_bodies(inner)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_of_an_unrolled_layer_wait_for_those_of_the_layer_behind_it_and_not_for_its_own(stacked, remat):
    graph, params = nnx.split(stacked)

    def loss(params, x):
        module = nnx.merge(graph, params)
        use_params(module, UNROLLED)
        return run_with_sums(module, x, remat=remat)

    (body_of_layer,) = backward_bodies(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, jnp.ones((2, 4))).jaxpr)
    (barrier,) = (one for one in body_of_layer.eqns if one.primitive.name == "optimization_barrier")
    of_input, *of_weights = barrier.invars
    assert of_input.aval.shape == (2, 4) and of_input not in body_of_layer.invars
    assert sorted(var.aval.shape for var in of_weights) == sorted(x.shape[1:] for x in jax.tree.leaves(params))
    made = {id(var): one for one in body_of_layer.eqns for var in one.outvars}

    def source(var):
        while id(var) in made and made[id(var)].primitive.name in ("layout_constraint", "add_any"):
            (var,) = made[id(var)].invars
        return var

    assert all(source(var) in body_of_layer.invars for var in of_weights)


@pytest.mark.parametrize(
    ("remat", "frozen", "expected"),
    [
        ("full", (), [(2, 4), (4,), (4, 4)]),
        ("full", ("dense/bias",), [(2, 4), (4, 4)]),
        ("attention", (), None),
    ],
)
def test_with_full_the_gradient_of_an_unrolled_layers_input_waits_for_the_layers_own(stacked, remat, frozen, expected):
    graph, params = nnx.split(stacked)

    def loss(params, x):
        module = nnx.merge(graph, params)
        use_params(module, UNROLLED, frozen)
        return run_with_sums(module, x, remat=remat)

    (body_of_layer,) = backward_bodies(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, jnp.ones((2, 4))).jaxpr)
    [recomputed] = (bodies(one)[0] for one in body_of_layer.eqns if one.primitive.name in ("remat2", "checkpoint"))
    barriers = [one for one in recomputed.eqns if one.primitive.name == "optimization_barrier"]
    if expected is None:
        assert not barriers
        return
    [barrier] = barriers
    assert sorted(var.aval.shape for var in barrier.invars) == sorted(expected)
    assert set(barrier.outvars) <= set(recomputed.outvars)
    made = {var: one for one in recomputed.eqns for var in one.outvars}
    assert all(var in made for var in barrier.invars), "it waits for what other layers gave"


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_frozen_matrices_of_unrolled_layers_are_read_when_their_layer_runs(stacked, remat, is_cut):
    """XLA for GPUs copies what is read of a stack, and would do so for all layers at the beginning."""
    graph, params = nnx.split(stacked)

    def loss(params, x):
        module = nnx.merge(graph, params)
        use_params(module, UNROLLED, ("dense/kernel",))
        run = functools.partial(scan_to_last, dtype=jnp.float32) if is_cut else scan_layers
        return run(module, lambda layer, x, _: (layer(x), None), x, remat=remat)[0].sum()

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, jnp.ones((2, 4))).jaxpr
    forward = next(one for one in everything(program) if one.primitive.name == "scan" and not one.params["reverse"])
    inside = list(everything(bodies(forward)[0]))
    [barrier] = (one for one in inside if one.primitive.name == "optimization_barrier")
    assert [var.aval.shape for var in barrier.invars] == [(), (2, 4)]  # an index, and the layer's input
    assert [one.outvars[0].aval.shape for one in inside if one.primitive.name == "dynamic_slice"].count((1, 4, 4)) == 1


def test_the_gradient_of_a_condition_waits_with_those_of_each_layer():
    """Put off to the end, its products would keep what every layer gathers for them."""
    config = GemmaConfig(width=16, depth=3, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
    gemma = Gemma({"action": config}, 0, {"action": 6}, dtype=jnp.float32, remat="full", rngs=nnx.Rngs(0))
    use_params(gemma, UNROLLED)
    graph, params = nnx.split(gemma)

    def loss(condition):
        inputs = {"action": jnp.ones((2, 4, 16))}, jnp.zeros((2, 4), int), jnp.ones((2, 4, 4), bool)
        return jnp.sum(nnx.merge(graph, params)(*inputs, {"action": condition})["action"])

    (body_of_layer,) = backward_bodies(jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 1, 6))).jaxpr)
    (barrier,) = (one for one in body_of_layer.eqns if one.primitive.name == "optimization_barrier")
    of_condition = [
        [var.aval.shape for var in some].count((2, 1, 6)) for some in (barrier.invars, body_of_layer.outvars)
    ]
    assert of_condition == [1, 1], "its gradient is added up apart"


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_frozen_weights_of_unrolled_layers_cost_no_product(stacked, remat):
    graph, params = nnx.split(stacked)

    def loss(params, x, unrolled):
        trained = jax.tree.map(lambda x: x, params)
        trained["dense"]["kernel"] = jax.tree.map(jax.lax.stop_gradient, trained["dense"]["kernel"])
        module = nnx.merge(graph, trained)
        use_params(module, ParamUse(unrolled=unrolled), ("dense/kernel",))
        return run_with_sums(module, x, remat=remat)

    looped, unrolled = (
        product_flops(jax.make_jaxpr(jax.grad(loss, (0, 1)), static_argnums=2)(params, jnp.ones((2, 4)), n).jaxpr)
        for n in (False, True)
    )
    assert looped == unrolled > 0


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("frozen", [(), ("dense/kernel",)])
def test_an_unrolled_cut_stack_computes_what_a_loop_computes(stacked, frozen, remat):
    def run(stacked, x):
        carry, _, last = scan_to_last(stacked, body, x, remat=remat, dtype=jnp.float32)
        return body(last, carry, None)[0].sum()

    looped, unrolled = (value_and_gradient(stacked, run, unrolled=one, frozen=frozen) for one in (False, True))
    jax.tree.map(assert_rounded_otherwise, looped[1], unrolled[1])
    assert " while(" in looped[0] and " while(" not in unrolled[0]


def run_to_last(stacked, *, dtype=jnp.float32, remat="full"):
    carry, _, last = scan_to_last(stacked, body, jnp.ones((2, 4)), remat=remat, dtype=dtype)
    return body(last, carry, None)[0].sum()


@pytest.mark.slow
def test_a_cut_stack_computes_the_same_and_its_gradient_comes_back_in_one_piece(stacked):
    graph, params = nnx.split(stacked)

    def whole(params):
        return scan_layers(nnx.merge(graph, params), body, jnp.ones((2, 4)), remat="none")[0].sum()

    def cut(params):
        return run_to_last(nnx.merge(graph, params))

    (expected, gradient), (value, other) = jax.value_and_grad(whole)(params), jax.value_and_grad(cut)(params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradient, other)


def test_a_cut_stack_has_its_matrices_in_the_type_of_the_layers_and_the_rest_as_it_was(stacked):
    seen = []

    def looking(layer, carry, _):
        seen.append((layer.dense.kernel[...].dtype, layer.dense.kernel.shape, layer.dense.bias[...].dtype))
        return carry, None

    last = scan_to_last(stacked, looking, jnp.ones(4), remat="none", dtype=jnp.bfloat16)[2]
    looking(last, None, None)
    assert set(seen) == {(jnp.dtype("bfloat16"), (4, 4), jnp.dtype("float32"))}


@pytest.mark.parametrize(
    ("frozen", "dtype", "copied"),
    [
        (("dense/kernel", "dense/bias"), jnp.float32, set()),
        (("dense/kernel",), jnp.float32, {(3, 4)}),
        (("dense/kernel",), jnp.bfloat16, {(3, 4), (3, 4, 4)}),  # it must be cast anyway
        ((), jnp.float32, {(3, 4), (3, 4, 4)}),
    ],
)
def test_what_is_frozen_is_read_from_the_stack_and_not_copied(stacked, frozen, dtype, copied):
    graph, params = nnx.split(stacked)[0], module_params(stacked)

    def loss(params, x):
        module = merge_module(graph, params)
        use_params(module, ParamUse(), frozen)
        carry, _, last = scan_to_last(module, body, x, remat="dots", dtype=dtype)
        return body(last, carry, None)[0].sum()

    x = jnp.ones((2, 4))
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=1))(params, x).jaxpr
    slices = [one.outvars[0].aval.shape for one in jaxpr.eqns if one.primitive.name == "slice"]
    assert {(3, *shape[1:]) for shape in slices if shape[0] == 2} == copied
    np.testing.assert_array_equal(loss(params, x), run_to_last(stacked, dtype=dtype, remat="dots"))


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_frozen_stack_is_not_kept_once_more_for_the_backward_pass(stacked, remat):
    graph, params = nnx.split(stacked)[0], module_params(stacked)

    def loss(params, x):
        module = merge_module(graph, params)
        use_params(module, ParamUse(), params)
        return scan_to_last(module, body, x, remat=remat, dtype=jnp.float32)[0].sum()

    program = jax.make_jaxpr(jax.grad(loss, argnums=1))(params, jnp.ones((2, 4))).jaxpr
    scans = [one for one in program.eqns if one.primitive.name == "scan"]
    assert len(scans) == 2 and not [var for one in scans for var in one.outvars if var.aval.shape == (2, 4, 4)]


def test_a_residual_is_added_as_a_matrix():
    x, update = jax.random.normal(jax.random.key(0), (2, 2, 3, 8))
    np.testing.assert_array_equal(residual(x, update), x + update)
    [added] = [one for one in jax.make_jaxpr(residual)(x, update).jaxpr.eqns if one.primitive.name == "add"]
    assert added.outvars[0].aval.shape == (6, 8)


def test_layer_norm_equals_flax_in_float32():
    x = jax.random.normal(jax.random.key(0), (2, 3, 8)) * 3 + 1
    theirs, ours = nnx.LayerNorm(8, rngs=nnx.Rngs(0)), LayerNorm(8)
    for norm in (theirs, ours):
        norm.scale.set_value(jnp.linspace(0.5, 2, 8))
        norm.bias.set_value(jnp.linspace(-1, 1, 8))
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_an_adaptive_norm_starts_as_the_plain_one_with_a_closed_gate():
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    condition = jax.random.normal(jax.random.key(1), (2, 3, 5))
    plain, adaptive = (RMSNorm(8, width, dtype=jnp.float32, rngs=nnx.Rngs(0)) for width in (None, 5))
    normed, gate = adaptive(x, condition)
    np.testing.assert_allclose(normed, plain(x, None)[0], rtol=1e-6)
    np.testing.assert_array_equal(gate, np.zeros((2, 6, 8)))


@pytest.mark.slow
def test_each_group_of_tokens_has_its_own_condition():
    x = jax.random.normal(jax.random.key(0), (1, 6, 8))
    condition = jax.random.normal(jax.random.key(1), (1, 3, 5))
    norm = RMSNorm(8, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    norm.modulation.kernel.set_value(jax.random.normal(jax.random.key(2), (5, 24)))
    whole, _ = norm(x, condition)
    for group in range(3):
        part, _ = norm(x[:, 2 * group : 2 * group + 2], condition[:, group : group + 1])
        np.testing.assert_allclose(whole[:, 2 * group : 2 * group + 2], part, rtol=1e-5)


def test_an_adaptive_norm_without_its_condition_says_so():
    norm = RMSNorm(8, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="needs a condition"):
        norm(jnp.ones((1, 2, 8)), None)


@pytest.mark.parametrize("width", [64, 1024])
def test_periods_of_flow_time_are_those_of_openpi_on_a_cpu_on_every_device(width):
    def theirs(time):
        period = 4e-3 * (4.0 / 4e-3) ** jnp.linspace(0.0, 1.0, width // 2)
        angle = time[..., None] * (1.0 / period * 2 * jnp.pi)
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)

    def ours(time):
        return sincos_encoding(time, width, 4e-3, 4.0)

    time = jnp.linspace(0.001, 1, 7)
    np.testing.assert_array_equal(jax.jit(ours)(time), jax.jit(theirs)(time))
    assert {"sin", "cos", "mul"} <= (made := {one.primitive.name for one in jax.make_jaxpr(ours)(time).jaxpr.eqns})
    assert not made & {"pow", "integer_pow", "exp", "div", "jit"}


def test_flow_time_is_encoded_at_periods_from_the_shortest_to_the_longest():
    time = jnp.array([0.3])
    encoded = np.asarray(sincos_encoding(time, 6, 4e-3, 4.0))[0]
    periods = [4e-3, np.sqrt(4e-3 * 4.0), 4.0]
    angles = 2 * np.pi * 0.3 / np.array(periods)
    # 75 turns at the shortest period: float32 leaves about 1e-4 of an angle.
    np.testing.assert_allclose(encoded, np.concatenate([np.sin(angles), np.cos(angles)]), atol=3e-4)
