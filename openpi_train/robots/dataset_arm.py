"""An arm as the features of a dataset describe it.

Read next: `arm.py`; `data/formats/lerobot/described.py`, which makes it.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from openpi_train.robots.arm import Arm
from openpi_train.robots.robot import Steps

# Parts of the names of grippers and hands in public datasets; their commands are seldom positions to be relative to.
GRIPPERS = ("grip", "jaw", "claw", "hand", "finger", "thumb", "pinch", "grasp")
# Words of dims that are no positions: a difference of a command and the present value of these means nothing.
_NO_POSITIONS = frozenset(
    ("vel", "velocity", "velocities", "speed", "acc", "acceleration", "effort", "torque", "force", "delta", "tau")
)
# Words that say whose or which value it is, but not of which joint.
_ROLES = frozenset(
    (
        *("main", "leader", "follower", "master", "puppet", "slave", "robot", "pos", "position", "positions", "qpos"),
        *("cmd", "command", "target", "goal", "desired", "measured", "present"),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetArm(Arm):
    """States and actions as recorded, dim by dim, with the dataset's names.

    With `relative`, every action dim but grippers, velocities and forces must have a state dim of its name: an arm that
    is relative in part would learn differences for some joints and positions for others. `delta_mask` and `read` raise
    ValueError otherwise.
    """

    # Name of each dim of the state, as recorded.
    state_dims: tuple[str, ...]
    # Name of each dim of an action, as recorded.
    action_dims: tuple[str, ...]
    # Control steps per second.
    rate_hz: float
    # Whether the model sees actions relative to the state at the chunk's start: all dims but grippers, velocities and
    # forces, each relative to the state dim of its name. Otherwise it sees them as recorded.
    relative: bool = False
    # Parts of the names of grippers, whose actions stay as recorded.
    grippers: tuple[str, ...] = ("gripper",)
    # With `relative`: exactly these action dims are relative, each to this state dim. Empty: as `relative` says.
    relative_to: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The state dims that the model sees, in this order. Empty: all, as recorded.
    state_order: tuple[str, ...] = ()
    # The action dims that the model predicts, in this order. Empty: all, as recorded.
    action_order: tuple[str, ...] = ()

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.state_order or self.state_dims

    @property
    def action_names(self) -> tuple[str, ...]:
        return self.action_order or self.action_dims

    @property
    def control_hz(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The field `rate_hz`."""
        return self.rate_hz

    @property
    def delta_mask(self) -> tuple[bool, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dims that the model sees relative to the state; None if `relative` is off. Raises ValueError."""
        return tuple(name in self._references for name in self.action_names) if self.relative else None

    @property
    def delta_reference(self) -> tuple[int, ...]:
        """The place of the state dim of each relative dim's name."""
        found = self._references if self.relative else {}
        return tuple(self.state_names.index(found[name]) if name in found else 0 for name in self.action_names)

    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        del episode_ends
        _ = self.delta_mask
        state = self._joined(columns, self.state_columns, self.state_dims, "state")
        actions = self._joined(columns, self.action_columns, self.action_dims, "action")
        if self.state_order:
            state = state[:, _places(self.state_order, self.state_dims, "state")]
        if self.action_order:
            actions = actions[:, _places(self.action_order, self.action_dims, "action")]
        return Steps(state=state, actions=actions, use=np.ones(len(state), bool))

    @property
    def _references(self) -> Mapping[str, str]:
        """The state dim of every relative action dim. Raises ValueError if an arm would be relative in part."""
        if self.relative_to:
            return self._checked_references()
        arm = [name for name in self.action_names if not self._is_absolute(name)]
        found = {name: state for name in arm if (state := _of_the_same_joint(name, self.state_names)) is not None}
        of_state = f"the state has {', '.join(self.state_names)}"
        how = (
            "Say which action dim is relative to which state dim with --data.datasets.N.robot.relative-to ACTION STATE "
            "..., name all grippers with --data.datasets.N.robot.grippers, or take the actions as recorded"
        )
        if not arm:
            raise ValueError(
                f"relative actions: all of {', '.join(self.action_names)} are grippers, velocities or forces by their "
                f"names. {how}"
            )
        if len(found) < len(arm):
            lacking = ", ".join(name for name in arm if name not in found)
            raise ValueError(
                f"relative actions: {lacking} of the action ({', '.join(self.action_names)}) has no state dim of its "
                f"name, or several ({of_state}), and an arm is relative as a whole. {how}"
            )
        if len(set(found.values())) < len(found):
            raise ValueError(f"relative actions: several action dims have the same state dim ({_pairs(found)}). {how}")
        return found

    def _checked_references(self) -> Mapping[str, str]:
        actions = sorted(set(self.relative_to) - set(self.action_names))
        states = sorted(set(self.relative_to.values()) - set(self.state_names))
        if actions or states:
            raise ValueError(
                f"--data.datasets.N.robot.relative-to {_pairs(self.relative_to)}: there is no dim "
                f"{', '.join([*actions, *states])}; the actions are {', '.join(self.action_names)}, the state's dims "
                f"{', '.join(self.state_names)}"
            )
        return self.relative_to

    def _is_absolute(self, name: str) -> bool:
        return any(part in name.lower() for part in self.grippers) or bool(_NO_POSITIONS & set(_words(name)))


def _of_the_same_joint(action: str, states: Sequence[str]) -> str | None:
    """The state dim of the same name, or else the only one whose name has the same words but roles; or None."""
    if action in states:
        return action
    wanted = _joint(action)
    found = [state for state in states if _joint(state) == wanted]
    return found[0] if wanted and len(found) == 1 else None


def _joint(name: str) -> tuple[str, ...]:
    return tuple(word for word in _words(name) if word not in _ROLES)


def _words(name: str) -> list[str]:
    """A name's words in lower case, numbers without leading zeros: main left joint 1 pos."""
    return [str(int(word)) if word.isdigit() else word for word in re.findall(r"[a-z]+|[0-9]+", name.lower())]


def _places(order: Sequence[str], dims: Sequence[str], what: str) -> list[int]:
    unknown = [name for name in order if name not in dims]
    if unknown or len(set(order)) < len(order):
        raise ValueError(
            f"--data.datasets.N.robot.{what}-order {' '.join(order)}: each must be one of the dataset's {what} dims, "
            f"once: {', '.join(dims)}"
        )
    return [dims.index(name) for name in order]


def _pairs(references: Mapping[str, str]) -> str:
    return " ".join(f"{action} {state}" for action, state in references.items())
