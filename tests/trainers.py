"""The trainer and state layout of a test's model."""

from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.training.init import lay_out
from openpi_train.training.step import Trainer


def make_trainer(config, plan, optimizer, schedule, *, objective=None, seed=7, accum=1, ema=0.9, scaling=None):
    """`config` (with its own `frozen`) trained under `plan`; `optimizer` and `schedule` as experiments have them."""
    schedule = schedule.create()
    rule = optimizer.create(schedule)
    layout = lay_out(config, rule, config.frozen, ema is not None, plan, scaling)
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
