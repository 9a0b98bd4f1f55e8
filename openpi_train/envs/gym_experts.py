"""Scripted experts of Gymnasium's tasks: functions from an observation to an action, so they recover from disturbances.

FetchReach and FetchPush of gymnasium-robotics: an action is the motion of the gripper per control step, in units of
5 cm, and the opening of the fingers, which both tasks keep closed. Read next: `gym_env.py`, which calls them.
"""

from collections.abc import Callable, Mapping

import numpy as np

Expert = Callable[[Mapping[str, np.ndarray]], np.ndarray]

# Metres that an action of 1 moves the gripper in a control step, if nothing holds it.
_REACH_M = 0.05
# Where pushing begins: so far behind the block's centre, and so far above it on the way there.
_BEHIND_M, _ABOVE_M = 0.09, 0.09
# How far from the line of the push the gripper may be.
_ASIDE_M = 0.02
# A block this close to its goal stays there; the task succeeds within 5 cm.
_THERE_M = 0.015
# Share of the distance that a step of pushing asks for: a faster push would throw the block past its goal.
_PUSH_GAIN = 0.35


def reach(seen: Mapping[str, np.ndarray]) -> np.ndarray:
    """The action [4] of FetchReach: straight to the goal."""
    return _motion(seen["desired_goal"] - seen["achieved_goal"])


def push(seen: Mapping[str, np.ndarray]) -> np.ndarray:
    """The action [4] of FetchPush."""
    return _motion(pushing(seen["observation"][:3], seen["achieved_goal"], seen["desired_goal"]))


def pushing(gripper: np.ndarray, block: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """How far a gripper goes, in metres [3]: above the block to the place behind it, down, and on to the goal.

    The places [3] are in metres, too; the block's is its centre.
    """
    way = (goal - block)[:2]
    distance = float(np.linalg.norm(way))
    if distance < _THERE_M:
        return np.zeros(3)
    ahead = way / distance
    offset = (gripper - block)[:2]
    along = float(offset @ ahead)
    aside = float(np.linalg.norm(offset - along * ahead))
    behind = np.append(block[:2] - _BEHIND_M * ahead, block[2])
    is_low = gripper[2] < block[2] + _ABOVE_M / 3
    if is_low and aside < _ASIDE_M and along < 0:
        return _PUSH_GAIN * np.append(goal[:2] - block[:2] + _ASIDE_M * ahead, 0) + np.append(
            -0.5 * (offset - along * ahead), 0.3 * (block[2] - gripper[2])
        )
    if np.linalg.norm((behind - gripper)[:2]) < _ASIDE_M:
        return behind - gripper
    height = block[2] + _ABOVE_M
    if is_low:
        return np.append(np.zeros(2), height - gripper[2])
    return np.append((behind - gripper)[:2], height - gripper[2])


def _motion(metres: np.ndarray) -> np.ndarray:
    return np.append(np.clip(metres / _REACH_M, -1.0, 1.0), 0.0).astype(np.float32)


# By the source of a `GymEnv`.
EXPERTS: Mapping[str, Expert] = {
    "gymnasium_robotics:FetchReach-v4": reach,
    "gymnasium_robotics:FetchPush-v4": push,
}
