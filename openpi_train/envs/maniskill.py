"""ManiSkill 3 (Tao et al. 2024): its tasks as Gymnasium environments, where the package `mani_skill` is installed.

`--env maniskill:ID` is a task, such as maniskill:PickCube-v1: a `GymEnv` on its CPU simulator. Names are those of its
observations (ManiSkill's docs, `user_guide/concepts/observation.md`): the cameras of `sensor_data`, and as the state
all vectors, `agent/qpos`, `agent/qvel` and those of `extra`, where goals are. Unless others are given (`--env.make`)
the observation mode is `rgb`, and actions are those of the controller `pd_ee_delta_pose`: for a Panda three deltas of
position, three of rotation, and the gripper, in -1..1. Read next: `gym_env.py`, `in_processes.py`, in which it runs.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from openpi_train.envs.gym_observation import entries
from openpi_train.envs.unattended import answering
from openpi_train.runtime.exits import UsageError

# ManiSkill has no instructions, so these are ours. Of other tasks the name is the instruction.
INSTRUCTIONS = {
    "AssemblingKits-v1": "put the piece into its place in the kit",
    "LiftPegUpright-v1": "stand the peg upright",
    "PegInsertionSide-v1": "insert the peg into the hole from the side",
    "PickCube-v1": "pick up the cube and bring it to the goal",
    "PickSingleYCB-v1": "pick up the object and bring it to the goal",
    "PlaceSphere-v1": "put the sphere into the bin",
    "PlugCharger-v1": "plug the charger into the socket",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCube-v1": "pull the cube to the goal",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushCube-v1": "push the cube to the goal",
    "PushT-v1": "push the T onto its outline",
    "RollBall-v1": "roll the ball to the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "StackPyramid-v1": "build a pyramid of the three cubes",
    "TurnFaucet-v1": "turn the faucet",
}
# Of tasks that do not say so themselves.
_MAX_STEPS, _CONTROL_HZ = 100, 20
_NO_LIMIT = 10**9
# What a simulator is made with, unless the user gives others.
_MADE = {"obs_mode": "rgb", "control_mode": "pd_ee_delta_pose", "sim_backend": "cpu"}


def settings(task: str) -> dict[str, Any]:
    """The fields of the `GymEnv` of a task: instruction, entry of success, limit, and control rate.

    Raises UsageError if ManiSkill is not installed or has no such task.
    """
    limit = spec(task).max_episode_steps
    words = task.partition("-")[0]
    spelt = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in words).strip()
    return {
        "prompt": INSTRUCTIONS.get(task, spelt),
        "success_entry": "success",
        "step_limit": limit or _MAX_STEPS,
        "rate_hz": float(_CONTROL_HZ),
    }


def simulator(task: str, **given: object) -> Any:
    """A new simulator of this task, whose observations are vectors and pictures by name, with these arguments of its
    own. Raises UsageError if it lacks what it needs: files, or Vulkan.
    """
    spec(task)
    made = importlib.import_module("gymnasium").make
    try:
        # Time is counted by whoever acts. Gymnasium's -1 would mean that every step of ManiSkill is its last one.
        with answering("n"):
            inner = made(task, num_envs=1, max_episode_steps=_NO_LIMIT, **{**_MADE, **given})
    except SystemExit as error:  # it has asked whether to load files
        raise UsageError(
            f"maniskill:{task} needs files that are not here: python -m mani_skill.utils.download_asset {task}"
        ) from error
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in ("vk::", "vulkan", "physical device")):
            raise
        raise UsageError(
            f"maniskill:{task}: ManiSkill needs Vulkan, of a GPU's driver or of Mesa 23 or later ({error}): install "
            "mesa-vulkan-drivers and libvulkan1; on Debian 12 those of its backports"
        ) from error
    return _Flat(importlib.import_module("mani_skill.utils.wrappers.gymnasium").CPUGymWrapper(inner))


def flat(seen: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """ManiSkill's observation as `GymEnv` reads it: pictures by camera, all else by its path, as in `agent/qpos`."""
    if not isinstance(seen, Mapping):
        return entries(np.asarray(seen))
    pictures = {
        camera: np.asarray(data["rgb"]) for camera, data in seen.get("sensor_data", {}).items() if "rgb" in data
    }
    rest = {name: one for name, one in seen.items() if name not in ("sensor_data", "sensor_param")}
    return {**entries(rest), **pictures}


class _Flat:
    """A simulator with flat observations."""

    def __init__(self, made: Any):
        self._made, self.action_space = made, made.action_space

    def reset(self, *, seed: int) -> tuple[dict[str, np.ndarray], Any]:
        seen, told = self._made.reset(seed=seed)
        return flat(seen), told

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, Any]:
        seen, reward, terminated, truncated, told = self._made.step(action)
        return flat(seen), float(reward), bool(terminated), bool(truncated), told

    def known(self) -> dict[str, np.ndarray]:
        """What an expert goes by: the pose [7] of each object by its name and of the gripper's centre, `tcp`, a place
        and a quaternion (w, x, y, z); and how far each finger is from the centre, `fingers` [2].
        """
        inner = self._made.unwrapped
        poses = {name: actor.pose for name, actor in inner.scene.actors.items()} | {"tcp": inner.agent.tcp.pose}
        known = {name: pose.raw_pose[0].numpy() for name, pose in poses.items()}
        return known | {"fingers": inner.agent.robot.get_qpos()[0, -2:].numpy()}

    def close(self) -> None:
        self._made.close()


def spec(task: str) -> Any:
    """What Gymnasium knows of a task."""
    try:
        importlib.import_module("mani_skill.envs")  # which registers its tasks
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise UsageError(
            f"maniskill:{task}: ManiSkill cannot be imported ({error}): pip install mani_skill (it needs Vulkan)"
        ) from error
    try:
        return gymnasium.spec(task)
    except gymnasium.error.Error as error:
        raise UsageError(f"maniskill:{task}: {error}") from error
