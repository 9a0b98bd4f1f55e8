"""A UR5 arm with a gripper, commanded by joint positions. Read next: `arm.py`.

Features as in openpi's UR5 example (Physical-Intelligence/openpi, `examples/ur5`).
"""

import dataclasses
from collections.abc import Mapping

from openpi_train.robots.arm import Arm


@dataclasses.dataclass(frozen=True, kw_only=True)
class UR5(Arm):
    """Six joints and a gripper; the model sees joint targets relative to the joints at the chunk's start."""

    # The model's camera slot: the dataset's image feature.
    cameras: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"base_0_rgb": "base_rgb", "left_wrist_0_rgb": "wrist_rgb"}
    )
    # Features that make up the state, in order.
    state_columns: tuple[str, ...] = ("joints", "gripper")
    # Features that make up the action, in order.
    action_columns: tuple[str, ...] = ("actions",)
    # Control steps per second; the example does not specify it.
    rate_hz: float = 20.0

    delta_mask = (True,) * 6 + (False,)

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*(f"joint_{number}_rad" for number in range(1, 7)), "gripper_fraction")

    @property
    def action_names(self) -> tuple[str, ...]:
        return self.state_names

    @property
    def control_hz(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The field `rate_hz`."""
        return self.rate_hz
