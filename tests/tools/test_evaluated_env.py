"""The environment of `eval`: the one that is named, or the experiment's own, with what is set of it."""

import dataclasses

import pytest

from openpi_train import registry
from openpi_train.choice import on_env
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.named_envs import environment
from openpi_train.runtime.exits import UsageError
from openpi_train.tools.evaluate_policy import closed_loop_of
from openpi_train.tools.requests import EvaluateRequest

PENDULUM = "gym:Pendulum-v1"
SET = {"env_success": "terminated", "env_prompt": "swing up", "env_rate": 5.0}


def test_what_is_set_is_set_of_the_named_one_or_of_the_experiments_own():
    debug = registry.load("debug")
    named = closed_loop_of(EvaluateRequest(checkpoint="x", env=PENDULUM, max_steps=9, **SET), debug, 0)
    assert (named.env.instruction(0), named.env.control_hz, named.max_steps) == ("swing up", 5.0, 9)
    own = on_env(debug, environment(PENDULUM))
    assert closed_loop_of(EvaluateRequest(checkpoint="x", **SET), own, 0).env == named.env
    assert closed_loop_of(EvaluateRequest(checkpoint="x"), own, 0).env == environment(PENDULUM)


def test_settings_need_an_environment():
    debug = registry.load("debug")
    without = dataclasses.replace(debug, eval=dataclasses.replace(debug.robot_eval, closed_loop=ClosedLoop()))
    with pytest.raises(UsageError, match=r"--env.prompt: for environments of Gymnasium, and there is none: give it"):
        closed_loop_of(EvaluateRequest(checkpoint="x", env_prompt="go"), without, 0)
