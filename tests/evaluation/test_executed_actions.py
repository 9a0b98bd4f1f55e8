"""How many actions of a chunk are executed before the next one: one number of the model's, for every closed loop."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from openpi_train_configs.act_runs import act_aloha_sim
from openpi_train_configs.metaworld_dp import metaworld_mt5_dp
from openpi_train_configs.metaworld_rl import metaworld_rloo
from openpi_train_configs.openpi_arms import pi0_aloha
from openpi_train_configs.openpi_libero import pi05_libero
from openpi_train_configs.robot_dp import pusht_dp, robot_dp_14
from openpi_train_configs.smolvla_runs import smolvla_bridge

from openpi_train.data.robot.windows import WindowShape
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.evaluation import closed_loop_success
from openpi_train.evaluation.closed_loop_success import ClosedLoopSuccess, StoppedError
from openpi_train.evaluation.measure import Evaluated
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.tools import evaluate_policy

# What their authors execute: `n_action_steps` of RoboTwin's and diffusion_policy's configs, LeRobot's of ACT and
# SmolVLA, `replan_steps` and `action_horizon` of openpi's examples for LIBERO and the real ALOHA.
DIFFUSION = [(robot_dp_14, 6), (pusht_dp, 8)]
NUMBERS = [*DIFFUSION, (act_aloha_sim, 100), (smolvla_bridge, 50), (pi05_libero, 5), (pi0_aloha, 25)]


@pytest.mark.parametrize(("experiment", "number"), NUMBERS)
def test_every_closed_loop_executes_the_models_number(experiment, number, monkeypatch):
    model, asked = experiment.model, []
    assert RobotRL().num_executed(model) == number
    policy = SimpleNamespace(form=SimpleNamespace(window=model.rows.window))
    assert evaluate_policy._execute(ClosedLoop(), policy) == number
    monkeypatch.setattr(closed_loop_success, "evaluate", lambda *_, execute, **__: asked.append(execute))
    monkeypatch.setattr(closed_loop_success, "VideoRecorder", lambda *_: None)
    loop = object.__new__(ClosedLoopSuccess)
    loop._policy = SimpleNamespace(batch_size=1, rows=1)
    loop._config = ClosedLoop()
    trainer = SimpleNamespace(model=model)
    loop._running = SimpleNamespace(trainer=trainer, folder=lambda _: Path("x"), stop_requested=None)
    with pytest.raises(StoppedError):  # `evaluate` gave no score
        loop(Evaluated(step=0, weights={"": {}}, frozen={}))
    assert asked == [number]


def test_another_number_changes_with_the_field():
    model = dataclasses.replace(robot_dp_14.model, n_action_steps=2)
    assert RobotRL().num_executed(model) == 2
    assert RobotRL(execute=4).num_executed(model) == 4


def test_metaworlds_runs_go_on_with_the_eight_of_sixteen_that_were_measured():
    for experiment in (metaworld_mt5_dp, metaworld_rloo):
        assert experiment.eval.closed_loop.execute == 8
    assert metaworld_rloo.rl.execute == 8


def test_no_more_is_executed_than_a_chunk_has_ahead():
    assert WindowShape(horizon=8, history=3, first_action=-2, execute=6).num_executed == 6
    assert WindowShape(horizon=1).num_executed == 1
    for execute in (0, 7):
        with pytest.raises(ValueError, match=rf"execute {execute} must be in 1\.\.6"):
            WindowShape(horizon=8, history=3, first_action=-2, execute=execute)
