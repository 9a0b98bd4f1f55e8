"""A diffusion policy that devices share, `robot_dp_tiny` with a UNet of one level: its compiled step and its plan."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from openpi_train_configs.robot_dp import robot_dp_tiny_14

from openpi_train.models.diffusion_policy.denoisers import UnetSizes
from openpi_train.parallel.mesh import FSDP
from openpi_train.parallel.strategy import ShardingConfig
from openpi_train.planning.forecast import Machine
from openpi_train.planning.jaxprs import bodies
from openpi_train.planning.traffic import as_asked, collectives
from openpi_train.runtime.device_kinds import GIB, UNKNOWN
from openpi_train.tools import compiled_memory, plan

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
    prepared = compiled_memory.prepared_for_cpus(report.experiment, report.recommended)
    trainer, layout = prepared.trainer, prepared.layout
    with jax.set_mesh(trainer.plan.real_mesh):
        traced = trainer.jitted_step(layout.shardings).trace(layout.abstract(), experiment.batch_spec(ROWS))
        compiled = traced.lower().compile(compiler_options=compiled_memory._AS_ON_GPUS)
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


def test_the_compiled_step_sends_what_the_plan_says(shared):
    forecast, _, jaxpr, compiled = shared
    sent = sum(one.sent_bytes for one in as_asked(collectives(compiled.as_text(), DEVICES), jaxpr))
    # Besides, the loss and the gradient's norm are summed.
    assert sum(flow.within for flow in forecast.flows) == pytest.approx(sent, rel=1e-3)
