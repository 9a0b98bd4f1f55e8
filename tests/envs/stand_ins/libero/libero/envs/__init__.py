"""The simulator: it succeeds when the hand is at 0.2 or beyond."""

import os

import numpy as np

MADE = []


class OffScreenRenderEnv:
    def __init__(self, bddl_file_name, camera_heights, camera_widths):
        assert os.path.exists(bddl_file_name)
        self.task, self.size, self.actions = os.path.basename(bddl_file_name), (camera_heights, camera_widths), []
        self.seeds, self.closed = [], False
        MADE.append(self)

    def seed(self, seed):
        self.seeds.append(seed)
        np.random.seed(seed)

    def reset(self):
        self.place, self.actions = np.random.uniform(0, 0.1, 3), []
        return self._seen()

    def set_init_state(self, state):
        self.place = np.array(state)
        return self._seen()

    def step(self, action):
        self.actions.append(np.asarray(action).tolist())
        self.place = self.place + 0.01 * np.asarray(action)[:3]
        return self._seen(), 0.0, self.check_success(), {}

    def check_success(self):
        return bool(self.place[0] >= 0.2)

    def close(self):
        self.closed = True

    def _seen(self):
        """The pictures have the row in red, the column in green; blue is the camera."""
        height, width = self.size
        rows, columns = np.mgrid[:height, :width]
        pictures = [np.stack([rows, columns, np.full(self.size, camera)], -1).astype(np.uint8) for camera in (0, 1)]
        return {
            "agentview_image": pictures[0],
            "robot0_eye_in_hand_image": pictures[1],
            "robot0_eef_pos": self.place,
            "robot0_eef_quat": np.array([0.0, 0.0, np.sin(0.3), np.cos(0.3)]),
            "robot0_gripper_qpos": np.array([0.04, -0.04]),
        }
