"""LIBERO's tasks, with a stand-in that has its interface: initial states, what is observed, and how an episode ends."""

import dataclasses
import importlib
import io
import sys
from pathlib import Path

import jax
import libero_stand_in
import numpy as np
import pytest

from openpi_train.envs import env_pool, libero_env
from openpi_train.envs.libero_env import LiberoEnv, axis_angle
from openpi_train.envs.named_envs import environment
from openpi_train.robots.libero import Libero
from openpi_train.runtime.exits import UsageError

KEYS, TASKS = jax.random.split(jax.random.key(0), 8), np.array([0, 1] * 4)


def forget():
    for cached in (libero_env._tasks, libero_env._benchmark, libero_env._published_states):
        cached.cache_clear()
    env_pool.close_idle()
    libero_stand_in.forget()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The stand-in, found as LIBERO is; its modules `benchmark` and `envs`."""
    forget()
    yield libero_stand_in.install(tmp_path, monkeypatch)
    forget()


def small(**changes):
    return LiberoEnv(**{"suite": "libero_goal", "image_size": 4, **changes})


def starts(env, keys=KEYS, tasks=TASKS):
    return env.observe(env.reset(keys, tasks)).state[:, :3]


def test_its_tasks_and_sizes_are_those_of_the_robot_and_the_suite(installed):
    env = small()
    assert env.tasks == ("open_the_drawer", "turn_on_the_stove") and env.instruction(1) == "turn on the stove"
    assert (env.max_steps, env.action_dim, env.state_dim) == (
        300,
        len(Libero().action_names),
        len(Libero().state_names),
    )
    assert set(Libero().cameras.values()) == set(env.cameras)


def test_its_cameras_have_the_names_of_both_datasets():
    names = ("observation/wrist_image", "observation.images.image2", "observation.images.image", "image")
    assert [small().camera_of(name) for name in names] == ["wrist_image", "wrist_image", "image", "image"]


def test_what_libero_asks_at_its_first_import_is_answered(installed, tmp_path, monkeypatch):
    """It asks whether to keep its files elsewhere, and has no answer where nobody sits."""
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    libero_stand_in.forget()
    with pytest.raises(EOFError):
        importlib.import_module("libero.libero")
    libero_stand_in.forget()
    assert environment("libero:libero_goal").tasks == small().tasks


def test_evaluations_begin_in_published_states_and_rl_in_new_ones(installed):
    benchmark, _ = installed
    published = [benchmark.PUBLISHED[task].tolist() for task in (0, 1)]
    found = starts(small())
    for start, task in zip(found, TASKS, strict=True):
        assert any(np.allclose(start, one, atol=1e-6) for one in published[task])
    assert len(np.unique(found, axis=0)) > 2
    new = starts(small().for_demonstrations())
    assert len(np.unique(new, axis=0)) == 8
    # Functions of key and task alone, also in another batch.
    for env, expected in ((small(), found), (small().for_demonstrations(), new)):
        np.testing.assert_array_equal(starts(env, KEYS[3:5], TASKS[3:5]), expected[3:5])


def test_numpys_random_numbers_are_left_as_they_were(installed):
    np.random.seed(3)
    expected = np.random.uniform(size=2)
    np.random.seed(3)
    first = np.random.uniform()
    starts(small().for_demonstrations())
    assert [first, np.random.uniform()] == expected.tolist()


def test_objects_fall_first_and_pictures_are_turned(installed):
    _, envs = installed
    env = small()
    states = env.reset(KEYS[:1], TASKS[:1])
    assert envs.MADE[0].actions == [[0.0] * 6 + [-1.0]] * 10 and envs.MADE[0].size == (4, 4)
    seen = env.observe(states)
    rows, columns = np.mgrid[3:-1:-1, 3:-1:-1]
    for camera, number in (("image", 0), ("wrist_image", 1)):
        expected = np.stack([rows, columns, np.full((4, 4), number)], -1)
        np.testing.assert_array_equal(seen.images[camera][0], expected)
    np.testing.assert_allclose(seen.state[0, 3:], [0, 0, 0.6, 0.04, -0.04], atol=1e-6)


def test_an_episode_ends_with_its_first_success_and_actions_are_clipped(installed):
    _, envs = installed
    env = small()
    states = env.reset(KEYS[:2], np.array([0, 0]))
    begin = np.array([one.place[0] for one in envs.MADE])
    for _ in range(25):
        states = env.step(states, np.array([[9.0] + [0.0] * 6, [0.0] * 7]))
    assert env.success(states).tolist() == [True, False]
    # By 0.01 a step, up to 0.2.
    moved = len(envs.MADE[0].actions) - 10
    assert moved == int(np.ceil((0.2 - begin[0]) / 0.01 - 1e-9)) and len(envs.MADE[1].actions) == 35
    with pytest.raises(RuntimeError, match="a simulator cannot go back"):
        env.step(dataclasses.replace(states, num_steps=1), np.zeros((2, 7)))


def test_simulators_are_used_again_for_their_own_task(installed):
    _, envs = installed
    env = small()
    for tasks in ([0, 1], [1, 0], [1, 1]):
        states = env.reset(KEYS[:2], np.array(tasks))
        assert [one.task for one in states.simulators] == [f"{env.tasks[task]}.bddl" for task in tasks]
        del states
    assert len(envs.MADE) == 3


def test_published_states_are_read_where_torch_wants_to_be_told(installed, monkeypatch):
    benchmark, _ = installed
    monkeypatch.setattr(benchmark, "REFUSED", True)
    asked = []

    class Torch:
        @staticmethod
        def load(path, weights_only):
            asked.append((Path(path).name, weights_only))
            return benchmark.PUBLISHED[0]

    monkeypatch.setitem(sys.modules, "torch", Torch)
    starts(small(), KEYS[:1], TASKS[:1])
    assert asked == [("open_the_drawer.pruned_init", False)]


@pytest.mark.parametrize("angle", [0.0, 1e-5, 0.3, np.pi, 6.0])
def test_a_quaternion_is_turned_into_its_axis_times_its_angle(angle):
    axis = np.array([2.0, -1.0, 2.0]) / 3
    quaternion = np.array([*(axis * np.sin(angle / 2)), np.cos(angle / 2)])
    np.testing.assert_allclose(axis_angle(quaternion), axis * angle, atol=1e-7)


def test_the_command_line_has_it_in_worker_processes(installed):
    env = environment("libero:libero_goal", image_size=32)
    assert env.env == small(image_size=32) and env.tasks == small().tasks and env.timeout_s > 60


def test_what_is_missing_is_said(monkeypatch):
    forget()
    with pytest.raises(ValueError, match="LIBERO has no suite 'libero_soup'; it has libero_spatial"):
        environment("libero:libero_soup")
    monkeypatch.setitem(sys.modules, "libero", None)
    with pytest.raises(UsageError, match=r"LIBERO cannot be imported .*: pip install 'openpi_train\[libero\]'"):
        environment("libero:libero_goal")
    forget()
