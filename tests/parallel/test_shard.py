"""Shards made whole in place: the same values and gradients as with the whole array, and no more sent than said."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from openpi_train.parallel.layers import scan_layers, stack_layers
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import Gathering, ParamKind, ParamUse, kind_of, use_params
from openpi_train.parallel.shard import Shard, spread, summed, take_rows, whole
from openpi_train.planning.jaxprs import bodies

NUMBERS = np.random.default_rng(0)


def on_four(function, in_specs, out_specs):
    """`function` on the parts that four devices hold."""
    mesh = make_mesh(4, jax.devices()[:4])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("dtype", "wide"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_whole_array_and_its_gradient_are_those_of_the_uncut_one(dim, dtype, wide):
    array = NUMBERS.normal(size=(8, 12)).astype(np.float32)
    weights = NUMBERS.normal(size=(4, 8, 12)).astype(np.float32)
    spec = P(*(None,) * dim, "fsdp")

    def value(part, weight):
        gathered = Shard(part, dim - 2, "fsdp", dtype).whole(wide=wide)
        assert gathered.dtype == (jnp.float32 if wide else dtype)
        return jnp.sum(gathered.astype(jnp.float32) * weight[0])

    def both(part, weight):
        share, gradient = jax.value_and_grad(value)(part, weight)
        return jax.lax.psum(share, "fsdp"), gradient

    total, gradient = on_four(both, (spec, P("fsdp")), (P(), spec))(array, weights)
    seen = np.asarray(jnp.asarray(array, dtype), np.float32)
    # What flows back has the type of what was sent, or is as wide as the part.
    rounded = np.asarray(jnp.asarray(weights, "float32" if wide else dtype), np.float32)
    np.testing.assert_allclose(total, (seen * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, rounded.sum(0), rtol=1e-6, atol=1e-6)
    assert gradient.dtype == jnp.float32


def test_rows_of_a_table_and_its_gradient_are_those_of_the_uncut_one_and_the_table_is_never_sent():
    table = NUMBERS.normal(size=(40, 6)).astype(np.float32)
    rows = NUMBERS.integers(0, 40, (8, 5)).astype(np.int32)
    weights = NUMBERS.normal(size=(8, 5, 6)).astype(np.float32)

    def value(part, rows, weight):
        taken = take_rows(Shard(part, -2, "fsdp", jnp.float32), rows)
        return jnp.sum(taken * weight), taken

    run = on_four(jax.grad(value, has_aux=True), (P("fsdp"),) * 3, (P("fsdp"), P("fsdp")))
    gradient, taken = run(table, rows, weights)
    np.testing.assert_array_equal(taken, table[rows])
    expected = np.zeros_like(table)
    np.add.at(expected, rows, weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)
    sent = re.findall(
        r"(\S+) (?:all-gather|all-reduce|reduce-scatter)\(", run.lower(table, rows, weights).compile().as_text()
    )
    assert sent and not [shape for shape in sent if shape.startswith("f32[40,6]")]


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x))


def gradient_of_a_cut_stack(remat, *, unrolled, reduce_dtype=jnp.float32, wide=False):
    """The gradient in a kernel that is cut over four devices, with its arguments; checked against the uncut one's."""
    stack = stack_layers(Layer, 3, nnx.Rngs(0))
    stack.dense.kernel.set_metadata(kind=dataclasses.replace(kind_of(stack.dense.kernel), wide=wide))
    graph, params = nnx.split(stack)
    params = nnx.to_pure_dict(params)["dense"]
    rows = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)  # the same in every test

    def loss(params, rows):
        stacked = nnx.merge(graph, {"dense": params})
        use_params(stacked, ParamUse(unrolled=unrolled))
        return jnp.sum(scan_layers(stacked, lambda layer, x, _: (layer(x), None), rows, remat=remat)[0])

    def cut(params, rows):
        def on_device(kernel):
            shard = Shard(kernel, -1, "fsdp", jnp.float32, reduce_dtype=reduce_dtype)
            return loss({**params, "kernel": shard}, rows)

        return jax.grad(on_device)(params["kernel"])

    specs = {"kernel": P(None, None, "fsdp"), "bias": P()}
    run = on_four(cut, (specs, P("fsdp")), specs["kernel"])
    precision = 1e-5 if reduce_dtype == jnp.float32 else 4 * 2**-8  # each device's part is rounded, and each sum
    expected = jax.grad(loss)(params, rows)["kernel"]
    np.testing.assert_allclose(run(params, rows), expected, rtol=0, atol=precision * np.abs(expected).max())
    return run, params, rows


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_stack_gathers_layer_by_layer_and_keeps_no_whole_layer_for_the_backward_pass(remat):
    run, *inputs = gradient_of_a_cut_stack(remat, unrolled=False)
    assert "f32[3,8,8]" not in run.lower(*inputs).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_unrolled_layers_read_their_shards_from_the_stack_and_keep_no_part_of_it(remat):
    run, *inputs = gradient_of_a_cut_stack(remat, unrolled=True)
    [mapped] = bodies(jax.make_jaxpr(run)(*inputs).eqns[0])[0].eqns
    scans = [one for one in bodies(mapped)[0].eqns if one.primitive.name == "scan"]
    forward, backward = ([var.aval.shape for var in one.outvars] for one in scans)
    assert (2, 8, 2) not in forward, "parts of shards were kept"
    assert (2, 8) not in forward, "vectors were kept"
    assert (2, 8, 2) in backward, "gradients of shards were not found"
    # Of each layer its input and, except with `full`, the product; no bias added to it, and no tanh.
    assert forward.count((2, 4, 8)) == (1 if remat == "full" else 2)


@pytest.mark.parametrize("wide", [False, True])
def test_with_full_the_gradient_of_a_layers_input_waits_for_wide_ones_alone_before_they_are_sent(wide):
    run, *inputs = gradient_of_a_cut_stack("full", unrolled=True, wide=wide)
    [mapped] = bodies(jax.make_jaxpr(run)(*inputs).eqns[0])[0].eqns
    [backward] = (one for one in bodies(mapped)[0].eqns if one.primitive.name == "scan" and one.params["reverse"])
    [layer] = (one for one in bodies(backward)[0].eqns if bodies(one))
    [barrier] = (one for one in bodies(layer)[0].eqns if one.primitive.name == "optimization_barrier")
    assert [var.aval.shape for var in barrier.invars] == [(4, 8), *([(8, 8)] if wide else [])]  # the whole kernel's


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_unrolled_layers_wait_in_the_type_in_which_they_were_sent(dtype):
    run, *inputs = gradient_of_a_cut_stack("dots", unrolled=True, reduce_dtype=dtype)
    looped, *_ = gradient_of_a_cut_stack("dots", unrolled=False, reduce_dtype=dtype)
    np.testing.assert_allclose(run(*inputs), looped(*inputs), rtol=2**-8 if dtype == jnp.bfloat16 else 1e-5)
    [mapped] = bodies(jax.make_jaxpr(run)(*inputs).eqns[0])[0].eqns
    backward = [one for one in bodies(mapped)[0].eqns if one.primitive.name == "scan" and one.params["reverse"]]
    barriers = [
        one for scan in backward for one in bodies(scan)[0].eqns if one.primitive.name == "optimization_barrier"
    ]
    waiting = [var.aval.dtype for one in barriers for var in one.invars if var.aval.shape == (8, 2)]
    assert waiting == [dtype]


@pytest.mark.slow
def test_a_tensor_group_adds_up_once_forward_and_once_backward_however_many_products_there_are():
    rows, scale = NUMBERS.normal(size=(8, 6)).astype(np.float32), np.linspace(1, 2, 6, dtype=np.float32)
    gate, up = 0.2 * NUMBERS.normal(size=(2, 6, 12)).astype(np.float32)
    down = NUMBERS.normal(size=(12, 6)).astype(np.float32)

    def loss(weights, rows):
        scale, gate, up, down = weights
        x = spread(rows * scale, gate)
        return jnp.sum(jnp.square(rows + summed(jnp.tanh(x @ gate) * (x @ up) @ down)))

    specs = P(), P(None, "tensor"), P(None, "tensor"), P("tensor")
    run = jax.shard_map(
        jax.value_and_grad(loss), mesh=make_mesh(1, jax.devices()[:2], 2), in_specs=(specs, P()), out_specs=(P(), specs)
    )
    run, weights = jax.jit(run), (scale, gate, up, down)
    expected = jax.value_and_grad(loss)(weights, rows)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4), run(weights, rows), expected)
    text = run.lower(weights, rows).compile().as_text()
    assert re.findall(r"(\S+?)\{\S* all-reduce\(", text) == ["f32[8,6]"] * 2


def test_with_a_copy_at_hand_nothing_is_gathered_and_every_layers_gradient_is_cut_as_it_arises():
    graph, params = nnx.split(stack_layers(Layer, 3, nnx.Rngs(0)))
    params = nnx.to_pure_dict(params)["dense"]
    rows = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)  # the same in every test

    def loss(params, rows):
        stacked = nnx.merge(graph, {"dense": params})
        return jnp.sum(scan_layers(stacked, lambda layer, x, _: (layer(x), None), rows, remat="full")[0])

    def cut(params, rows):
        shard = Shard(params["kernel"], -1, "fsdp", jnp.float32)
        copy = shard.whole()
        return jax.grad(lambda shard: loss({**params, "kernel": shard.with_copy(copy)}, rows))(shard).part

    specs = {"kernel": P(None, None, "fsdp"), "bias": P()}
    run = on_four(cut, (specs, P("fsdp")), specs["kernel"])
    expected = jax.grad(loss)(params, rows)["kernel"]
    np.testing.assert_allclose(run(params, rows), expected, rtol=1e-5, atol=1e-5)
    text = run.lower(params, rows).compile().as_text()
    assert len(re.findall(r" all-gather\(", text)) == 1
    assert [shape.partition("{")[0] for shape in re.findall(r"(\S+) reduce-scatter\(", text)] == ["f32[8,2]"]


def test_a_stack_that_runs_otherwise_than_by_a_scan_is_refused_where_it_is_cut():
    graph, params = nnx.split(stack_layers(Layer, 3, nnx.Rngs(0)))
    params = nnx.to_pure_dict(params)["dense"]
    shard = Shard(params["kernel"], -1, "fsdp", jnp.float32, kind=ParamKind(gathering=Gathering.BY_LAYER))
    stacked = nnx.merge(graph, {"dense": {**params, "kernel": shard}})
    with pytest.raises(TypeError, match="made runs only by scan_layers"):
        stacked(jnp.ones((2, 8)))
    with pytest.raises(TypeError, match="made runs only by scan_layers"):
        jnp.sum(stacked.dense.kernel.get_value())


@pytest.mark.parametrize("size", [2, 8])
def test_layers_that_are_shared_out_become_parts_of_every_layer(size):
    """In each layer 3 x `size` entries, of which four devices get 2 (the last one none) or 6."""
    stack = NUMBERS.normal(size=(8, 3, size)).astype(np.float32)
    weights = NUMBERS.normal(size=(4, 8, 3, size)).astype(np.float32)

    def value(part, weight):
        shard = Shard(part, -3, "fsdp", jnp.float32).of_every_layer()
        layers = [jax.tree.map(lambda x, index=index: x[index], shard).whole() for index in range(8)]
        return jnp.sum(jnp.stack(layers) * weight[0]), jnp.stack(layers)

    run = on_four(jax.grad(value, has_aux=True), (P("fsdp"), P("fsdp")), (P("fsdp"), P("fsdp")))
    gradient, layers = run(stack, weights)
    np.testing.assert_array_equal(layers, np.concatenate([stack] * 4))
    np.testing.assert_allclose(gradient, weights.sum(0), rtol=1e-6, atol=1e-6)


def test_entries_of_a_shard_are_its_first_axis_with_their_copies_unless_that_axis_is_cut():
    array = jnp.arange(24.0).reshape(2, 3, 4)
    shard = functools.partial(Shard, axis="fsdp", dtype=jnp.float32, kind=ParamKind(by_entry=True))
    first, second = shard(array, -1).with_copy(10 * array).entries or ()
    for index, entry in enumerate((first, second)):
        np.testing.assert_array_equal(entry.part, array[index])
        np.testing.assert_array_equal(entry.copy, 10 * array[index])
        assert entry.dim == -1
    assert shard(array, -3).entries is None
    assert shard(array.reshape(2, 12), -1, layer=(2, 12, 8)).entries is None
    assert [entry.copy for entry in shard(array, -2).entries or ()] == [None, None]
    assert shard(array, -1, kind=ParamKind()).entries is None, "products read it whole"


def test_what_is_no_shard_stays_as_it_is():
    tree = {"a": np.ones(2), "b": [1, None]}
    assert whole(tree)["a"] is tree["a"]
