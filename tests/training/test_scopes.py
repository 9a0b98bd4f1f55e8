"""A profile tells the parts of a step by name, and the names cost nothing."""

import re

import jax
import pytest
from jax._src.source_info_util import ExtendNameStackContextManager

from openpi_train import registry
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.training.init import lay_out
from openpi_train.training.step import Trainer

SCOPES = {"gradient", "optimizer", "ema", "loss", "noise", "augment"}
SCOPES |= {"siglip", "patches", "gemma", "embed", "embed_suffix", "attention", "rotary", "mlp", "action_head"}
SCOPES |= {"gather", "reduce", "gather_rows"}


def lowered():
    """The `debug` experiment's step under zero3 on two devices, before the compiler."""
    experiment = registry.load("debug")
    plan = Plan(mesh=make_mesh(2, jax.devices()[:2]), strategy="zero3", min_shard_mib=0)
    schedule = LRSchedule().create()
    optimizer = AdamW().create(schedule)
    layout = lay_out(experiment.model, optimizer, experiment.is_frozen, True, plan)
    trainer = Trainer(
        graphdef=layout.graphdef,
        model=experiment.model,
        objective=experiment.objective,
        optimizer=optimizer,
        schedule=schedule,
        plan=plan,
        seed=0,
        ema_decay=0.9,
    )
    batch = experiment.model.rows.batch_spec(2, experiment.data.cameras)
    with jax.set_mesh(plan.real_mesh):
        return trainer.traced_step(layout.shardings, layout.abstract(), batch).lower()


@pytest.mark.slow
def test_the_parts_of_a_step_have_names_which_change_nothing_else(monkeypatch):
    named = lowered()
    words = {word for path in re.findall(r'loc\("([^"]*)"', named.as_text(debug_info=True)) for word in path.split("/")}
    words |= {word for path in words for word in re.split(r"[()]", path)}  # transpose(jvp(mlp))
    assert not SCOPES - words
    monkeypatch.setattr(ExtendNameStackContextManager, "__enter__", lambda self: None)
    monkeypatch.setattr(ExtendNameStackContextManager, "__exit__", lambda *_: None)
    assert lowered().as_text() == named.as_text()
