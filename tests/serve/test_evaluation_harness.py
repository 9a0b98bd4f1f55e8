"""vla-evaluation-harness in front of our server: its own client, runner and orchestrator, and messages by hand."""

import asyncio
import time

import numpy as np
import pytest
from stub import StubPolicy, serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from openpi_train.data.robot.windows import WindowShape
from openpi_train.policy import wire
from openpi_train.policy.observation import ObservationForm
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.libero import Libero
from openpi_train.runtime.exits import UsageError
from openpi_train.serve.evaluation_harness import HarnessForm
from openpi_train.serve.starting import StartProgress

pytest.importorskip("vla_eval", reason="vla-evaluation-harness is not installed: pip install vla-eval")
import vla_eval.api
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.benchmarks.libero.benchmark import LIBEROBenchmark
from vla_eval.connection import Connection
from vla_eval.protocol import numpy_codec
from vla_eval.specs import DimSpec, check_specs

HORIZON, EXECUTE, MAX_STEPS = 8, 3, 20
NAMES = {"agentview": (4, 4, 3), "wrist": (4, 4, 3)}


class Mover(StubPolicy):
    """Action k of the n-th chunk is [1 if told to move, n, k, 0, ...]; its pictures and states are kept in `seen`."""

    def __init__(self, robot=None, history=1):
        super().__init__()
        robot, window = robot or Libero(), WindowShape(horizon=HORIZON, history=history)
        self.form = ObservationForm(robot=robot, window=window, image_size=(4, 4), reads_prompt=True, prompt="stay")
        self.metadata = {
            "observation": self.form.spec(),
            "robot": type(robot).__name__,
            "action_names": list(robot.action_names),
            "state_names": list(robot.state_names),
            "history": history,
            "action_horizon": HORIZON,
            "num_executed": 4,
            "experiment": "mine",
            "checkpoint": "x/4",
        }
        self.seen = []

    def prepare(self, observation):
        row, _ = self.form.row(observation)
        self.seen.append(observation)
        return row

    def answer(self, prepared, draws=None):
        answers = []
        for row in prepared:
            draw, chunk = next(self.draws), np.zeros((HORIZON, 7), np.float32)
            chunk[:, 0], chunk[:, 1], chunk[:, 2] = row["prompt"] == "move", draw, np.arange(HORIZON)
            answers.append({"actions": chunk, "state": row["state"], "draw": draw})
        return answers


MADE: list["Reach"] = []


class Reach(StepBenchmark):
    """Two tasks; episode e begins at e, and succeeds at `goal`. An action's first dim is added to the place."""

    def __init__(self, goal=7, send_state=False, send_wrist_image=False):
        super().__init__()
        self.goal, self.sends, self.actions = goal, (send_state, send_wrist_image), []
        MADE.append(self)

    def get_tasks(self):
        return [{"name": "move"}, {"name": "stay"}]

    def reset(self, task):
        self.place = task["episode_idx"]
        self.actions.append([])
        return self.place

    def step(self, action):
        self.actions[-1].append(np.array(action["actions"]))
        self.place += int(action["actions"][0])
        return StepResult(obs=self.place, reward=0.0, done=self.place >= self.goal, info={})

    def make_obs(self, raw_obs, task):
        state, wrist = self.sends
        images = {"agentview": np.full((6, 6, 3), 10 * raw_obs, np.uint8)}
        images |= {"wrist": np.full((6, 6, 3), 10 * raw_obs + 1, np.uint8)} if wrist else {}
        states = {"states": np.full(8, raw_obs)} if state else {}
        return {"images": images, "task_description": task["name"], **states}

    def get_step_result(self, step_result):
        return {"success": step_result.done}

    def get_metadata(self):
        return {"max_steps": MAX_STEPS}


def form(policy, **options):
    return HarnessForm(policy.metadata, **options)


def harness_run(policy, folder, **options):
    """What the harness's own command does, in this process: its results."""
    benchmark = {"benchmark": f"{__name__}:Reach", "episodes_per_task": 3, "mode": "sync"}
    with serving(policy, harness=form(policy, **options)) as (port, _):
        config = {"benchmarks": [benchmark], "server": {"url": f"ws://127.0.0.1:{port}/vla-eval"}}
        return vla_eval.api.run(config, output_dir=folder, docker=False, no_save=True)


def test_the_harness_evaluates_a_policy(tmp_path):
    policy = Mover()
    MADE.clear()
    (results,) = harness_run(policy, tmp_path, execute=EXECUTE)
    (benchmark,) = MADE
    # What was asked for with the greeting: the policy reads both.
    assert benchmark.sends == (True, True)
    assert {task["task"]: task["mean_success"] for task in results["tasks"]} == {"move": 1.0, "stay": 0.0}
    # By hand: from 0, 1 and 2 to 7 in steps of 1; without a motion to the end.
    steps = [7, 6, 5, *[MAX_STEPS] * 3]
    assert [len(actions) for actions in benchmark.actions] == steps
    # A new chunk after three actions, and at every episode's start, whatever is left of the one before.
    chunks, number = iter(range(1000)), -1
    for actions in benchmark.actions:
        for step, action in enumerate(actions):
            number = next(chunks) if step % EXECUTE == 0 else number
            assert action.dtype == np.float32 and action[1:3].tolist() == [number, step % EXECUTE]
    asked = [*range(0, 7, EXECUTE), *range(1, 7, EXECUTE), *range(2, 7, EXECUTE)]
    for seen, place in zip(policy.seen, asked, strict=False):
        assert seen["image"].shape == (6, 6, 3) and (seen["image"] == 10 * place).all()
        assert (seen["wrist_image"] == 10 * place + 1).all() and (seen["state"] == place).all()
    assert len(policy.seen) == sum(-(-count // EXECUTE) for count in steps)


async def talk(port, *observations, starts=(0,)):
    """The greeting, and the actions that the harness's client gets; an episode starts before each of `starts`."""
    actions = []
    async with Connection(f"ws://127.0.0.1:{port}/vla-eval", timeout=20, max_retries=1) as connection:
        for number, observation in enumerate(observations):
            if number in starts:
                await connection.start_episode({"task": {"name": "x"}})
            actions.append((await connection.act(observation))["actions"])
        await connection.end_episode({"metrics": {"success": True}, "steps": 1})
    return connection.server_info, actions


def conversation(policy, *observations, starts=(0,), **options):
    with serving(policy, harness=form(policy, **options)) as (port, _):
        return asyncio.run(talk(port, *observations, starts=starts))


def observed(place=1, **changed):
    pictures = {name: np.full(shape, place, np.uint8) for name, shape in NAMES.items()}
    return {"images": pictures, "task_description": "move", "states": np.full(8, place, np.float64), **changed}


def test_the_harness_finds_liberos_conventions_equal():
    info, _ = conversation(Mover())
    benchmark = LIBEROBenchmark(**info["observation_params"])
    action, seen = (
        {key: DimSpec.from_dict(one) for key, one in info[name].items()} for name in ("action_spec", "observation_spec")
    )
    assert check_specs(action, benchmark.get_action_spec(), seen, benchmark.get_observation_spec()) == []
    assert [*action] == ["position", "rotation", "gripper"] and {"agentview", "wrist", "state", "language"} == {*seen}
    assert info["policy"] == {"experiment": "mine", "checkpoint": "x/4"}


def test_liberos_rotations_are_those_of_its_data():
    benchmark = LIBEROBenchmark(**form(Mover()).greeting()["observation_params"])
    # A turn by 4 rad about x. The harness's own rotation would be 4 - 2 pi; openpi's data have robosuite's.
    np.testing.assert_allclose(benchmark._quat_to_aa(np.array([np.sin(2), 0, 0, np.cos(2)])), [4, 0, 0], atol=1e-6)


def test_a_robot_without_common_conventions_says_its_names():
    spec = HarnessForm(Mover(Bridge()).metadata).greeting()["action_spec"]
    assert spec["actions"]["format"] == "raw" and spec["actions"]["dims"] == 7
    assert spec["actions"]["description"] == ", ".join(Bridge().action_names)


@pytest.mark.parametrize("encoding", ["png", "jpeg", "raw"])
def test_pictures_come_in_the_harnesss_three_forms(encoding, monkeypatch):
    monkeypatch.setattr(numpy_codec, "_image_format", encoding)
    picture = np.broadcast_to(np.linspace(0, 255, 16, dtype=np.uint8)[:, None, None], (16, 16, 3)).copy()
    policy = Mover()
    conversation(policy, observed(images={"agentview": picture, "wrist": picture}))
    # JPEG of quality 95: a few levels.
    np.testing.assert_allclose(policy.seen[0]["image"].astype(int), picture, atol=4 if encoding == "jpeg" else 0)


def test_an_empty_instruction_leaves_the_policys_own():
    _, (moved, stayed) = conversation(Mover(), observed(), observed(task_description=""), starts=(0, 1))
    assert (moved[0], stayed[0]) == (1, 0)


def test_a_history_is_that_of_the_episode():
    policy = Mover(history=3)
    conversation(policy, *map(observed, range(6)), starts=(0, 5), execute=4)
    states = [seen["state"][:, 0].tolist() for seen in policy.seen]
    # The first step of an episode is repeated; those of executed actions are in it.
    assert states == [[0, 0, 0], [2, 3, 4], [5, 5, 5]]


def test_missing_names_are_told_with_those_of_both_sides():
    sent = {"images": {"front": np.zeros((4, 4, 3), np.uint8)}, "task_description": "x", "joint_state": np.zeros(8)}
    with pytest.raises(RuntimeError) as refused:
        conversation(Mover(), sent)
    for part in ("'image' (from 'image' or 'agentview')", "'state' (from 'states' or 'state')"):
        assert part in str(refused.value)
    both = "reads image, wrist_image, state, prompt; the benchmark sends front, joint_state, task_description"
    assert both in str(refused.value)
    assert "--vla-eval-names NAME=ENTRY" in str(refused.value) and "send_wrist_image" in str(refused.value)


def test_names_are_given():
    sent = {"images": {"front": np.ones((4, 4, 3), np.uint8)}, "subgoal": "move", "joint_state": np.zeros(8)}
    policy = Mover()
    names = ("image=front", "wrist_image=front", "state=joint_state", "prompt=subgoal")
    info, (action,) = conversation(policy, sent, names=names)
    assert action[0] == 1 and "front" in info["observation_spec"]
    assert (policy.seen[0]["wrist_image"] == 1).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"names": ("top=front",)}, "top=front: the policy reads image, wrist_image, state, prompt, not one 'top'"),
        ({"execute": HORIZON + 1}, "--vla-eval-execute 9: the policy's chunks have 8 actions"),
    ],
)
def test_what_the_policy_has_not_is_refused_at_the_start(options, says):
    with pytest.raises(UsageError, match=says):
        form(Mover(), **options)


def test_a_client_that_a_simulator_holds_up_keeps_its_connection():
    async def held(port):
        async with Connection(f"ws://127.0.0.1:{port}/vla-eval", timeout=20, max_retries=1) as connection:
            await connection.start_episode({})
            numbers = [(await connection.act(observed()))["actions"][2]]
            time.sleep(1)  # without its event loop no ping is answered
            return [*numbers, (await connection.act(observed()))["actions"][2]]

    policy = Mover()
    with serving(policy, harness=form(policy), limits={"ping_s": 0.2}) as (port, _):
        # Action 1 of the same chunk: a new connection would begin with 0.
        assert asyncio.run(held(port)) == [0, 1]


def ask(connection, kind, payload, seq=1):
    connection.send(wire.encode({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}))
    return wire.decode(connection.recv(timeout=20))


@pytest.mark.parametrize(
    ("kind", "payload", "says"),
    [
        ("hello", {"protocol_version": 2}, "version 2 of the protocol is not known here, only 1"),
        ("dance", {}, "'dance' is not one of vla-evaluation-harness"),
        ("observation", [1], "a map with `type` and `payload`"),
        ("observation", observed(states={"__ndarray__": True, "data": b"12", "dtype": "|O", "shape": [1]}), "not read"),
        ("observation", observed(states={"left": 1}), "'states' is a map"),
        ("observation", observed(images={"agentview": {"__image__": True, "data": b"BM"}}), "neither a PNG nor a JPEG"),
        ("observation", observed(images={"agentview": {"__image__": True, "data": b"\xff\xd8\xff"}}), "cannot be read"),
        ("observation", observed(states=np.full(8, np.nan)), "the state holds NaN"),
    ],
)
def test_a_bad_message_is_an_error_with_its_number(kind, payload, says):
    policy = Mover()
    with (
        serving(policy, harness=form(policy)) as (port, _),
        connect(f"ws://127.0.0.1:{port}/vla-eval", compression=None) as connection,
    ):
        answer = ask(connection, kind, payload, seq=7)
        assert answer["type"] == "error" and says in answer["payload"]["error"]
        assert answer["seq"] == (0 if isinstance(payload, list) else 7)
        assert ask(connection, "hello", {"protocol_version": 1})["type"] == "hello"


def test_its_path_is_there_when_the_policy_is():
    policy = Mover()
    refused = []
    for served in (policy, StartProgress()):
        with serving(served) as (port, _), pytest.raises(InvalidStatus) as status:
            connect(f"ws://127.0.0.1:{port}/vla-eval")
        refused.append(status.value.response.status_code)
    assert refused == [404, 503]
