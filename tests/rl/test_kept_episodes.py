"""What is kept of a robot's RL is what happened, as a dataset that can be trained on."""

import dataclasses

import jax
import numpy as np
import pytest
from rl.wandering import DIMS, Wander, wandering

from openpi_train.data.core import files
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.robot.config import Dataset
from openpi_train.envs.env import Env
from openpi_train.envs.rollout import rollout
from openpi_train.rl.kept_episodes import KeptEpisodes
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.robots.bridge import Bridge
from openpi_train.runtime.exits import UsageError

# The second task is achieved with the second control step, the first one never.
ENV = Wander(distances=(0.9999, 2))
TASKS = np.array([0, 1, 1, 0])
KEYS = jax.random.split(jax.random.key(3), 4)
# A wave of six rollouts, of which this process has four.
NUMBERS = np.array([0, 1, 4, 5])
STEPS, OUTCOMES = np.array([5, 2, 5, 2, 2, 5]), np.array([0, 1, 0, 1, 1, 0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded(Wander):
    """Carries out half of the motion at most."""

    def executed(self, actions):
        return np.minimum(np.asarray(actions), 0.05)

    def step(self, states, actions):
        return super().step(states, self.executed(actions))


def policy(observation, keys):
    return np.asarray(observation.state)[:, None] * np.linspace(0.01, 0.1, 3)[None, :, None]


def kept_in(folder, env=ENV, **changes):
    settings = {"robot": Bridge(), "features": {"observation/image_0": "image_0"}, "tasks": (0, 1), "every": 1}
    settings |= {"keep_failed": True, "run": {"run": "x"}}
    return KeptEpisodes(str(folder), env=env, **{**settings, **changes})


def act(kept, env: Env = ENV, numbers=NUMBERS):
    recorder = kept.recorder(numbers)
    outcome = rollout(policy, env, KEYS, TASKS, execute=2, record=recorder)
    kept.add(recorder, numbers, TASKS)
    return outcome


def alone(kept, iteration, env: Env = ENV):
    """An iteration with one wave, all of it this process's."""
    kept.begin(iteration)
    outcome = act(kept, env, np.arange(4))
    kept.end_wave(outcome.steps, outcome.success.astype(float))
    kept.end()
    return outcome


def opened(folder, tmp_path):
    return LeRobot(path=str(folder), cache_dir=str(tmp_path / "cache")).open()


@pytest.mark.parametrize("env", [ENV, Bounded(distances=ENV.distances)], ids=["free", "bounded"])
def test_kept_are_the_observations_and_the_actions_that_were_carried_out(tmp_path, env):
    kept = kept_in(tmp_path / "kept", env)
    outcome = alone(kept, 0, env)
    assert outcome.steps.tolist() == [5, 2, 2, 5]
    source = opened(tmp_path / "kept", tmp_path)
    assert np.diff([0, *source.episode_ends]).tolist() == [5, 2, 2, 5]
    starts = env.reset(jax.random.split(jax.random.key(3), 4), TASKS)
    assert starts[0].shape == (4, DIMS)
    for number, task in enumerate(TASKS):
        steps = source.steps_of(number)
        state, action, reward, success, done = (
            source.columns[name][steps.start : steps.stop]
            for name in ("observation/state", "action", "next/reward", "next/success", "next/done")
        )
        # The world's distribution: the state is the sum of the actions, and the reward the number of the control step.
        np.testing.assert_allclose(state[1:] - state[:-1], action[:-1], atol=1e-6)
        assert reward.tolist() == [1, 2, 3, 4, 5][: len(steps)]
        assert success.tolist() == [False] * (len(steps) - 1) + [bool(task)]
        assert done.tolist() == [False] * (len(steps) - 1) + [True]
        seen = source.frames(np.arange(steps.start, steps.stop), "observation/image_0")
        assert (seen == np.arange(len(steps))[:, None, None, None]).all()
        assert source.prompts[source.prompt_index[steps.start]] == env.instruction(task)
    # Of the chunk that the state at the first query gives.
    first = source.columns["observation/state"][0] * 0.01
    np.testing.assert_allclose(source.columns["action"][0], env.executed(first[None])[0], rtol=1e-6)
    assert (np.asarray(source.columns["action"]) <= 0.05).all() == isinstance(env, Bounded)


def test_processes_keep_their_own_and_number_them_by_rollout(tmp_path, monkeypatch):
    """Of the rollouts of a second process only their steps and outcomes are known here."""
    kept = kept_in(tmp_path / "kept")
    kept.begin(0)
    act(kept)
    kept.end_wave(STEPS, OUTCOMES)
    monkeypatch.setattr(kept._parts, "publish", lambda part, names: names_of.append((part, names)))
    names_of = []
    kept.end()
    assert names_of == [(0, [f"000-{number:06d}" for number in range(6)])]
    found = sorted(path.name for path in (tmp_path / "kept" / "data" / "chunk-000000").iterdir())
    assert found == [f"file-{number:06d}.parquet" for number in (0, 1, 4, 5)]
    assert kept._totals == (6, STEPS.sum())


def test_an_rollout_that_fills_up_a_call_is_kept_once(tmp_path):
    kept = kept_in(tmp_path / "kept")
    kept.begin(0)
    act(kept, numbers=np.array([0, 1, 2, 2]))
    kept.end_wave(np.array([5, 2, 5]), np.array([0, 1, 0]))
    kept.end()
    assert opened(tmp_path / "kept", tmp_path).num_episodes == 3


def test_failures_and_iterations_may_be_left_out(tmp_path):
    kept = kept_in(tmp_path / "kept", keep_failed=False, every=2)
    for iteration in range(3):
        alone(kept, iteration)
    source = opened(tmp_path / "kept", tmp_path)
    assert np.diff([0, *source.episode_ends]).tolist() == [2] * 4
    assert sorted(path.name for path in (tmp_path / "kept" / "data").iterdir()) == ["chunk-000000", "chunk-000002"]


def test_an_interrupted_iteration_leaves_nothing_and_a_resumed_run_has_every_episode_once(tmp_path):
    kept = kept_in(tmp_path / "kept")
    for iteration in range(3):
        alone(kept, iteration)
    kept.begin(3)
    act(kept, numbers=np.arange(4))  # killed here; the last save was before iteration 1
    resumed = kept_in(tmp_path / "kept")
    for iteration in (1, 2):
        alone(resumed, iteration)
    assert opened(tmp_path / "kept", tmp_path).num_episodes == 12
    assert files.read_json(tmp_path / "kept" / "meta" / "info.json")["total_frames"] == 3 * 14


def test_a_run_can_be_trained_on_what_was_kept(tmp_path):
    """Its batches, with the robot's own settings, hold the kept chunks."""
    alone(kept_in(tmp_path / "kept"), 0)
    source = LeRobot(path=str(tmp_path / "kept"), cache_dir=str(tmp_path / "cache"))
    dataset = Dataset(source=source, robot=Bridge(), asset_id="kept")
    data = dataclasses.replace(wandering.data, datasets=(dataset,), validation_fraction=0.0)
    experiment = dataclasses.replace(wandering, exp_name="x", data=data, assets_base_dir=str(tmp_path / "assets"))
    opened_data = experiment.open_data()
    row, problems = opened_data.train.batch(np.arange(4))
    assert not problems and row["actions"].shape == (4, 3, 8) and opened_data.num_samples > 4


def test_what_cannot_be_kept_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"--rl.keep .*mine: .*mine holds something else: give another folder"):
        kept_in(tmp_path / "mine")

    class Slow(Wander):
        control_hz = 12.5

    rl = RobotRL(env=Slow(), keep="kept", num_groups=4, group_size=4, execute=2)
    problems = rl.check(objective=wandering.objective, model=wandering.model, data=wandering.data, batch_size=8)
    assert problems == [
        "--rl.keep kept: Slow has 12.5 control steps per second, and LeRobot's format needs a whole number: "
        "leave --rl.keep out"
    ]
