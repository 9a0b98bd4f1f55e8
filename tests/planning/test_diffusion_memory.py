"""A diffusion policy that devices share, `robot_dp_tiny` with a UNet of one level: its compiled step and its plan."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from openpi_train_configs.robot_dp import robot_dp_tiny_14

from openpi_train.models.denoisers import UnetSizes
from openpi_train.parallel.mesh import FSDP, planned_mesh
from openpi_train.parallel.strategy import Plan, ShardingConfig
from openpi_train.planning.costs import cost, gpu_activation_bytes
from openpi_train.planning.forecast import Machine
from openpi_train.planning.jaxprs import bodies
from openpi_train.planning.memory import CUBLAS_BYTES, predict
from openpi_train.planning.traffic import as_asked, collectives
from openpi_train.runtime.device_kinds import GIB, UNKNOWN
from openpi_train.tools import ahead, plan
from openpi_train.training import prepare

pytestmark = pytest.mark.slow

DEVICES, ROWS = 8, 1024  # as many rows as make activations most of it, as in robot_dp_14
MACHINE = Machine(kind=UNKNOWN, num_devices=DEVICES, num_hosts=1, available_bytes=GIB)


@pytest.fixture(scope="module")
def shared():
    """The forecast under zero3, the shapes of what is cut, the step as traced and as `plan` has it compiled."""
    sharding = ShardingConfig(strategy="zero3", min_shard_mib=0)
    model = dataclasses.replace(robot_dp_tiny_14.model, unet=UnetSizes(widths=(64,)))
    experiment = dataclasses.replace(robot_dp_tiny_14, exp_name="plan", model=model, batch_size=ROWS, sharding=sharding)
    report = plan.make_report(experiment, MACHINE)
    assert report.recommended is not None
    prepared = ahead.prepared_for_cpus(report.experiment, report.recommended)
    trainer, layout = prepared.trainer, prepared.layout
    with jax.set_mesh(trainer.plan.real_mesh):
        traced = trainer.jitted_step(layout.shardings).trace(layout.abstract(), experiment.batch_spec(ROWS))
        compiled = traced.lower().compile(compiler_options=ahead._AS_ON_GPUS)
    params = layout.shapes.params
    cut = [leaf.shape for path, leaf in params.items() if FSDP in trainer.plan.spec("state", leaf, path)]
    return report.recommended, cut, traced.jaxpr.jaxpr, compiled


def gathers(jaxpr: Any, depth: int = 0) -> Iterator[tuple[tuple[int, ...], str, int]]:
    """Shape and type of everything that is gathered, and in how many loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "all_gather":
            yield equation.outvars[0].aval.shape, str(equation.outvars[0].aval.dtype), depth
        for body in bodies(equation):
            yield from gathers(body, depth + (equation.primitive.name in ("scan", "while")))


def test_zero3_gathers_all_parameters_at_once_and_the_plan_counts_them_so(shared):
    forecast, cut, jaxpr, _ = shared
    assert sorted(gathers(jaxpr)) == sorted((shape, "float32", 0) for shape in cut)
    assert forecast.memory.compute_copy == sum(4 * int(np.prod(shape)) for shape in cut)
    assert forecast.memory.layer == 0 and len(cut) > 20


def test_gpus_copy_kernels_and_gather_float32():
    whole, over = (Plan(mesh=planned_mesh(n, n), strategy="zero1", min_shard_mib=0) for n in (1, DEVICES))
    layout = prepare.whole_layout(robot_dp_tiny_14, whole)
    sizes = {path: 4 * leaf.size for path, leaf in layout.shapes.params.items()}
    kernels = sum(4 * leaf.size for leaf in layout.shapes.params.values() if leaf.ndim > 2)
    wide, narrow = (predict(layout.under(whole), whole, 0, 0, dtype=dtype) for dtype in (np.float32, jnp.bfloat16))
    assert wide.compute_copy == 0 and narrow.compute_copy == sum(sizes.values()) / 2
    first, last = (
        predict(layout.under(whole), whole, 0, 0, dtype=np.float32, on_gpus=True, later=later) for later in (sizes, ())
    )
    # A kernel is there twice until its gradient is made.
    assert (first.compute_copy, first.grads, first.libraries) == (kernels, 0, CUBLAS_BYTES)
    assert (last.compute_copy, last.grads) == (0, sum(sizes.values()))
    of_half = predict(layout.under(over), over, 0, 0, dtype=jnp.bfloat16, on_gpus=True)
    uncut = [path for path, leaf in layout.shapes.params.items() if FSDP not in over.spec("state", leaf, path)]
    assert of_half.compute_copy == sum(sizes.values()) - sum(sizes[path] for path in uncut) / 2
    # What is gathered arrives as the convolutions read it, and is gone when none reads it any more.
    first, read = (
        predict(layout.under(over), over, 0, 0, dtype=np.float32, on_gpus=True, later=sizes, unread=paths)
        for paths in ((), sizes)
    )
    cut = set(sizes) - set(uncut)
    uncut_kernels = {path for path in uncut if layout.shapes.params[path].ndim > 2}
    assert first.compute_copy == sum(sizes[path] for path in cut | uncut_kernels)
    assert read.compute_copy == 0


def test_what_is_gathered_at_once_is_there_until_the_last_of_it_is_read():
    whole = Plan(mesh=planned_mesh(1, 1), strategy="replicated", min_shard_mib=0)
    layout = prepare.whole_layout(robot_dp_tiny_14, whole)
    gradient = prepare.traced_gradient(robot_dp_tiny_14, layout)
    matrices = {path for path, leaf in layout.shapes.params.items() if leaf.ndim > 1}
    assert [set(group.values()) for group in gradient.groups] == [matrices]
    of_gpus = cost(None, gradient, functools.partial(gpu_activation_bytes, sends=True))
    assert {one.unread for one in of_gpus.moments} == {frozenset(), frozenset(matrices)}


def test_the_compiled_step_needs_the_memory_of_the_forecast_to_a_tenth(shared):
    forecast, *_, compiled = shared
    memory = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert forecast.memory.total == pytest.approx(needed, rel=0.1)


def test_the_compiled_step_sends_what_the_plan_says(shared):
    forecast, _, jaxpr, compiled = shared
    sent = sum(one.sent_bytes for one in as_asked(collectives(compiled.as_text(), DEVICES), jaxpr))
    # Besides, the loss and the gradient's norm are summed.
    assert sum(flow.within for flow in forecast.flows) == pytest.approx(sent, rel=1e-3)
