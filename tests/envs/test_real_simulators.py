"""Simulators that everybody knows, the real packages: what they show and take is what datasets of them have.

Figures are those of the packages' own specifications and of LeRobot's datasets on the hub, as their cards say.
"""

import ctypes.util
import importlib.util
import sys

import jax
import numpy as np
import pytest

from openpi_train.envs.named_envs import environment
from openpi_train.envs.rollout import rollout
from openpi_train.runtime.exits import UsageError

# Of the packages, with the newest numpy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KEYS, TASKS = jax.random.split(jax.random.key(0), 2), np.zeros(2, int)


def needs(package):
    missing = [] if importlib.util.find_spec(package) else [package]
    missing += [] if ctypes.util.find_library("GL") else ["libGL.so.1, which they draw with (Debian: libgl1, libegl1)"]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def alone(name, **settings):
    """The environment without the processes around it."""
    return environment(name, settings=settings).env


@needs("gym_pusht")
def test_pusht_is_lerobots_dataset():
    env = alone("pusht")
    assert (env.cameras, env.state_dim, env.action_dim) == (("image",), 2, 2)
    assert (env.max_steps, env.control_hz) == (300, 10.0)
    assert env.camera_of("observation.image") == "image"
    states = env.reset(KEYS, TASKS)
    seen = env.observe(states)
    assert seen.images["image"].shape == (2, 96, 96, 3) and seen.images["image"].dtype == np.uint8
    # Actions are places in pixels, which a PD controller goes to.
    place = seen.state[0] + 30
    for _ in range(10):
        states = env.step(states, np.stack([place, place]))
    np.testing.assert_allclose(env.observe(states).state[0], place, atol=2)
    assert alone("pusht:keypoints").state_dim == 2 + 16


@needs("gym_pusht")
def test_an_episode_may_be_longer_than_the_environments_own_limit():
    env = alone("pusht:keypoints").limited_to(310)
    states = env.reset(KEYS[:1], TASKS[:1])
    for _ in range(302):
        states = env.step(states, np.zeros((1, 2)))
    assert env.max_steps == 310 and not states.over.any()


@needs("gym_pusht")
def test_pusht_succeeds_where_the_block_covers_its_goal():
    """The block is put onto the goal, by the simulator's own methods."""
    env = alone("pusht")
    states = env.reset(KEYS, TASKS)
    inner = states.simulators[0].unwrapped
    inner.block.angle = inner.goal_pose[2]
    inner.block.position = inner.goal_pose[:2].tolist()
    inner.space.reindex_shapes_for_body(inner.block)
    states = env.step(states, np.asarray([inner.agent.position, states.simulators[1].unwrapped.agent.position]))
    assert env.success(states).tolist() == [True, False] and env.reward(states)[0] > 0.95


@needs("gymnasium_robotics")
def test_fetch_succeeds_at_its_last_step_only():
    env = alone("fetch:reach")
    assert (env.max_steps, env.control_hz, env.action_dim, env.tasks) == (50, 25.0, 4, ("FetchReach-v4",))

    def towards(seen, keys, sign=1.0):
        achieved, desired = seen.state[:, :3], seen.state[:, 3:6]
        moves = 10 * sign * (desired - achieved)
        return np.concatenate([moves, np.zeros((len(moves), 1))], 1)[:, None]

    found = rollout(towards, env, KEYS, TASKS, execute=1)
    assert found.success.all() and found.steps.tolist() == [50, 50]
    # Reached at the tenth step, and left.
    signs = iter([1.0] * 30 + [-1.0] * 20)
    found = rollout(lambda *given: towards(*given, sign=next(signs)), env, KEYS, TASKS, execute=1)
    assert not found.success.any()
    soon = alone("fetch:reach", success_at="any")
    assert (rollout(towards, soon, KEYS, TASKS, execute=1).steps < 20).all()


@needs("gymnasium_robotics")
def test_fetchs_goals_are_seen_and_can_be_left_out_with_a_warning(caplog):
    assert alone("fetch:push").state_dim == 25 + 3 + 3
    assert alone("fetch:push", state=("observation",)).state_dim == 25
    assert "the policy does not see achieved_goal, desired_goal" in caplog.text
    with pytest.raises(UsageError, match="did you mean fetch:pick_and_place"):
        environment("fetch:PickAndPlace")


@needs("gymnasium_robotics")
def test_success_of_adroit_is_found_by_its_own_name():
    env = alone("gym:gymnasium_robotics:AdroitHandDoor-v1")
    assert (env.max_steps, env.action_dim, env.state_dim) == (200, 28, 39)
    states = env.step(env.reset(KEYS, TASKS), np.zeros((2, 28)))
    assert not env.success(states).any()


@needs("gym_aloha")
@pytest.mark.slow
def test_aloha_goes_where_the_policy_says_in_radians_and_not_to_one():
    """The start pose is held for 20 steps. Clipped to the declared bounds the elbow would go to 1 rad."""
    env = alone("aloha:transfer_cube")
    assert (env.cameras, env.state_dim, env.action_dim) == (("top",), 14, 14)
    assert (env.max_steps, env.control_hz, env.instruction(0)) == (400, 50.0, "Transfer cube")
    states = env.reset(KEYS[:1], TASKS[:1])
    begin = env.observe(states)
    assert begin.images["top"].shape == (1, 480, 640, 3)
    for _ in range(20):
        states = env.step(states, begin.state)
    assert begin.state[0, 2] > 1.1
    np.testing.assert_allclose(env.observe(states).state[0, 2], begin.state[0, 2], atol=0.02)


@needs("libero")
@pytest.mark.slow
def test_libero_begins_upright_with_its_cameras_by_both_names(monkeypatch, tmp_path):
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    env = alone("libero:libero_spatial")
    assert len(env.tasks) == 10 and env.instruction(0).startswith("pick up the black bowl")
    names = ("observation.images.image2", "observation/wrist_image", "wrist_image")
    assert {env.camera_of(name) for name in names} == {"wrist_image"} and env.camera_of("image") == "image"
    states = env.reset(KEYS[:1], TASKS[:1])
    seen = env.observe(states)
    assert {name: one.shape for name, one in seen.images.items()} == dict.fromkeys(env.cameras, (1, 256, 256, 3))
    # The arm stands on the far side of the table: in an upright picture its base is in the upper half.
    np.testing.assert_allclose(seen.state[0, 2], 1.17, atol=0.05)


@pytest.fixture
def with_vulkan():
    """ManiSkill; skipped where it cannot make a simulator (`make maniskill` brings Mesa's Vulkan)."""
    pytest.importorskip("mani_skill")
    try:
        _ = alone("maniskill:PickCube-v1").cameras
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_maniskills_goal_is_seen_its_cube_is_pushed_and_its_files_are_named(with_vulkan, monkeypatch, tmp_path):
    env = alone("maniskill:PickCube-v1")
    assert (env.cameras, env.action_dim, env.max_steps, env.control_hz) == (("base_camera",), 7, 50, 20.0)
    # agent/qpos, agent/qvel, extra/goal_pos, extra/is_grasped, extra/tcp_pose.
    assert env.state_dim == 9 + 9 + 3 + 1 + 7
    states = env.reset(KEYS, TASKS)
    goals = [np.asarray(one._made.unwrapped.goal_site.pose.p)[0] for one in states.simulators]
    np.testing.assert_allclose(env.observe(states).state[:, 18:21], goals, atol=1e-5)
    place = [np.asarray(one._made.unwrapped.agent.tcp.pose.p)[0] for one in states.simulators]
    for _ in range(5):
        states = env.step(states, np.tile([1.0, 0, 0, 0, 0, 0, 1.0], (2, 1)))
    moved = [np.asarray(one._made.unwrapped.agent.tcp.pose.p)[0] for one in states.simulators]
    forward, *aside = np.subtract(moved, place).T
    assert (forward > 3 * np.abs(aside).max(0)).all()
    # Each of the five steps moves it, by about a third of the 10 cm that are asked for.
    assert (forward > 0.1).all() and not states.over.any()
    registered = sys.modules["mani_skill.utils.registration"].assets
    monkeypatch.setattr(registered, "is_data_source_downloaded", lambda name: False)
    with pytest.raises(UsageError, match=r"python -m mani_skill.utils.download_asset PickSingleYCB-v1"):
        _ = alone("maniskill:PickSingleYCB-v1").cameras


@pytest.mark.slow
@pytest.mark.parametrize(("task", "fewest"), [("PushCube-v1", 4), ("StackCube-v1", 3)])
def test_maniskills_experts_succeed_although_they_are_disturbed(with_vulkan, task, fewest):
    """By ManiSkill's own `success`, within its own limit of 50 steps; from states, since pictures cost much more."""
    env = alone(f"maniskill:{task}", make=("obs_mode=state",))
    keys = jax.random.split(jax.random.key(7), 4)
    states = env.reset(keys, np.zeros(4, int))
    for step in range(env.max_steps):
        commands, carried_out = env.demonstrate(states, jax.random.split(jax.random.key(step), 4))
        assert commands.shape == (4, 7) and np.abs(carried_out).max() <= 1
        states = env.step(states, carried_out)
    assert env.success(states).sum() >= fewest


@pytest.mark.slow
def test_a_policy_that_sees_pictures_of_maniskill_does_not_see_where_the_cubes_are(with_vulkan):
    """What the experts go by is not in its state: only the arm's joints, and where the gripper is."""
    env = alone("maniskill:StackCube-v1")
    states = env.reset(KEYS, TASKS)
    known, seen = states.simulators[0].known(), env.observe(states)
    np.testing.assert_allclose(seen.state[0, -7:], known["tcp"], atol=1e-6)
    assert seen.state.shape == (2, 9 + 9 + 7) and set(seen.images) == {"base_camera", "hand_camera"}
    assert not any(np.isclose(seen.state[0], place, atol=1e-6).any() for place in known["cubeA"][:2])
