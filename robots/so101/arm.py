"""An SO-101 arm on a serial port: six Feetech STS3215 servos, in the units of LeRobot's datasets.

    with Arm("/dev/ttyACM0", read_calibration("follower.json"), "degrees", max_relative_target=5) as arm:
        arm.torque_on()
        state = arm.read()
        sent = arm.write(goal, state)

The packets are those of `scservo_sdk` (PyPI: feetech-servo-sdk). Registers, units and the check of the calibration are
those of LeRobot's `motors/feetech`, `motors/motors_bus.py` and `robots/so_follower`. Read next: `drive.py`.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import scservo_sdk

try:
    import termios

    _PORT_ERRORS: tuple[type[Exception], ...] = (OSError, termios.error)
except ImportError:  # Windows
    _PORT_ERRORS = (OSError,)

logger = logging.getLogger(__name__)

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
# The names of dims in LeRobot's datasets.
NAMES = tuple(f"{joint}.pos" for joint in JOINTS)
Units = Literal["degrees", "range"]

BAUD = 1_000_000
# LeRobot counts 4095 ticks to 360 degrees.
_MAX_TICK = 4095
_MIN_LIMIT, _MAX_LIMIT, _HOMING_OFFSET = 9, 11, 31
_TORQUE, _ACCELERATION, _GOAL, _PRESENT = 40, 41, 42, 56
_POSITION_SIGN, _OFFSET_SIGN = 15, 11


class ArmError(RuntimeError):
    """The arm does not answer, or is not the one of the calibration; the text says what to check."""


@dataclasses.dataclass(frozen=True)
class Joint:
    """Calibration of one servo: positions in ticks, `homing_offset` as in the servo's register."""

    id: int
    drive_mode: int
    homing_offset: int
    range_min: int
    range_max: int


def read_calibration(path: str | Path) -> list[Joint]:
    """The joints of a file of `lerobot-calibrate`, in the order of `JOINTS`. Raises ValueError for another file."""
    path = Path(path).expanduser()
    try:
        found = json.loads(path.read_text())
        joints = [Joint(**found[name]) for name in JOINTS]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no calibration of an SO-101 ({type(error).__name__}: {error}); make one with "
            "lerobot-calibrate, which says where it saves it"
        ) from error
    for name, joint in zip(JOINTS, joints, strict=True):
        if joint.range_min >= joint.range_max:
            raise ValueError(f"{path}: {name} has the range {joint.range_min} to {joint.range_max}: calibrate again")
    return joints


def to_units(ticks: np.ndarray, joints: list[Joint], units: Units) -> np.ndarray:
    """Positions [6] in LeRobot's units from ticks [6].

    "degrees" are LeRobot's with `use_degrees`, from the middle of the range; "range" is -100 to 100 over it. The
    gripper is 0 to 100 in both. Degrees have no drive mode, as in LeRobot.
    """
    low, high, inverted = _ranges(joints)
    share = (np.clip(ticks, low, high) - low) / (high - low)
    share = np.where(inverted, 1 - share, share)
    arm = (ticks - (low + high) / 2) * 360 / _MAX_TICK if units == "degrees" else 200 * share - 100
    return np.append(arm[:-1], 100 * share[-1])


def to_ticks(values: np.ndarray, joints: list[Joint], units: Units) -> np.ndarray:
    """Ticks [6], int, inside the calibrated range, from positions [6] in LeRobot's units.

    Rounded, so that a position that was read comes back; LeRobot truncates, which is at most one tick (0.09 degrees)
    less.
    """
    low, high, inverted = _ranges(joints)
    values = np.asarray(values, np.float64)
    share = np.append((values[:-1] + 100) / 200, values[-1] / 100)
    ticks = low + np.where(inverted, 1 - share, share) * (high - low)
    if units == "degrees":
        ticks[:-1] = (values * _MAX_TICK / 360 + (low + high) / 2)[:-1]
    return np.rint(np.clip(ticks, low, high)).astype(int)


def _ranges(joints: list[Joint]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high, inverted = np.array([(one.range_min, one.range_max, one.drive_mode) for one in joints]).T
    return low, high, inverted != 0


class Arm:
    """A context in which the port is open; torque is off when it ends, also after an error.

    Args:
        port: Such as /dev/ttyACM0.
        joints: As `read_calibration` gives them.
        units: See `to_units`.
        max_relative_target: The largest difference of a goal and the present position in one `write`, in these units,
            one for all joints or one for each; None: no limit. As in LeRobot.
        retries: How often a packet that was lost is sent again.

    Raises ArmError when entered, if a servo does not answer or has another calibration.
    """

    def __init__(
        self,
        port: str,
        joints: list[Joint],
        units: Units,
        *,
        max_relative_target: float | np.ndarray | None = None,
        retries: int = 3,
    ):
        self.joints = joints
        self.units: Units = units
        limit = np.inf if max_relative_target is None else max_relative_target
        self.max_relative_target = np.broadcast_to(np.asarray(limit, np.float64), len(JOINTS))
        if not (self.max_relative_target > 0).all():
            raise ValueError(f"max_relative_target {max_relative_target} must be above 0")
        self._port_name, self._retries = port, retries
        self._port = scservo_sdk.PortHandler(port)
        self._packets = scservo_sdk.PacketHandler(0)
        self._reader = scservo_sdk.GroupSyncRead(self._port, self._packets, _PRESENT, 2)
        for joint in joints:
            self._reader.addParam(joint.id)

    def __enter__(self) -> "Arm":
        try:
            self._port.openPort()
        except _PORT_ERRORS as error:
            raise ArmError(
                f"{self._port_name} cannot be opened ({error}): is the arm's USB cable in, is it the right port "
                "(lerobot-find-port), may you read it (group dialout), does another program use it?"
            ) from error
        try:
            self._check_calibration()
            self.torque_off()
        except BaseException:
            self._port.closePort()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.torque_off()
        except ArmError as still_on:
            if error is None:
                raise
            logger.error("%s", still_on)
        finally:
            self._port.closePort()

    def read(self) -> np.ndarray:
        """The present positions [6], float32, in units. Raises ArmError if they do not come."""
        self._retry(self._reader.txRxPacket, "positions were asked for")
        words = [self._reader.getData(joint.id, _PRESENT, 2) for joint in self.joints]
        ticks = np.array([scservo_sdk.SCS_TOHOST(word, _POSITION_SIGN) for word in words])
        return to_units(ticks, self.joints, self.units).astype(np.float32)

    def write(self, goal: np.ndarray, present: np.ndarray) -> np.ndarray:
        """Send the goals [6] in units, limited as calibration and `max_relative_target` say.

        `present` are the present positions as `read` gave them. Returns the goals [6], float32, that were sent. Raises
        ValueError for goals that are no numbers, ArmError if they cannot be sent.
        """
        goal = np.asarray(goal, np.float64)
        if goal.shape != (len(JOINTS),) or not np.isfinite(goal).all():
            raise ValueError(f"goals must be {len(JOINTS)} numbers, not {goal}")
        goal = np.clip(goal, present - self.max_relative_target, present + self.max_relative_target)
        ticks = to_ticks(goal, self.joints, self.units)
        writer = scservo_sdk.GroupSyncWrite(self._port, self._packets, _GOAL, 2)
        for joint, tick in zip(self.joints, ticks.tolist(), strict=True):
            word = scservo_sdk.SCS_TOSCS(tick, _POSITION_SIGN)
            writer.addParam(joint.id, [scservo_sdk.SCS_LOBYTE(word), scservo_sdk.SCS_HIBYTE(word)])
        self._retry(writer.txPacket, "goals were sent")
        return to_units(ticks, self.joints, self.units).astype(np.float32)

    def torque_on(self) -> None:
        """Hold the present position; goals of an earlier program are forgotten, so that the arm does not jump."""
        present = self.read()
        self.write(present, present)
        for name, joint in zip(JOINTS, self.joints, strict=True):
            self._write_byte(name, joint, _ACCELERATION, 254)  # as LeRobot: the limit is that of the goals
            self._write_byte(name, joint, _TORQUE, 1)

    def torque_off(self) -> None:
        """Let go of the arm. Every servo is tried; raises ArmError naming those that do not confirm it."""
        failed: dict[str, str] = {}
        for name, joint in zip(JOINTS, self.joints, strict=True):
            try:
                self._write_byte(name, joint, _TORQUE, 0)
            except ArmError as error:
                failed[name] = str(error)
        if failed:
            raise ArmError(
                f"{', '.join(failed)} may still have torque: take the arm's power off. {next(iter(failed.values()))}"
            )

    def _check_calibration(self) -> None:
        """Raise ArmError if limits and offset in the servos are not those of the file."""
        for name, joint in zip(JOINTS, self.joints, strict=True):
            offset = scservo_sdk.SCS_TOHOST(self._read_word(name, joint, _HOMING_OFFSET), _OFFSET_SIGN)
            found = (offset, self._read_word(name, joint, _MIN_LIMIT), self._read_word(name, joint, _MAX_LIMIT))
            wanted = (joint.homing_offset, joint.range_min, joint.range_max)
            if found != wanted:
                raise ArmError(
                    f"{name} (id {joint.id}) on {self._port_name} has offset, minimum and maximum {found}, the "
                    f"calibration file {wanted}: it is another arm's (leader and follower exchanged?), or an older "
                    "one. Give the right file, or run lerobot-calibrate"
                )

    def _read_word(self, name: str, joint: Joint, address: int) -> int:
        def ask() -> int:
            nonlocal word
            word, result, _ = self._packets.read2ByteTxRx(self._port, joint.id, address)
            return result

        word = 0
        self._retry(ask, f"{name} (id {joint.id}) was asked")
        return word

    def _write_byte(self, name: str, joint: Joint, address: int, value: int) -> None:
        def send() -> int:
            result, error = self._packets.write1ByteTxRx(self._port, joint.id, address, value)
            if result == scservo_sdk.COMM_SUCCESS and error:
                logger.warning("%s (id %d): %s", name, joint.id, self._packets.getRxPacketError(error))
            return result

        self._retry(send, f"{name} (id {joint.id}) was written")

    def _retry(self, send: Callable[[], int], what: str) -> None:
        """Call `send` until it returns success. Raises ArmError after `retries` more times."""
        result = scservo_sdk.COMM_PORT_BUSY
        for _ in range(1 + self._retries):
            self._port.is_using = False  # an interrupted packet leaves it on
            assert self._port.ser is not None, "read and write inside the context"
            try:
                self._port.ser.reset_input_buffer()  # late answers to a question that was given up
                result = send()
            except _PORT_ERRORS as error:
                raise ArmError(f"{self._port_name} is gone ({error}): check the USB cable") from error
            if result == scservo_sdk.COMM_SUCCESS:
                return
        raise ArmError(
            f"{what} on {self._port_name} {1 + self._retries} times without success "
            f"({self._packets.getTxRxResult(result)}): check the arm's power supply, the cable from servo to servo, "
            "and that no other program uses the port"
        )
