"""Interface of all robots: names and units of dims, and the conversion between the robot's data and the model's.

There is no registry: a dataset of an experiment has its robot as a value. Arrays are numpy; everything is vectorised
over leading axes, since norm stats are computed over whole datasets but serving has one observation. Read next:
`bridge.py`.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True)
class Steps:
    """Whole episodes in the robot's own units: `state` [n, s] and `actions` [n, a], float32.

    `use` [n] is False on steps that must not start a training window (a null first action, say).
    """

    state: np.ndarray
    actions: np.ndarray
    use: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Robot(abc.ABC):
    """A robot's data conventions. Immutable; no hardware access."""

    # Camera slot of the model -> image feature of the dataset. Add a new slot here, and for a diffusion policy also in
    # `--model.cameras`.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Whether episodes without an instruction are left out, as a rule: where much of a robot's public data has none.
    skip_unlabeled: ClassVar[bool] = False
    # Control steps per second.
    control_hz: ClassVar[float]
    # Per action dim, whether the model sees it relative to the state at the chunk's start; None for no dim.
    delta_mask: ClassVar[tuple[bool, ...] | None]
    # Whether datasets of this robot record the next step's state as action, by convention.
    actions_are_next_states: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def action_names(self) -> tuple[str, ...]:
        """A name per action dim, with its unit at the end."""

    @property
    @abc.abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """A name per state dim, with its unit at the end."""

    @property
    def delta_reference(self) -> tuple[int, ...]:
        """Per action dim, the place of the state dim that it is relative to; of no meaning in absolute dims."""
        return tuple(range(len(self.action_names)))

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys for the parts of the state in a request, in order; the whole state, `state`, is always accepted."""
        return ("observation/state",)

    @property
    def whole_columns(self) -> tuple[str, str]:
        """The columns of the whole state and of the whole action in datasets that are written for this robot."""
        return "observation/state", "action"

    @abc.abstractmethod
    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        """This robot's states and actions at every step, from a dataset's columns.

        Raises ValueError naming the missing column or wrong width.
        """

    def to_model(self, state: np.ndarray, actions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Robot units -> the model's units (before normalisation).

        Args: state [..., s]; actions [..., h, a] or None when serving. Returns the same shapes.
        """
        if actions is None or self.delta_mask is None:
            return state, actions
        return state, actions - self._offset(state, actions.shape[-1])

    def from_model(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Un-normalised model actions [..., h, a] -> robot units, given the state [..., s] at the chunk's start."""
        if self.delta_mask is None:
            return actions
        return actions + self._offset(state, actions.shape[-1])

    def row(self, images: Mapping[str, np.ndarray], state: np.ndarray, prompt: str | None = None) -> dict[str, Any]:
        """The model's input for some control steps, before normalisation: a training row without its actions.

        Args: `images` uint8 [(o,) height, width, 3] by camera slot, `state` [(o,) s]; the axis o exists only for a
        history longer than 1.
        """
        row: dict[str, Any] = {"state": self.to_model(state)[0]}
        for slot in self.cameras:
            row[f"image/{slot}"], row[f"image_mask/{slot}"] = images[slot], np.True_
        return row if prompt is None else {**row, "prompt": prompt}

    def _column(self, columns: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        """A column of the dataset, float32. Raises ValueError if it has none of this name."""
        if name not in columns:
            raise ValueError(
                f"the {type(self).__name__} robot reads the column {name!r}; the dataset has "
                f"{', '.join(sorted(columns))}"
            )
        return np.asarray(columns[name], np.float32)

    def _offset(self, state: np.ndarray, width: int) -> np.ndarray:
        """The reference of relative actions with `width` dims, [..., 1, width]; 0 in absolute dims."""
        places = np.flatnonzero(np.asarray(self.delta_mask, bool))
        offset = np.zeros((*state.shape[:-1], 1, width), state.dtype)
        offset[..., 0, places] = state[..., np.asarray(self.delta_reference)[places]]
        return offset
