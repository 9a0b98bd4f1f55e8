"""LIBERO's client, in front of our server and a stand-in that has LIBERO's interface."""

import ast
import json
import sys
from pathlib import Path

import jax
import libero_stand_in
import numpy as np
import pytest
from stub import StubPolicy, serving

from openpi_train.data.robot.windows import WindowShape
from openpi_train.envs import env_pool, libero_env
from openpi_train.envs.libero_env import LiberoEnv
from openpi_train.envs.score import EpisodeResult, Score, wilson
from openpi_train.policy import wire
from openpi_train.policy.observation import ObservationForm
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.libero import Libero

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "scripts"))

import evaluate_libero

TASKS = ("open_the_drawer", "turn_on_the_stove")
# Enough for the hand to come from 0 to 0.2 by 0.01 a control step, whatever is lost in rounding.
MAX_STEPS, HORIZON = 25, 8


class Drawers(StubPolicy):
    """Moves ahead when told to open a drawer, and nowhere otherwise; fails at request `ends`."""

    def __init__(self, robot=None, dims=7, ends=None, history=1):
        super().__init__()
        window = WindowShape(horizon=HORIZON, history=history)
        self.form = ObservationForm(robot=robot or Libero(), window=window, image_size=(4, 4), reads_prompt=True)
        self.metadata = {"observation": self.form.spec(), "history": history, "robot": "Libero", "checkpoint": "x/4"}
        self.dims, self.ends, self.seen = dims, ends, []

    def prepare(self, observation):
        self.form.row(observation)
        self.seen.append(observation)
        if len(self.seen) == self.ends:
            raise RuntimeError("secret of the server")
        return observation

    def answer(self, prepared, draws=None):
        chunks = [np.zeros((HORIZON, self.dims), np.float32) for _ in prepared]
        for chunk, observation in zip(chunks, prepared, strict=True):
            chunk[:, 0] = 9.0 * ("drawer" in observation["prompt"])  # 1 after clipping
        return [{"actions": chunk, "state": np.zeros(8, np.float32), "draw": next(self.draws)} for chunk in chunks]


@pytest.fixture
def envs(tmp_path, monkeypatch):
    """The stand-in's simulators, in episodes that are short."""
    libero_stand_in.forget()
    (tmp_path / "libero").mkdir()
    yield libero_stand_in.install(tmp_path / "libero", monkeypatch)[1]
    libero_stand_in.forget()


@pytest.fixture
def client(envs, tmp_path, monkeypatch):
    """Evaluates a policy: the exit code, and the results."""
    monkeypatch.setitem(evaluate_libero.SUITES, "libero_goal", MAX_STEPS)

    def run(policy, *flags):
        out = tmp_path / "results.json"
        with serving(policy) as (port, _):
            words = ["--suite", "libero_goal", "--out", str(out), "--url", f"ws://127.0.0.1:{port}", "--wait-s", "0"]
            code = evaluate_libero.main([*words, "--image-size", "4", *flags])
        return code, json.loads(out.read_text()) if out.exists() else None

    return run


def expected_episodes(trials):
    """By hand: trial n of the first task begins at n hundredths; the second task's hand does not move."""
    first = [{"task": TASKS[0], "trial": n, "success": True, "steps": reach(0.01 * n)} for n in range(trials)]
    return first + [{"task": TASKS[1], "trial": n, "success": False, "steps": MAX_STEPS} for n in range(trials)]


def reach(place):
    """Control steps until the hand is at 0.2, summed as the stand-in does."""
    steps = 0
    while place < 0.2:
        place, steps = place + 0.01 * 1.0, steps + 1
    return steps


def test_a_suite_is_evaluated_from_the_published_states(client, envs, capsys):
    policy = Drawers()
    code, results = client(policy, "--trials", "3", "--seed", "5")
    assert code == 0 and results["complete"] and results["server"]["checkpoint"] == "x/4"
    goal = results["suites"]["libero_goal"]
    assert goal["episodes"] == expected_episodes(3)
    # The rates are those of our own evaluations.
    episodes = ({"number": one["trial"], **one} for one in goal["episodes"])
    kept = ("number", "task", "success", "steps")
    score = Score(episodes=tuple(EpisodeResult(**{name: one[name] for name in kept}) for one in episodes)).as_json()
    for name, one in [*goal["tasks"].items(), ("overall", goal["overall"])]:
        assert one == pytest.approx(score["overall"] if name == "overall" else score["tasks"][name])
    # A chunk for every five control steps.
    assert len(policy.seen) == sum(-(-one["steps"] // 5) for one in goal["episodes"])
    assert [(one.task, one.seeds, one.closed) for one in envs.MADE] == [
        (f"{task}.bddl", [5, 6, 7], True) for task in TASKS
    ]
    assert envs.MADE[0].actions[: evaluate_libero.WAITING_STEPS] == [[0.0] * 6 + [-1.0]] * 10
    assert envs.MADE[0].actions[10:] == [[1.0] + [0.0] * 6] * reach(0.02)
    assert "      3/6  50.0%" in capsys.readouterr().out


def test_an_episode_may_have_another_limit(client):
    _, results = client(Drawers(), "--trials", "1", "--max-steps", "3")
    assert [(one["success"], one["steps"]) for one in results["suites"]["libero_goal"]["episodes"]] == [(False, 3)] * 2


def test_it_sends_what_our_environment_observes(client, envs, monkeypatch):
    policy = Drawers()
    client(policy, "--trials", "1", "--tasks", "1")
    for cached in (libero_env._tasks, libero_env._benchmark, libero_env._published_states):
        cached.cache_clear()
    monkeypatch.setattr(libero_env, "_published_states", lambda *_: np.full((1, 3), 0.03))
    env = LiberoEnv(suite="libero_goal", image_size=4)
    seen = env.observe(env.reset(jax.random.split(jax.random.key(0), 1), np.array([1])))
    env_pool.close_idle()
    sent = policy.seen[0]
    for camera, pictures in seen.images.items():
        np.testing.assert_array_equal(sent[f"observation/{camera}"], pictures[0])
    np.testing.assert_array_equal(sent["observation/state"].astype(np.float32), seen.state[0])
    assert sent["prompt"] == "turn on the stove"


def test_its_limits_are_those_of_our_environment():
    assert evaluate_libero.SUITES == libero_env.SUITES
    assert evaluate_libero.WAITING_STEPS == libero_env._WAITING_STEPS
    assert libero_env._NO_MOTION.tolist() == evaluate_libero.NO_MOTION


@pytest.mark.parametrize("angle", [0.0, 1e-5, 0.3, np.pi, 6.0])
def test_rotations_are_those_of_our_environment(angle):
    quaternion = np.array([*(np.array([2.0, -1.0, 2.0]) / 3 * np.sin(angle / 2)), np.cos(angle / 2)])
    # Both are sums of a few products of float64.
    np.testing.assert_allclose(
        evaluate_libero.axis_angle(quaternion), libero_env.axis_angle(quaternion), rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (0, 50), (7, 10), (50, 50), (488, 500)])
def test_intervals_are_those_of_our_evaluations(successes, trials):
    # One is scipy's solution of the same equation, in float64.
    assert evaluate_libero.wilson(successes, trials) == pytest.approx(wilson(successes, trials), rel=1e-12, abs=1e-15)


def test_what_was_evaluated_is_not_evaluated_again(client, capsys, envs):
    # The seventh request is in the second trial: the first needs four or five.
    code, results = client(Drawers(ends=7), "--trials", "2")
    assert code == 2 and not results["complete"]
    assert "the server answers: internal error" in capsys.readouterr().err
    assert results["suites"]["libero_goal"]["episodes"] == expected_episodes(2)[:1] and envs.MADE[0].closed
    assert client(Drawers(), "--trials", "2")[0] == 2
    assert "exists: give --resume to continue it" in capsys.readouterr().err
    assert client(Drawers(), "--trials", "3", "--resume")[0] == 2
    assert "was made with trials 2; give the same" in capsys.readouterr().err
    policy = Drawers()
    policy.metadata["checkpoint"] = "x/8"
    assert client(policy, "--trials", "2", "--resume")[0] == 2 and not policy.seen
    assert "'checkpoint': 'x/8'" in capsys.readouterr().err
    policy = Drawers()
    code, results = client(policy, "--trials", "2", "--resume")
    assert code == 0 and results["complete"]
    assert results["suites"]["libero_goal"]["episodes"] == expected_episodes(2)
    assert {one["prompt"] for one in policy.seen} == {"open the drawer", "turn on the stove"}
    assert sum(one["prompt"] == "open the drawer" for one in policy.seen) == -(-reach(0.01) // 5)


@pytest.mark.parametrize(
    ("policy", "flags", "says"),
    [
        ({"robot": Bridge()}, (), "the policy observes image_0; LIBERO has image, wrist_image, state, prompt"),
        ({"history": 2}, (), "the policy observes 2 control steps; this client sends one"),
        ({"dims": 6}, (), "the server's actions have the shape [8, 6]; LIBERO's are [steps, 7]"),
        ({}, ("--execute", "9"), "--execute 9: the policy's chunks have 8 actions"),
        ({}, ("--trials", "4"), "--trials 4: LIBERO publishes 3 initial states of open_the_drawer"),
        ({}, ("--tasks", "2"), "--tasks 2: libero_goal has the tasks 0 to 1"),
        ({}, ("--api-key-file", "/no/key"), "--api-key-file /no/key cannot be read"),
        ({}, ("--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 cannot be connected to"),
        ({}, ("--url", "ws://127.0.0.1:1"), "no server answers at ws://127.0.0.1:1; start it"),
    ],
)
def test_what_cannot_be_is_told(client, capsys, policy, flags, says):
    code, _ = client(Drawers(**policy), "--trials", "1", *flags)
    assert code == 2 and f"evaluate_libero: {says}" in capsys.readouterr().err


def test_a_file_that_is_none_of_its_own_is_left_alone(client, tmp_path, capsys):
    (tmp_path / "results.json").write_text("[1]")
    assert client(Drawers(), "--resume") == (2, [1])
    assert "has no results of this client" in capsys.readouterr().err


def test_messages_are_those_of_our_server():
    message = {
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "none": np.zeros((0, 4), np.uint8),
        "scalar": np.float64(0.5),
        "nested": {"text": "go", "list": [1, None, True]},
    }
    for encode, decode in ((evaluate_libero.packed, wire.decode), (wire.encode, evaluate_libero.unpacked)):
        found = decode(encode(message))
        for name in ("array", "none", "scalar"):
            np.testing.assert_array_equal(found[name], message[name], strict=True)
        assert found["nested"] == message["nested"]


def test_it_runs_where_libero_does():
    """LIBERO's own instructions want Python 3.8, and our package is not there."""
    tree = ast.parse(Path(evaluate_libero.__file__).read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.partition(".")[0] for name in names}
    assert imported - sys.stdlib_module_names == {"libero", "msgpack", "numpy", "torch", "websockets"}
