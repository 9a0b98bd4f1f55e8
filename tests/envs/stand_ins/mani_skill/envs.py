"""Stands in for ManiSkill, with its interface: a task on a line, whose values are batches of one."""

import gymnasium
import numpy as np
from gymnasium.envs.registration import register


class PickCube(gymnasium.Env):
    """The cube is picked when the hand is at 1."""

    def __init__(self, num_envs, obs_mode, control_mode, sim_backend):
        assert (num_envs, obs_mode, control_mode, sim_backend) == (1, "rgb", "pd_ee_delta_pose", "cpu")
        self.num_envs = num_envs
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self.observation_space = gymnasium.spaces.Dict()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(0, 0.5, 1), 0
        return self._seen(), {}

    def step(self, action):
        self.place, self.steps = self.place + action[:1], self.steps + 1
        success = self.place > 1
        return self._seen(), np.array([0.5]), success, np.array([False]), {"success": success}

    def _seen(self):
        return {
            "agent": {"qpos": np.repeat(self.place, 9)[None], "qvel": np.zeros((1, 9))},
            "extra": {"tcp_pose": np.zeros((1, 7))},
            "sensor_param": {"base_camera": {"intrinsic_cv": np.eye(3)[None]}},
            "sensor_data": {"base_camera": {"rgb": np.full((1, 4, 4, 3), self.steps, np.uint8)}},
        }


register("PickCube-v1", entry_point=PickCube, max_episode_steps=50, disable_env_checker=True)
