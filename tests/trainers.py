"""The trainer and state layout of a test's model, and what is measured of it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.interface import OpenedData
from openpi_train.evaluation.action_error import ActionError
from openpi_train.evaluation.measure import EvaluationContext, Evaluations
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.training.evaluate import Evaluator
from openpi_train.training.init import lay_out
from openpi_train.training.step import Trainer


def make_trainer(config, plan, optimizer, schedule, *, objective=None, seed=7, accum=1, ema=0.9, scaling=None):
    """`config` (with its own `frozen`) trained under `plan`; `optimizer` and `schedule` as experiments have them."""
    schedule = schedule.create()
    rule = optimizer.create(schedule)
    layout = lay_out(config, rule, config.param_rules.frozen, ema is not None, plan, scaling)
    trainer = Trainer(
        graphdef=layout.graphdef,
        model=config,
        objective=objective or FlowMatching(augment=False),
        optimizer=rule,
        schedule=schedule,
        plan=plan,
        seed=seed,
        grad_accum=accum,
        ema_decay=ema,
        loss_scaling=scaling,
    )
    return trainer, layout


class NoData(OpenedData):
    """Data of which nothing is asked."""

    def feed(self, **_):
        raise AssertionError("there is no feed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors(Evaluations):
    """Action errors of the held-out rows, and of these training rows."""

    num_sample_steps: int
    mean_action: np.ndarray
    train_batches: Any = ()

    def measures(self, running):
        if "sample" not in running.trainer.model.provides:
            return []
        return [ActionError(running, self.num_sample_steps, self.mean_action, self.train_batches)]


def running_of(trainer, held_out):
    """A run of which no more is known than its trainer and its held-out batches."""
    return EvaluationContext(
        trainer=trainer,
        data=NoData(num_samples=0),
        held_out=list(held_out),
        batch_size=4,
        num_train_steps=1,
        directory=Path("nowhere"),
    )


def make_evaluator(trainer, held_out, num_sample_steps, train_batches=(), mean_action=0.0):
    """What runs with these held-out batches measure, whose training actions have this mean."""
    mean = np.asarray(mean_action)
    errors = Errors(num_sample_steps=num_sample_steps, mean_action=mean, train_batches=train_batches)
    return Evaluator(running_of(trainer, held_out), errors)
