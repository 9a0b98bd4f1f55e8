"""The Push-T task of diffusion policy: a round pusher moves a T-shaped block on a table of 512 x 512 pixels.

Read next: `data/formats/zarr/zarr_source.py`, which opens its store (`img`, `keypoint`, `state`, `action`,
`n_contacts`).
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from openpi_train.robots.robot import Robot, Steps

_AGENT = ("agent_x_px", "agent_y_px")
_NUM_KEYPOINTS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushT(Robot):
    """State: the pusher's position, after the block's keypoints with `keypoints`. Action: its target position."""

    # The model's camera slot: the store's pictures. Empty for a policy of keypoints.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"image": "img"})
    # Whether the state begins with the block's nine keypoints (diffusion policy's low-dimensional task).
    keypoints: bool = False

    control_hz = 10.0
    delta_mask = None  # targets are absolute

    @property
    def state_names(self) -> tuple[str, ...]:
        points = (f"keypoint_{number}_{axis}_px" for number in range(_NUM_KEYPOINTS) for axis in "xy")
        return (*points, *_AGENT) if self.keypoints else _AGENT

    @property
    def action_names(self) -> tuple[str, ...]:
        return ("target_x_px", "target_y_px")

    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        """States and actions as recorded, without the block's pose; every step may start a window."""
        del episode_ends
        state = self._shaped(columns, "state", 5)[:, :2]
        if self.keypoints:
            points = self._shaped(columns, "keypoint", _NUM_KEYPOINTS, 2)
            state = np.concatenate([points.reshape(len(points), -1), state], axis=1)
        return Steps(state=state, actions=self._shaped(columns, "action", 2), use=np.ones(len(state), bool))

    def _shaped(self, columns: Mapping[str, np.ndarray], name: str, *shape: int) -> np.ndarray:
        column = self._column(columns, name)
        if column.shape[1:] != shape:
            raise ValueError(
                f"column {name!r} has shape {list(column.shape[1:])} per step; the PushT robot reads {list(shape)}"
            )
        return column
