"""An arm as the features of a dataset describe it. Read next: `arm.py`; `data/lerobot/described.py`, which makes it."""

import dataclasses

from openpi_train.robots.arm import Arm


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetArm(Arm):
    """States and actions as recorded, dim by dim, with the dataset's names.

    Raises ValueError for relative actions if no action dim has the name of the state dim at its place.
    """

    # Name of each dim of the state.
    state_dims: tuple[str, ...]
    # Name of each dim of an action.
    action_dims: tuple[str, ...]
    # Control steps per second.
    rate_hz: float
    # Whether the model sees actions relative to the state at the chunk's start: those dims that have the state's name,
    # but grippers. Otherwise it sees them as recorded.
    relative: bool = False

    def __post_init__(self):
        if self.relative and not any(self._shared()):
            raise ValueError(
                f"relative actions: no action dim ({', '.join(self.action_dims)}) has the name of the state dim at its "
                f"place ({', '.join(self.state_dims)}), other than a gripper's; take the actions as recorded"
            )

    def _shared(self) -> tuple[bool, ...]:
        """Per action dim, whether it is the target of the state dim at its place, and no gripper's."""
        pairs = zip(self.action_dims, (*self.state_dims, *[""] * len(self.action_dims)), strict=False)
        return tuple(action == state and "gripper" not in action.lower() for action, state in pairs)

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.state_dims

    @property
    def action_names(self) -> tuple[str, ...]:
        return self.action_dims

    @property
    def control_hz(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The field `rate_hz`."""
        return self.rate_hz

    @property
    def delta_mask(self) -> tuple[bool, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dims that the model sees relative to the state; None if `relative` is off."""
        return self._shared() if self.relative else None
