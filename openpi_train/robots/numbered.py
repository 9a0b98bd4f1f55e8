"""An arm whose dims have no names: what a dataset of plain numbers says about it. Read next: `arm.py`."""

import dataclasses
from collections.abc import Mapping

from openpi_train.robots.arm import Arm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbered(Arm):
    """States and actions as recorded, dim by dim; actions are not relative to the state."""

    # The model's camera slot: the dataset's image feature.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"base_0_rgb": "image_1"})
    # Features that make up the state, in order.
    state_columns: tuple[str, ...] = ("state",)
    # Dims of the state.
    num_state_dims: int = 7
    # Dims of an action.
    num_action_dims: int = 7
    # Control steps per second.
    rate_hz: float = 10.0

    delta_mask = None

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(f"state_{number}" for number in range(self.num_state_dims))

    @property
    def action_names(self) -> tuple[str, ...]:
        return tuple(f"action_{number}" for number in range(self.num_action_dims))

    @property
    def control_hz(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The field `rate_hz`."""
        return self.rate_hz
