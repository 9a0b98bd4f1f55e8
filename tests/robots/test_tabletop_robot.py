"""The tabletop robot's conventions against the environment's, and both directions."""

import numpy as np
import pytest

from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.robots.tabletop import Tabletop

ROBOT = Tabletop()


def columns(steps=5):
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=(steps, 7)).astype(np.float32) for name in ("observation/state", "action")}


def test_names_and_rates_are_those_of_the_environment():
    assert len(ROBOT.action_names) == TabletopEnv.action_dim
    assert len(ROBOT.state_names) == TabletopEnv.state_dim
    assert ROBOT.control_hz == TabletopEnv.control_hz
    assert tuple(ROBOT.cameras.values()) == tuple(f"observation/{name}" for name in TabletopEnv.cameras)
    assert all(name.rsplit("_", 1)[1] in ("m", "rad", "fraction") for name in ROBOT.action_names + ROBOT.state_names)


def test_read_takes_every_step_as_recorded():
    recorded = columns()
    steps = ROBOT.read(recorded, np.array([2, 5]))
    assert np.array_equal(steps.state, recorded["observation/state"])
    assert np.array_equal(steps.actions, recorded["action"])
    assert steps.use.all()


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_to_model_and_back_is_the_identity(lead):
    generator = np.random.default_rng(1)
    state = generator.normal(size=(*lead, 7)).astype(np.float32)
    actions = generator.normal(size=(*lead, 6, 7)).astype(np.float32)
    model_state, model_actions = ROBOT.to_model(state, actions)
    assert np.array_equal(model_state, state)
    assert np.array_equal(ROBOT.from_model(model_actions, state), actions)
    assert ROBOT.to_model(state)[1] is None


def test_a_missing_or_misshapen_column_is_named():
    missing = columns()
    del missing["action"]
    with pytest.raises(
        ValueError,
        match=r"Tabletop .*lacks action .*has observation/state",
    ):
        ROBOT.read(missing, np.array([5]))
    with pytest.raises(ValueError, match=r"Tabletop robot has 7 action dims \(.*\); the dataset gives 6: action 6"):
        ROBOT.read({**columns(), "action": np.zeros((5, 6))}, np.array([5]))
