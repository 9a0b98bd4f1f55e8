"""Base class of arms whose states and actions are concatenated columns of their data. Read next: `droid.py`."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from openpi_train.robots.robot import Robot, Steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm(Robot):
    """A robot whose data are read column by column; subclasses name the dims. Every step may start a window."""

    # Features that make up the state, in order.
    state_columns: tuple[str, ...] = ("observation/state",)
    # Features that make up the action, in order.
    action_columns: tuple[str, ...] = ("action",)

    @property
    def state_keys(self) -> tuple[str, ...]:
        return self.state_columns

    @property
    def whole_columns(self) -> tuple[str, str]:
        """Those that it reads, if each is one column."""
        names = self.state_columns, self.action_columns
        state, action = (
            own[0] if len(own) == 1 else name for own, name in zip(names, super().whole_columns, strict=True)
        )
        return state, action

    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        del episode_ends
        state = self._joined(columns, self.state_columns, self.state_names, "state")
        actions = self._joined(columns, self.action_columns, self.action_names, "action")
        return Steps(state=state, actions=actions, use=np.ones(len(state), bool))

    def _joined(
        self, columns: Mapping[str, np.ndarray], wanted: Sequence[str], dims: Sequence[str], what: str
    ) -> np.ndarray:
        robot, flag = type(self).__name__, f"--data.datasets.N.robot.{what}-columns"
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise ValueError(
                f"the {robot} robot reads its {what} from {', '.join(wanted)}; the dataset lacks {', '.join(missing)} "
                f"and has {', '.join(sorted(columns))}: set {flag}"
            )
        parts = [np.asarray(columns[name], np.float32) for name in wanted]
        parts = [part[:, None] if part.ndim == 1 else part.reshape(len(part), -1) for part in parts]
        joined = np.concatenate(parts, axis=1)
        if joined.shape[1] != len(dims):
            widths = ", ".join(f"{name} {part.shape[1]}" for name, part in zip(wanted, parts, strict=True))
            raise ValueError(
                f"the {robot} robot has {len(dims)} {what} dims ({', '.join(dims)}); the dataset gives "
                f"{joined.shape[1]}: {widths}. Set {flag}"
            )
        return joined
