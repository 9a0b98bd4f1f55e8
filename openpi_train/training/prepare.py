"""What a run's strategies and policies cost, from its traced step; and its state's shapes and its `Trainer`.

Nothing is allocated. Read next: `settling.py`, which chooses by it; `planning/costs.py`, `planning/choose.py`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import optax
from jax.extend.core import Jaxpr

from openpi_train.experiment import Experiment
from openpi_train.optim import LossScaling
from openpi_train.parallel.params import ParamUse
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.choose import layout_cost, layouts, planned
from openpi_train.planning.costs import ROWS, RematCost, cost
from openpi_train.planning.forecast import Forecast, LayoutCost, Machine, forecast, is_settled
from openpi_train.planning.rollout_cost import RolloutCost
from openpi_train.training.init import StateLayout, lay_out
from openpi_train.training.step import Trainer
from openpi_train.training.traced_rl import rollout_cost
from openpi_train.types import Batch

# From a number of rows to the batch's shapes, as a tree of `jax.ShapeDtypeStruct`.
BatchSpec = Callable[[int], Any]


def whole_layout(experiment: Experiment, whole: Plan) -> StateLayout:
    """The run's state under `whole`, a plan that shards nothing."""
    optimizer, has_ema = experiment.optimizer.create(_schedule(experiment)), experiment.ema_decay is not None
    return lay_out(experiment.model, optimizer, experiment.is_frozen, has_ema, whole, _loss_scaling(experiment))


def make_trainer(experiment: Experiment, layout: StateLayout, plan: Plan) -> Trainer:
    """The run's step under `plan`. `--unroll-layers auto` is settled before (`settling.py`), and else a loop."""
    schedule = _schedule(experiment)
    return Trainer(
        graphdef=layout.graphdef,
        model=experiment.model,
        objective=experiment.objective,
        optimizer=experiment.optimizer.create(schedule),
        schedule=schedule,
        plan=plan,
        seed=experiment.seed,
        grad_accum=experiment.grad_accum,
        use=ParamUse(unrolled=experiment.unroll_layers is True),
        ema_decay=experiment.ema_decay,
        ema_warmup=experiment.ema_warmup,
        loss_scaling=_loss_scaling(experiment),
    )


def _schedule(experiment: Experiment) -> optax.Schedule:
    return experiment.lr_schedule.over(experiment.num_train_steps).create()


def _loss_scaling(experiment: Experiment) -> LossScaling | None:
    return experiment.loss_scaling if experiment.model.compute.needs_loss_scale else None


def forecasts(
    experiment: Experiment,
    layout: StateLayout,
    machine: Machine,
    accumulations: list[int],
    batch_spec: BatchSpec | None = None,
    *,
    of_all_policies: bool = True,
) -> list[Forecast]:
    """Forecasts for every strategy and rematerialisation policy that the flags allow, of what `on_kind` has made of
    the experiment for this machine.

    Unless `of_all_policies`, for the policy that recomputes least alone where each of its steps is small.
    """
    rl = traced_rl(experiment, layout, batch_spec)
    costs = layout_costs(experiment, layout, machine, rl)

    def with_policies(policies: Iterable[RematCost]) -> list[list[Forecast]]:
        return [
            [forecast(machine, cost, policy, experiment.batch_size, accumulations) for cost in costs]
            for policy in policies
        ]

    policies = policy_costs(experiment, layout, batch_spec)
    found = with_policies([next(policies)])
    if of_all_policies or not is_settled(found[0]):
        found += with_policies(policies)
    return [one for of_layout in zip(*found, strict=True) for one in of_layout]


def layout_costs(
    experiment: Experiment, layout: StateLayout, machine: Machine, rl: RolloutCost | None = None
) -> list[LayoutCost]:
    """The cost of the state per device, and of own rollouts, under every strategy that the flags allow."""
    open_strategies = layouts(experiment, machine.num_devices, machine.devices_per_host)
    return [layout_cost(experiment, layout, *one, machine, rl) for one in open_strategies]


def traced_rl(experiment: Experiment, state: StateLayout, batch_spec: BatchSpec | None = None) -> RolloutCost | None:
    """What own rollouts cost; None if the run makes none."""
    if experiment.rl is None:
        return None
    # Nothing is kept for a backward pass.
    one = dataclasses.replace(next(iter(experiment.remat_choices().values())), grad_accum=1)
    whole = planned(one, "replicated", 1, one.sharding.tensor_devices)
    trainer = make_trainer(one, state.of(one.model), whole)
    batch = batch_spec(ROWS) if batch_spec else one.batch_spec(ROWS)
    return rollout_cost(one, trainer, {**state.shapes.frozen, **state.shapes.params}, batch)


def policy_costs(
    experiment: Experiment, state: StateLayout, batch_spec: BatchSpec | None = None
) -> Iterator[RematCost]:
    """The cost of a row under each allowed rematerialisation policy, least recomputation first."""
    for name, one in experiment.remat_choices().items():
        yield cost(name, traced_gradient(one, state, batch_spec), one.model.compute.dtype)


def traced_gradient(experiment: Experiment, state: StateLayout, batch_spec: BatchSpec | None = None) -> Jaxpr:
    """Loss and gradient of one micro-batch of `ROWS` rows, for `state` or for that of another policy, as one device or
    one tensor group computes them: a jaxpr. Unrolled layers store what gathered ones do, in which XLA keeps no more
    than that of others either."""
    whole = planned(experiment, "replicated", 1, experiment.sharding.tensor_devices)
    one = dataclasses.replace(experiment, grad_accum=1)
    batch = batch_spec(ROWS) if batch_spec else experiment.batch_spec(ROWS)
    trainer = make_trainer(one, state.of(experiment.model), whole)
    trainer = dataclasses.replace(trainer, use=dataclasses.replace(trainer.use, as_gathered=trainer.use.unrolled))

    def gradient(state: TrainState, batch: Batch) -> Any:
        return trainer.accumulate(state, batch, trainer.objective.norms(batch))

    return jax.make_jaxpr(gradient)(state.shapes, batch).jaxpr
