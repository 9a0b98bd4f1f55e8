"""Scripted experts of ManiSkill's tasks, from what its simulator knows and a policy that sees pictures does not.

An action is one of its controller `pd_ee_delta_pose`, of a Panda: the gripper's motion in units of 10 cm, its rotation
in units of 0.1 rad, and the fingers, from -1 (closed) to 1 (open). Read next: `maniskill.py`, which gives the poses.
"""

from collections.abc import Mapping

import numpy as np

from openpi_train.envs.gym_experts import Expert, pushing

# Metres that an action of 1 asks for in a control step, and the radians. The arm comes about a third of the way.
_MOVE_M, _TURN_RAD = 0.1, 0.1
_OPEN, _CLOSED = 1.0, -1.0
# The side of a cube, and how wide the fingers are apart that hold one or are open.
_SIDE_M, _HELD_M, _OPEN_M = 0.04, 0.043, 0.06
# How far above a cube the gripper goes to it, or carries another one over it.
_ABOVE_M = 0.08
# How exactly the gripper is above a cube, around it, and carries one above another; how exactly it is turned.
_ASIDE_M, _AROUND_M, _OVER_M, _TURNED_RAD = 0.015, 0.01, 0.01, 0.15


def push_cube(known: Mapping[str, np.ndarray]) -> np.ndarray:
    """The action [7] of PushCube: around the cube, and to its goal with closed fingers."""
    return _action(pushing(known["tcp"][:3], known["cube"][:3], known["goal_region"][:3]), 0.0, _CLOSED)


def stack_cube(known: Mapping[str, np.ndarray]) -> np.ndarray:
    """The action [7] of StackCube: above cube A, down, grasp, up, above cube B, down, and let go."""
    gripper, cube, other = (known[name][:3] for name in ("tcp", "cubeA", "cubeB"))
    width = float(known["fingers"].sum())
    over = other - cube + np.array([0, 0, _SIDE_M])
    is_on = np.linalg.norm(over[:2]) < _SIDE_M / 2 and abs(over[2]) < 0.004
    if is_on:
        return _action(np.array([0, 0, 0.0 if width < _OPEN_M else 0.05]), 0.0, _OPEN)
    way = cube - gripper
    if np.linalg.norm(way) < 1.5 * _AROUND_M and width < _HELD_M:
        if np.linalg.norm(over[:2]) < _OVER_M:
            return _action(np.append(over[:2], over[2]), 0.0, _CLOSED)
        return _action(_at_height(over[:2], cube, other[2] + _ABOVE_M, other[2] + 0.06), 0.0, _CLOSED)
    if np.linalg.norm(way) < _AROUND_M:
        return _action(way, 0.0, _CLOSED)
    turn = _quarter_turn(known["cubeA"][3:], known["tcp"][3:])
    if np.linalg.norm(way[:2]) < _ASIDE_M and abs(turn) < _TURNED_RAD:
        return _action(way, turn, _OPEN)
    return _action(_at_height(way[:2], gripper, cube[2] + _ABOVE_M, cube[2] + 0.05), turn, _OPEN)


def _at_height(way: np.ndarray, place: np.ndarray, height: float, lowest: float) -> np.ndarray:
    """The motion [3] along `way` [2] at a height; only upwards from places below the lowest one."""
    return np.append(way if place[2] > lowest else np.zeros(2), height - place[2])


def _quarter_turn(cube: np.ndarray, gripper: np.ndarray) -> float:
    """The smallest turn about the vertical, in radians, that makes the fingers parallel to the cube's sides.

    Quaternions are (w, x, y, z). The gripper points down, so its second axis, along which the fingers move, is level.
    """
    turn = _heading(cube) - _heading(gripper)
    return float((turn + np.pi / 4) % (np.pi / 2) - np.pi / 4)


def _heading(quaternion: np.ndarray) -> float:
    """The direction of the second axis of a pose, as an angle from the first axis of the world."""
    w, x, y, z = quaternion
    return float(np.arctan2(1 - 2 * (x * x + z * z), 2 * (x * y - w * z)))


def _action(motion: np.ndarray, turn: float, fingers: float) -> np.ndarray:
    """Of a motion in metres, a turn in radians about the vertical, and the fingers."""
    # The controller turns against the sign of its action.
    parts = np.array([*(motion / _MOVE_M), 0.0, 0.0, -turn / _TURN_RAD, fingers])
    return np.clip(parts, -1.0, 1.0).astype(np.float32)


# By the source of a `GymEnv`.
EXPERTS: Mapping[str, Expert] = {
    "maniskill:PushCube-v1": push_cube,
    "maniskill:StackCube-v1": stack_cube,
}
