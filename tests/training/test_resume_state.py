"""Two steps, a save, a restore and two more equal four in a row: every leaf, bit for bit, with the batches that follow.

The runs of whole processes that are killed are in `tests/runs/test_resume.py`.
"""

import dataclasses
import inspect
import json
import logging
import shutil
import types

import jax
import numpy as np
import pytest
import strategies
import toy
from checkpoint_process import same_bits
from openpi_train_configs.debug import debug

from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.runtime.exits import CheckpointError
from openpi_train.training import start
from openpi_train.training.init import create_state

CONFIG = toy.StackedConfig(depth=2)
EXPERIMENT = dataclasses.replace(debug, exp_name="x", model=CONFIG, resume=True)
first_state = inspect.unwrap(start.first_state)  # without the run-time type check: it is given no real feed


class Batches:
    """Stands for `Feed`: the batch of a step is a function of the step."""

    def __init__(self, plan, data="these"):
        self.step, self._plan, self._data = 0, plan, data

    def next(self):
        rows = jax.tree.map(np.asarray, toy.batch(strategies.ROWS, seed=self.step, vocab_size=CONFIG.vocab_size))
        self.step += 1
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, self._plan.batch, x.__getitem__), rows)

    def position(self):
        return {"step": self.step, "data": self._data}

    def seek(self, position):
        if position["data"] != self._data:
            raise ValueError("other data")
        self.step = position["step"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps in a row, with a checkpoint after the second."""
    directory = tmp_path_factory.mktemp("run")
    trainer, layout = strategies.prepare(CONFIG, "zero3", 4, 1, jax.devices()[:4])
    mesh = trainer.plan.real_mesh
    with jax.set_mesh(mesh):
        state = create_state(layout, CONFIG, trainer.optimizer, CONFIG.param_rules.frozen, True, 7)
        step = trainer.compile_step(layout.shardings, state, CONFIG.rows.batch_spec(strategies.ROWS, ()))

    def take_two(state, feed):
        losses = []
        with jax.set_mesh(mesh):
            for _ in range(2):
                state, metrics = step(state, feed.next())
                losses.append(float(metrics["loss"]))
        return state, losses

    def begin(experiment, feed, where=directory):
        with jax.set_mesh(mesh), Checkpoints(where, public_name=CONFIG.param_rules.public_name) as checkpoints:
            return first_state(experiment, trainer, layout, checkpoints, feed)[0]

    feed = Batches(trainer.plan)
    state, _ = take_two(state, feed)
    with jax.set_mesh(mesh), Checkpoints(directory, public_name=CONFIG.param_rules.public_name) as checkpoints:
        checkpoints.save(state, data_position=feed.position(), experiment={}, norm_stats={})
    straight, losses = take_two(state, feed)
    return types.SimpleNamespace(
        directory=directory, plan=trainer.plan, straight=straight, losses=losses, take_two=take_two, begin=begin
    )


@pytest.mark.slow
def test_a_restored_state_takes_the_steps_that_the_saved_one_would_have_taken(run):
    feed = Batches(run.plan)
    restored = run.begin(EXPERIMENT, feed)
    assert (int(restored.step), feed.step) == (2, 2)
    resumed, losses = run.take_two(restored, feed)
    assert losses == run.losses
    assert same_bits(resumed, run.straight)


def test_training_continued_from_start_weights_goes_on_with_the_batch_of_its_step(run):
    feed = Batches(run.plan)
    loader = CheckpointWeightLoader(params_path=str(run.directory / "2"), continue_training=True)
    state = run.begin(dataclasses.replace(EXPERIMENT, resume=False, weight_loader=loader), feed)
    assert (int(state.step), feed.step) == (2, 2)
    continued, losses = run.take_two(state, feed)
    assert losses == run.losses
    assert same_bits(continued, run.straight)


def test_a_run_is_not_continued_with_other_data(run):
    with pytest.raises(CheckpointError, match="other data"):
        run.begin(EXPERIMENT, Batches(run.plan, data="others"))


def test_a_run_may_begin_with_the_training_state_of_another_one(run, tmp_path, caplog):
    feed, base = Batches(run.plan), str(tmp_path)
    experiment = dataclasses.replace(EXPERIMENT, checkpoint_base_dir=base, resume_from=str(run.directory / "2"))
    state = run.begin(experiment, feed, tmp_path / "new")
    assert (int(state.step), feed.step) == (2, 2)
    assert same_bits(state, run.begin(EXPERIMENT, Batches(run.plan)))
    shutil.copytree(run.directory / "2", tmp_path / "begun" / "2")
    with caplog.at_level(logging.INFO):
        run.begin(experiment, Batches(run.plan), tmp_path / "begun")
    assert "the run has checkpoints of its own by now" in caplog.text


@pytest.mark.parametrize(
    ("data", "position"), [("these", {"step": 2, "batch_size": 8, "rows": 9}), ("others", {"step": 2})]
)
def test_another_runs_rows_are_not_seen_again_where_the_data_are_the_same(run, tmp_path, data, position):
    saved = {"step": 2, "batch_size": 8, "rows": 9, "data": "these"}
    (tmp_path / "meta.json").write_text(json.dumps({"data_position": saved}))
    found = inspect.unwrap(start._position)(Batches(run.plan, data=data), 2, str(tmp_path))
    assert found == {**position, "data": data}
