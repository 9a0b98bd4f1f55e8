"""The driver of an SO-101 before a bus that answers the protocol, through the real `scservo_sdk`."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scservo_sdk", reason="the extra so101")
if sys.platform == "win32":
    pytest.skip("pseudo-terminals", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "robots" / "so101"))

from arm import Arm, ArmError, read_calibration, to_ticks, to_units
from made_arm import FOLLOWER, LEADER, bus, save
from servo_bus import SYNC_READ, SYNC_WRITE, WRITE, packet

# Ticks, and what LeRobot's formulas give by hand: 4095 ticks are 360 degrees, so 11.375 are one.
# degrees: (2455 - 2000) / 11.375 = 40; (1545 - 2000) / 11.375 = -40; 0 - 2047.5 = -180.
# range: (2455 - 1000) / 2000 * 200 - 100; -((1545 - 800) / 2400 * 200 - 100), since the drive mode is 1.
TICKS = [2455, 1545, 2000, 2050, 0, 2375]
DEGREES = [40, -40, 0, 0, -180, 25]
RANGE = [45.5, 37.916666, 0, 0, -100, 25]


@pytest.fixture
def joints(tmp_path):
    return read_calibration(save(FOLLOWER, tmp_path / "follower.json"))


@pytest.fixture
def servos():
    made = bus(FOLLOWER, dict(enumerate(TICKS, start=1)))
    yield made
    made.close()


@pytest.mark.parametrize("units, expected", [("degrees", DEGREES), ("range", RANGE)])
def test_units_are_those_of_lerobot(joints, units, expected):
    np.testing.assert_allclose(to_units(np.array(TICKS), joints, units), expected, atol=1e-6)
    assert to_ticks(np.array(expected), joints, units).tolist() == TICKS


@pytest.mark.parametrize("units", ["degrees", "range"])
def test_every_position_inside_the_range_comes_back(joints, units):
    for ticks in (
        [1000, 800, 900, 850, 0, 2000],
        [1777, 2999, 901, 3249, 4094, 2001],
        [3000, 3200, 3100, 3250, 4095, 3500],
    ):
        seen = to_units(np.array(ticks), joints, units).astype(np.float32)
        assert to_ticks(seen, joints, units).tolist() == ticks


def test_goals_beyond_the_calibrated_range_end_at_it(joints):
    assert to_ticks(np.array([999.0] * 6), joints, "degrees").tolist() == [3000, 3200, 3100, 3250, 4095, 3500]
    assert to_ticks(np.array([-999.0] * 6), joints, "range").tolist() == [1000, 3200, 900, 850, 0, 2000]


def test_positions_are_read_in_one_question_and_a_set_bit_15_is_a_sign(joints, servos):
    with Arm(servos.port, joints, "degrees") as arm:
        np.testing.assert_allclose(arm.read(), DEGREES, atol=1e-5)
        servos.set_word(5, 56, 0x8000 | 91)  # -91 ticks: (-91 - 2047.5) / 11.375
        assert arm.read()[4] == pytest.approx(-188.0)


def test_a_goal_is_limited_from_the_present_position_and_what_was_sent_is_returned(joints, servos):
    with Arm(servos.port, joints, "degrees", max_relative_target=8) as arm:
        arm.torque_on()
        state = arm.read()
        sent = arm.write(state + np.array([8, -8, 100, -100, 1, 0]), state)
        # Goals have no answer: that to a later question says that they are there.
        np.testing.assert_allclose(arm.read(), sent, atol=1e-5)
        assert [servos.word(number, 42) for number in range(1, 7)] == [
            2455 + 91,
            1545 - 91,
            2000 + 91,
            2050 - 91,
            11,
            2375,
        ]
        one_tick = 360 / 4095
        np.testing.assert_allclose(sent[2:5], [8, -8, 11 * one_tick - 180], atol=1e-4)
    written = [entry[1] for entry in servos.log if entry[0] == SYNC_WRITE and entry[2] == 42]
    assert written == [1, 2, 3, 4, 5, 6] * 2  # the hold of torque_on, and one packet for all joints


def test_limits_may_differ_by_joint_and_goals_must_be_numbers(joints, servos):
    with Arm(servos.port, joints, "range", max_relative_target=np.array([10.0, 1, 1, 1, 1, 50])) as arm:
        state = arm.read()
        sent = arm.write(state + 100, state)
        np.testing.assert_allclose(sent - state, [10, 1, 1, 1, 1, 50], atol=0.1)
        arm.read()  # the goals are there
        before = len(servos.log)
        with pytest.raises(ValueError, match="must be 6 numbers"):
            arm.write(np.full(6, np.nan), state)
        arm.read()
        assert len(servos.log) == before
    with pytest.raises(ValueError, match="must be above 0"):
        Arm(servos.port, joints, "range", max_relative_target=0)


def test_torque_comes_on_at_the_present_position(joints, servos):
    for number in range(1, 7):
        servos.set_word(number, 42, 1234)  # the goal of an earlier program
    with Arm(servos.port, joints, "degrees") as arm:
        arm.torque_on()
        assert servos.torques == [1] * 6
        assert [servos.word(number, 56) for number in range(1, 7)] == TICKS
    assert servos.torques == [0] * 6


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_torque_is_off_after_an_exception(joints, servos, error):
    with pytest.raises(error, match="mine"):
        with Arm(servos.port, joints, "degrees") as arm:
            arm.torque_on()
            arm._port.is_using = True  # in the middle of a packet
            raise error("mine")
    assert servos.torques == [0] * 6


def test_an_answer_that_is_lost_is_asked_for_again(joints, servos):
    lost = []

    def drop(instruction, number):
        if instruction in (SYNC_READ, WRITE) and number in (1, 4) and lost.count((instruction, number)) < 2:
            lost.append((instruction, number))
            return True
        return False

    with Arm(servos.port, joints, "degrees") as arm:
        servos.drop = drop
        np.testing.assert_allclose(arm.read(), DEGREES, atol=1e-5)
        arm.torque_on()
    assert len(lost) == 8 and servos.torques == [0] * 6


def test_a_servo_that_never_answers_is_an_error_that_says_what_to_check_and_the_others_let_go(joints, servos):
    with pytest.raises(ArmError, match=r"positions were asked for on .* 4 times .*power supply.*cable"):
        with Arm(servos.port, joints, "degrees") as arm:
            arm.torque_on()
            servos.drop = lambda instruction, number: number == 3
            arm.read()
    assert servos.torques == [0] * 6  # the third, too: only its answer was lost
    servos.drop = lambda instruction, number: number == 3
    with pytest.raises(ArmError, match=r"elbow_flex \(id 3\) was asked"):
        Arm(servos.port, joints, "degrees").__enter__()


def test_torque_that_is_not_confirmed_off_is_told(joints, servos):
    with pytest.raises(ArmError, match=r"^wrist_roll may still have torque: take the arm's power off"):
        with Arm(servos.port, joints, "degrees") as arm:
            arm.torque_on()
            servos.drop = lambda instruction, number: number == 5


def test_the_calibration_of_another_arm_is_refused(tmp_path, servos):
    leader = read_calibration(save(LEADER, tmp_path / "leader.json"))
    with pytest.raises(ArmError, match=r"shoulder_pan \(id 1\).*\(-500, 1000, 3000\).*leader and follower exchanged"):
        Arm(servos.port, leader, "degrees").__enter__()
    assert not servos.log


def test_files_that_are_no_calibration_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json is no calibration of an SO-101.*lerobot-calibrate"):
        read_calibration(tmp_path / "none.json")
    (tmp_path / "part.json").write_text(json.dumps({"gripper": {"id": 6}}))
    with pytest.raises(ValueError, match="KeyError"):
        read_calibration(tmp_path / "part.json")
    empty = {**FOLLOWER, "gripper": (6, 0, 0, 2000, 2000)}
    with pytest.raises(ValueError, match="gripper has the range 2000 to 2000"):
        read_calibration(save(empty, tmp_path / "empty.json"))


def test_a_port_that_is_not_there_is_an_error_that_says_what_to_check(joints):
    with pytest.raises(ArmError, match=r"/dev/nowhere cannot be opened .*USB cable.*lerobot-find-port.*dialout"):
        Arm("/dev/nowhere", joints, "degrees").__enter__()


def test_a_port_that_goes_away_is_an_error(joints, servos):
    with pytest.raises(ArmError, match="is gone"):
        with Arm(servos.port, joints, "degrees") as arm:
            os.close(arm._port.ser.fd)
            arm._port.ser.fd = os.open("/dev/null", os.O_RDWR)
            arm.read()


def test_the_bus_of_these_tests_checks_packets_as_the_manual_does():
    # The manual's example: a ping of servo 1 is FF FF 01 02 01 FB.
    assert packet(1, bytes([1])).hex() == "ffff010201fb"
