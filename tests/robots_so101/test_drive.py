"""An episode with an intervention, on two arms whose buses answer the protocol, recorded and read again."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scservo_sdk", reason="the extra so101")
if sys.platform == "win32":
    pytest.skip("pseudo-terminals", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "robots" / "so101"))

import drive
from arm import NAMES, Arm, ArmError, read_calibration
from made_arm import FOLLOWER, LEADER, bus, save

from openpi_train.data.formats.lerobot import LeRobot, LeRobotWriter
from openpi_train.serve.asynchronous import AsynchronousActor

ABOUT = {
    "control_hz": 30.0,
    "num_executed": 8,
    "action_names": list(NAMES),
    "state_names": list(NAMES),
    "observation": {"observation/images/front": {}, "state": {}},
}
# All joints in the middle; the leader's wrist and gripper have other middles.
FOLLOWER_TICKS = {1: 2000, 2: 2000, 3: 2000, 4: 2050, 5: 2048, 6: 2750}
LEADER_TICKS = dict.fromkeys(range(1, 7), 2000)
# The first joint's goals. The policy moves it 8 degrees (91 ticks) per step from where it was asked. The person's arm
# is at these ticks from step 3 on: the follower comes 91 at a time, arrives in step 5, and does not lose the mark when
# the person is too fast in step 7. The policy goes on in step 8 from where the arm is.
PERSON = {3: 2045, 4: 2045, 5: 2045, 6: 1955, 7: 1755}
SENT = [2091, 2182, 2273, 2182, 2091, 2045, 1955, 1864, 1955, 2046]
MARKED = [False] * 5 + [True] * 3 + [False] * 2


class Still:
    """A camera whose pictures are as bright as there were looks."""

    def __init__(self):
        self.looks = 0

    def read(self):
        self.looks += 1
        return np.full((32, 48, 3), 10 * self.looks, np.uint8)


@pytest.fixture
def servos():
    made = bus(FOLLOWER, FOLLOWER_TICKS), bus(LEADER, LEADER_TICKS)
    yield made
    for one in made:
        one.close()


@pytest.fixture
def arms(servos, tmp_path):
    follower = read_calibration(save(FOLLOWER, tmp_path / "follower.json"))
    leader = read_calibration(save(LEADER, tmp_path / "leader.json"))
    limited = Arm(servos[0].port, follower, "degrees", max_relative_target=8)
    with limited as one, Arm(servos[1].port, leader, "degrees") as other:
        one.torque_on()
        yield one, other


class Policy:
    """Each chunk moves the first joint by 8 degrees per step, from the state of the observation on."""

    def __init__(self):
        self.asked = []

    def __call__(self, observation):
        self.asked.append(observation)
        actions = np.tile(np.asarray(observation["state"]).reshape(-1, 6)[-1], (8, 1))
        actions[:, 0] += 8 * np.arange(1, 9)
        return {"actions": actions}


def run(arms, leader_servos, num_steps=10, history=1, script=PERSON):
    """The episode in which a person has the steps of `script`, and what the policy was asked."""
    policy, step = Policy(), iter(range(num_steps))

    def ask():
        now = next(step)
        if now in script:
            leader_servos.set_word(1, 56, script[now])
        return "person" if now in script else "policy"

    actor = AsynchronousActor(policy, ABOUT)
    observer = drive.Observer(arms[0], {"front": Still()}, "push", history)
    how = {"num_steps": num_steps, "sleep": lambda seconds: None}
    try:
        return drive.run_episode(actor, observer, *arms, ask, **how), policy.asked
    finally:
        actor.close()


def test_an_episode_with_an_intervention_is_recorded_with_the_actions_that_were_sent_and_its_flags(
    arms, servos, tmp_path
):
    episode, asked = run(arms, servos[1])
    arms[0].read()  # goals have no answer: this one says that the last ones are there
    goals = [
        int.from_bytes(data, "little") for _, number, address, data in servos[0].log if (number, address) == (1, 42)
    ]
    assert goals == [2000, *SENT]  # the first held the arm when torque came on
    assert len(asked) == 2 and all(one["prompt"] == "push" for one in asked)
    np.testing.assert_allclose(asked[1]["state"][0], (1864 - 2000) / 11.375, atol=1e-4)
    assert asked[1]["observation/images/front"][0, 0, 0] == 90

    writer = LeRobotWriter(tmp_path / "made", fps=30, features=drive.features({"front": Still()}))
    episode.write(writer, "push")
    writer.finish()
    found = LeRobot(path=str(tmp_path / "made")).open()
    assert np.ravel(found.columns["is_intervention"]).tolist() == MARKED
    assert found.columns["is_intervention"].dtype == bool
    expected = (np.array(SENT) - 2000) / 11.375
    np.testing.assert_allclose(found.columns["action"][:, 0], expected, atol=1e-4)
    # The state of each step is where the action before it has led; the other joints stand.
    np.testing.assert_allclose(found.columns["observation/state"][:, 0], [0, *expected[:-1]], atol=1e-4)
    np.testing.assert_allclose(found.columns["action"][:, 1:], [[0, 0, 0, 0.5 / 11.375, 50]] * 10, atol=1e-4)
    assert found.prompts == ["push"] and found.cameras == ("observation/images/front",)


def test_an_episode_ends_when_asked_to_and_a_person_who_was_never_where_the_arm_is_marks_nothing(arms, servos):
    episode, _ = run(arms, servos[1], num_steps=5, script=dict.fromkeys(range(5), 1200))
    assert episode.is_intervention == [False] * 5 and len(episode.pictures["front"]) == 5
    actor = AsynchronousActor(Policy(), ABOUT)
    observer = drive.Observer(arms[0], {}, "push")
    answers = iter(["policy", None])
    ended = drive.run_episode(actor, observer, *arms, lambda: next(answers), num_steps=9, sleep=lambda seconds: None)
    assert len(ended.states) == 1
    actor.close()


def test_a_policy_with_a_history_sees_the_steps_before_and_the_first_one_repeated(arms, servos):
    _, asked = run(arms, servos[1], history=3)
    first, second = (one["state"][:, 0] * 11.375 + 2000 for one in asked)
    np.testing.assert_allclose(first, [2000] * 3, atol=0.01)
    np.testing.assert_allclose(second, [2045, 1955, 1864], atol=0.01)
    assert asked[1]["observation/images/front"].shape == (3, 32, 48, 3)


def test_torque_is_off_when_a_servo_is_lost_in_an_episode(servos, tmp_path):
    follower = read_calibration(save(FOLLOWER, tmp_path / "follower.json"))
    with pytest.raises(ArmError, match="positions were asked for"):
        with Arm(servos[0].port, follower, "degrees") as arm:
            arm.torque_on()
            lost = iter([False] * 12)
            servos[0].drop = lambda instruction, number: next(lost, number == 2)
            run((arm, None), servos[1], script={})
    assert servos[0].torques == [0] * 6


def test_a_policy_of_another_robot_or_with_other_cameras_is_refused():
    drive.check_policy(ABOUT, {"front": None, "more": None})
    with pytest.raises(ValueError, match=r"state_names are x, y, and those of an SO-101 shoulder_pan\.pos"):
        drive.check_policy({**ABOUT, "state_names": ["x", "y"]}, {"front": None})
    with pytest.raises(ValueError, match="add --cameras front SOURCE"):
        drive.check_policy(ABOUT, {"wrist": None})
