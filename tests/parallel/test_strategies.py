"""Every strategy gives the loss of the uncut state, holds what the plan says, and sends what the formula says."""

import collections
import dataclasses
import functools
import json
from pathlib import Path

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
import toy
from flax import nnx

from openpi_train import cli
from openpi_train.launch.processes import free_port
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.layers import scan_layers, stack_layers
from openpi_train.parallel.mesh import FSDP, REPLICA, make_mesh
from openpi_train.parallel.params import ParamKind, ParamUse, merge_module, module_params, use_params
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.jaxprs import bodies
from openpi_train.planning.memory import bytes_per_device, predict
from openpi_train.planning.traffic import as_asked, collectives, formula_by_axes, formula_bytes
from openpi_train.training import prepare

pytestmark = pytest.mark.slow

PROGRAM = Path(strategies.__file__)


@pytest.fixture(scope="module")
def alone():
    """Losses, gradient norms and state on one device."""
    return strategies.run(toy.StackedConfig(), "replicated", 1, 1, jax.devices()[:1])


def together(processes: int, folder: Path | None = None) -> dict[str, list]:
    """Losses and gradient norms of all cases on eight devices, by so many processes; one may write the parameters."""
    port, more = free_port(), [folder] if folder else []
    running = [forks.Script(PROGRAM, process, processes, port, *more) for process in range(processes)]
    outputs = [process.communicate(timeout=400)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes, "\n".join(outputs)
    (found,) = (line for line in outputs[0].splitlines() if line.startswith("{"))
    return json.loads(found)


@pytest.fixture(scope="module")
def one_of_eight(tmp_path_factory):
    """What one process with eight devices says of all cases, and the folder with its last parameters."""
    folder = tmp_path_factory.mktemp("parameters")
    return together(1, folder), folder


@pytest.mark.parametrize(("layout", "accum"), strategies.CASES, ids=str)
def test_losses_and_parameters_are_those_of_one_device(alone, one_of_eight, layout, accum):
    found, folder = one_of_eight
    name = strategies.name_of(layout, accum)
    np.testing.assert_allclose(found[name], alone[0], rtol=3e-6)
    with np.load(folder / f"{name}.npz") as params:
        assert {*params} == {*alone[1].params}
        for path, leaf in alone[1].params.items():
            # Adam divides by the root of the second moment: rounding of a tiny gradient grows to this.
            np.testing.assert_allclose(params[path], leaf, rtol=1e-5, atol=2e-6, err_msg=path)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_of_four_devices_give_the_bits_of_one_of_eight(one_of_eight):
    """More processes: `runs/test_many_processes.py`."""
    found = together(2)
    # Every layout, with one batch and four in turn: each process compiles all that it runs.
    assert {name.split(" x ")[0] for name in found} == {strategy for strategy, _ in strategies.LAYOUTS}
    assert {name.split(" x ")[1] for name in found} == {"1", "4"}
    assert found == {name: one_of_eight[0][name] for name in found}


@functools.cache
def one_step_of_eight(config):
    """Loss and gradient norm of the uncut state's first step on eight devices."""
    return strategies.run(config, "replicated", 1, 1, steps=1)[0]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("width", [4, 5])
def test_a_stack_that_is_cut_by_layers_is_gathered_layer_by_layer_all_the_same(strategy, width):
    """More layers than any of its dims; 5 x 5 entries are not a multiple of the devices."""
    deep = toy.StackedConfig(width=width, depth=16)
    # On as many devices: sixteen layers of width 4 make 5e-5 in the gradient's norm of how one and eight round.
    expected = one_step_of_eight(deep)
    history, state, step = strategies.run(deep, strategy, 8, 1, steps=1)
    assert state.params["layers/dense/kernel"].addressable_shards[0].data.shape == (2, width, width)
    np.testing.assert_allclose(history, expected, rtol=3e-6)
    is_whole_somewhere = f"f32[16,{width},{width}]" in step.as_text()
    assert is_whole_somewhere == (strategy == "zero2")  # whose copy is


WIDE = toy.StackedConfig(width=128, vocab_size=256, dtype="bfloat16")


@functools.cache
def compiled(layout: tuple[str, int], accum: int, config: toy.StackedConfig, sums: str = "float32"):
    """The step for a wider toy, compiled and as traced, its trainer and state layout."""
    trainer, state = strategies.prepare(config, *layout, accum, sums=sums)
    with jax.set_mesh(trainer.plan.real_mesh):
        traced = trainer.jitted_step(state.shardings).trace(
            state.abstract(), config.rows.batch_spec(strategies.ROWS, ())
        )
        return traced.lower().compile(), traced.jaxpr, trainer, state


def expected_bytes(plan, params, accum):
    """The formula's bytes; but of a token table that is cut, what is sent are rows, each way in float32, and tokens."""
    table, shards = "token_embedding", plan.mesh.shape[FSDP]
    if FSDP not in plan.spec("state", params[table], table):
        return formula_bytes(plan, params, 2, accum)
    others = {path: leaf for path, leaf in params.items() if path != table}
    tokens = 2 * strategies.ROWS * shards / plan.mesh.size  # of the devices that share the table
    rows = (shards - 1) / shards * tokens * (4 + 2 * 4 * WIDE.width)
    summed = formula_by_axes(plan, {table: params[table]}, 2, accum)[(REPLICA,)]  # its gradient, cut, over the copies
    return formula_bytes(plan, others, 2, accum) + rows + summed


@pytest.mark.parametrize(("layout", "accum"), strategies.CASES, ids=str)
def test_a_step_sends_no_more_than_the_formula_and_a_device_holds_what_the_plan_says(layout, accum):
    step, jaxpr, trainer, state = compiled(layout, accum, WIDE)
    sent = sum(one.sent_bytes for one in as_asked(collectives(step.as_text(), 8), jaxpr))
    expected = expected_bytes(trainer.plan, state.shapes.params, accum)
    # On top come a few sums, and two bytes for each of 2,300 numbers in vectors and in what is no layer's, which are
    # gathered in float32: 1.3 % where least is sent.
    assert expected <= sent < 1.015 * expected
    assert sent < 1.05 * formula_bytes(trainer.plan, state.shapes.params, 2, accum)
    rows = bytes_per_device(WIDE.rows.batch_spec(strategies.ROWS, ()), trainer.plan.batch)
    planned = predict(state, trainer.plan).state
    assert step.memory_analysis().argument_size_in_bytes == pytest.approx(planned + rows, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "accum"), [(("replicated", 8), 1), (("zero1", 8), 4), (("zero3", 8), 4), (("hsdp", 4), 1)], ids=str
)
def test_gradients_in_bfloat16_send_what_the_formula_says(layout, accum):
    step, jaxpr, trainer, state = compiled(layout, accum, WIDE, "bfloat16")
    sent = sum(one.sent_bytes for one in as_asked(collectives(step.as_text(), 8), jaxpr))
    expected = expected_bytes(trainer.plan, state.shapes.params, accum)
    assert expected <= sent < 1.02 * expected
    assert expected < 0.8 * expected_bytes(compiled(layout, accum, WIDE)[2].plan, state.shapes.params, accum)


class Pair(nnx.Module):
    """A weight of which products read one entry at a time, and a vector."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones((2, 16, 32)), kind=ParamKind(by_entry=True))
        self.bias = nnx.Param(jnp.ones(32))


class Scaled(nnx.Module):
    """The sum of all its weights: a stack's, a plain matrix's, a vector's, for a row times its value."""

    def __init__(self, rngs):
        self.layers = stack_layers(lambda _: Pair(), 3, rngs)
        self.matrix, self.vector = nnx.Param(jnp.ones((16, 8))), nnx.Param(jnp.ones(8))

    def loss(self, values):
        value = values.sum()

        def body(layer, total, _):
            entries = layer.weight.get_value()
            return total + sum((entry * value).sum() for entry in (entries[0], entries[1], layer.bias[...])), None

        total, _ = scan_layers(self.layers, body, jnp.zeros_like(value), remat="full")
        return total + value * (self.matrix[...].sum() + self.vector[...].sum())


def gradient_of_scaled(plan, dtype, accum=1, *, unrolled):
    """A function of eight devices' rows, and its trainable arguments."""
    graph, state = nnx.split(Scaled(nnx.Rngs(0)))
    params = module_params(nnx.merge(graph, state))
    devices = Devices(plan, jnp.dtype(dtype), graph, unrolled)

    def share(params, values, _):
        module = merge_module(graph, params)
        use_params(module, ParamUse(unrolled=unrolled))
        return module.loss(values), {}

    def run(params, values):
        return devices.gradient(share, params, {}, values, None, accum)[0]

    return jax.jit(run, in_shardings=(plan.tree("state", params), plan.batch)), params


@pytest.mark.parametrize("sums", ["float32", "bfloat16"])
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize(("layout", "accum"), strategies.SOME, ids=str)
def test_a_device_sends_its_gradients_in_the_type_of_the_plan(layout, accum, unrolled, sums):
    """Each of eight devices has the gradient 1 + 2**-12, which is 1 in bfloat16; in micro-batches, a quarter of it."""
    strategy, fsdp = layout
    plan = Plan(mesh=make_mesh(fsdp, jax.devices()[:8]), strategy=strategy, min_shard_mib=0, reduce_dtype=sums)
    # Gradients of what is gathered in bfloat16 before the step are bfloat16, too.
    dtype = "bfloat16" if plan.cuts("copy") else "float32"
    run, params = gradient_of_scaled(plan, dtype, accum, unrolled=unrolled)
    with jax.set_mesh(plan.real_mesh):
        found = run(params, np.full(8 * accum, (1 + 2.0**-12) / accum, np.float32))
    assert len(found) == 4
    for path, gradient in found.items():
        assert gradient.dtype == jnp.float32
        np.testing.assert_array_equal(gradient, 8.0 if sums == "bfloat16" else 8.0 * (1 + 2.0**-12), err_msg=path)


@pytest.mark.parametrize("layout", [("zero1", 8), ("zero2", 8), ("zero3", 8), ("hsdp", 4)], ids=str)
def test_gradients_in_bfloat16_have_its_range_where_layers_compute_in_float16(layout):
    strategy, fsdp = layout
    plan = Plan(mesh=make_mesh(fsdp, jax.devices()[:8]), strategy=strategy, min_shard_mib=0, reduce_dtype="bfloat16")
    run, params = gradient_of_scaled(plan, "float16", unrolled=True)
    with jax.set_mesh(plan.real_mesh):
        found = run(params, np.full(8, 2.0**17, np.float32))
    for path, gradient in found.items():
        np.testing.assert_array_equal(gradient, 2.0**20, err_msg=path)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_unrolled_layers_gather_each_entry_that_products_read_by_itself(strategy):
    """Otherwise each is copied out of what was gathered: 4 ms of full pi0's step on 8 H100."""
    plan = Plan(mesh=make_mesh(8, jax.devices()[:8]), strategy=strategy, min_shard_mib=0)
    run, params = gradient_of_scaled(plan, "bfloat16", unrolled=True)
    with jax.set_mesh(plan.real_mesh):
        jaxpr = run.trace(params, jax.ShapeDtypeStruct((8,), jnp.float32)).jaxpr.jaxpr
    gathered = {
        equation.outvars[0].aval.shape for equation in equations(jaxpr) if equation.primitive.name == "all_gather"
    }
    assert (16, 32) in gathered and (2, 16, 32) not in gathered


@pytest.mark.parametrize(
    ("layout", "accum"),
    [(("zero1", 8), 1), (("zero1", 8), 4), (("zero2", 8), 1), (("zero3", 8), 4), (("hsdp", 4), 1)],
    ids=str,
)
def test_unrolled_layers_give_the_losses_of_one_device(alone, layout, accum):
    """What GPUs then send, `tools/test_gpu_step.py` counts: XLA for CPUs keeps what was gathered."""
    history, *_ = strategies.run(toy.StackedConfig(remat="dots"), *layout, accum, unrolled=True)
    np.testing.assert_allclose(history, alone[0], rtol=3e-6)


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_step_unrolls_its_layers_if_that_is_asked(unrolled):
    assert ("unroll=6" in str(traced_unrolled("zero3", unrolled=unrolled))) == unrolled


def traced_unrolled(strategy, accum=1, *, unrolled=True):
    config = toy.StackedConfig(remat="dots", depth=7)
    trainer, state = strategies.prepare(config, strategy, 8, accum, unrolled=unrolled)
    with jax.set_mesh(trainer.plan.real_mesh):
        batch = config.rows.batch_spec(strategies.ROWS, ())
        return trainer.jitted_step(state.shardings).trace(state.abstract(), batch).jaxpr.jaxpr


def equations(jaxpr):
    """All equations of a traced program, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        for body in bodies(equation):
            yield from equations(body)


def sent_in_layers(jaxpr, *, reverse):
    """The number of gathers, and of gradients summed over the devices, in a layer of the forward or backward pass."""
    layers = [
        one
        for one in equations(jaxpr)
        if one.primitive.name == "scan" and one.params["length"] == 6 and one.params["reverse"] == reverse
    ]
    inside = (one for layer in layers for body in bodies(layer) for one in equations(body))
    counts = collections.Counter(one.primitive.name for one in inside)
    return counts["all_gather"], counts["reduce_scatter"]


@pytest.mark.parametrize(
    ("strategy", "accum", "forward", "backward"),
    [
        ("zero1", 1, (4, 0), (0, 4)),  # a layer has four parameters
        ("zero2", 1, (4, 0), (0, 4)),
        ("zero3", 1, (4, 0), (4, 4)),
        ("zero1", 2, (0, 0), (0, 0)),
        ("zero2", 2, (0, 0), (0, 4)),
    ],
)
def test_unrolled_layers_are_gathered_when_they_run_and_kept_where_parameters_are_whole(
    strategy, accum, forward, backward
):
    jaxpr = traced_unrolled(strategy, accum)
    assert sent_in_layers(jaxpr, reverse=False) == forward
    assert sent_in_layers(jaxpr, reverse=True) == backward


@pytest.mark.parametrize("unrolled", [False, True])
def test_sums_of_different_unrolled_layers_are_not_joined(monkeypatch, unrolled):
    asked = []
    monkeypatch.setattr(jax, "jit", lambda function, **options: asked.append(options["compiler_options"]))
    trainer, state = strategies.prepare(toy.StackedConfig(), "zero3", 8, 1, unrolled=unrolled)
    trainer.jitted_step(state.shardings)
    assert asked == [{"xla_gpu_reduce_scatter_combine_threshold_bytes": 0} if unrolled else None]


def test_an_experiment_tells_its_step_to_unroll():
    experiment = cli.parse_experiment("debug", ["--exp-name", "x", "--unroll-layers", "True"])
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    trainer = prepare.make_trainer(experiment, prepare.whole_layout(experiment, plan), plan)
    assert trainer.use.unrolled


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_stack_and_a_table_of_any_name_are_sent_and_planned_like_those_of_the_usual_names(strategy):
    usual, renamed = (
        compiled((strategy, 8), 4, config)
        for config in (WIDE, dataclasses.replace(WIDE, stack="blocks", table="words"))
    )
    assert "blocks/dense/kernel" in renamed[3].shapes.params
    sent = [
        sorted((one.kind, sorted(one.arrays), one.times) for one in as_asked(collectives(step.as_text(), 8), jaxpr))
        for step, jaxpr, *_ in (usual, renamed)
    ]
    assert sent[0] == sent[1]
    held = [step.memory_analysis().temp_size_in_bytes for step, *_ in (usual, renamed)]
    assert held[1] == pytest.approx(held[0], rel=0.01)  # buffers are placed in the order of the names
    planned = [predict(state, trainer.plan, num_micros=4) for *_, trainer, state in (usual, renamed)]
    assert planned[0] == planned[1]


def test_a_stack_and_a_table_of_any_name_give_the_losses_of_one_device(alone):
    found, *_ = strategies.run(toy.StackedConfig(stack="blocks", table="words"), "zero3", 8, 4)
    np.testing.assert_allclose(found, alone[0], rtol=3e-6)


class Listed(toy.LinearPolicy):
    """Its `layers` are modules in a list, and no stack."""

    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.layers = nnx.List([nnx.Linear(config.action_dim, config.action_dim, rngs=rngs) for _ in range(2)])

    def velocity(self, observation, noisy_actions, time):
        for layer in self.layers:
            noisy_actions = noisy_actions + jnp.tanh(layer(noisy_actions))
        return super().velocity(observation, noisy_actions, time)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedConfig(toy.LinearConfig):
    def build(self, rngs):
        return Listed(self, rngs)


def test_modules_in_a_list_called_layers_are_no_stack_and_whole_before_they_run():
    config = ListedConfig(action_dim=8)
    expected = strategies.run(config, "replicated", 1, 1)[0]
    found, state, _ = strategies.run(config, "zero3", 8, 1)
    assert state.params["layers/0/kernel"].addressable_shards[0].data.shape == (8, 1)
    np.testing.assert_allclose(found, expected, rtol=3e-6)


def test_bytes_of_each_kind_of_collective_and_loop_are_counted():
    text = """
HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = bf16[4,8]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %r = f32[2]{0} reduce-scatter(%y), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
%cond (p: (s32[], f32[8])) -> pred[] {
  ROOT %c = pred[] constant(true)
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %a = (f32[10]{0}, s32[]) all-reduce(%u, %v), replica_groups=mesh['x'=2,'y'=4] {'x'}, to_apply=%add
}
"""
    found = collectives(text, 8)
    assert [(one.kind, one.group_size, one.times) for one in found] == [
        ("all-gather", 4, 3),
        ("reduce-scatter", 4, 3),
        ("all-reduce", 2, 1),
    ]
    assert [one.sent_bytes for one in found] == [3 * 64 * 3 / 4, 3 * 8 * 3, 2 * 44 / 2]


def test_what_starts_an_asynchronous_collective_counts_as_what_comes_out_of_it():
    text = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %h = ((f32[2]{0}, bf16[4]{0}), (f32[8]{0}, bf16[16]{0})) all-gather-start(%x, %y), replica_groups=[2,4]<=[8]
  %a = f32[10]{0} all-reduce-start(%u), replica_groups=[2,4]<=[8], to_apply=%add
  %b = (f32[10]{0}, f32[4]{0}) all-reduce-start(%u, %z), replica_groups=[2,4]<=[8], to_apply=%add
  %c = ((f32[10]{0}), f32[10]{0}) all-reduce-start(%u), replica_groups=[2,4]<=[8], to_apply=%add
  %p = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%v), source_target_pairs={{0,1},{1,0}}
}
"""
    assert [one.sent_bytes for one in collectives(text, 8)] == [
        24,
        48,
        2 * 40 * 3 / 4,
        2 * 56 * 3 / 4,
        2 * 40 * 3 / 4,
        24,
    ]


def test_a_loop_of_unknown_length_is_refused():
    text = """
%body (p: f32[8]) -> f32[8] {
  %g = f32[8]{0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %w = f32[8] while(%t), condition=%cond, body=%body
}
"""
    with pytest.raises(ValueError, match="how often the loop"):
        collectives(text, 8)
