"""What every robot promises: its names and units, and both directions between its data and the model's.

Read next: `bridge.py`. Arrays are numpy; everything is vectorised over leading axes, since norm statistics run over
whole datasets while serving runs on one observation.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

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
    """A robot's data conventions. Frozen values; no hardware access."""

    # Camera slot of the model -> image feature of the dataset. A new slot is added here; a diffusion policy lists its
    # slots, too (`--model.cameras`).
    cameras: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    @abc.abstractmethod
    def action_names(self) -> tuple[str, ...]:
        """A name per action dim, with its unit at the end."""

    @property
    @abc.abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """A name per state dim, with its unit at the end."""

    @property
    @abc.abstractmethod
    def control_hz(self) -> float:
        """Control steps per second."""

    @property
    @abc.abstractmethod
    def delta_mask(self) -> tuple[bool, ...] | None:
        """Per action dim, whether the model sees it relative to the state at the chunk's start; None for no dim."""

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names under which a request may bring the state's parts, in order; as a whole, `state`, it always may."""
        return ("observation/state",)

    @abc.abstractmethod
    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        """A dataset's columns as this robot's states and actions, step by step.

        Raises ValueError naming the missing column or wrong width.
        """

    def to_model(self, state: np.ndarray, actions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Robot units -> what the model is trained on (before normalisation).

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
        """What a model is given of some control steps, before normalisation: a training row without its actions.

        Args: `images` uint8 [(o,) height, width, 3] by camera slot, `state` [(o,) s]; the axis o is there for a history
        longer than 1.
        """
        row: dict[str, Any] = {"state": self.to_model(state)[0]}
        for slot in self.cameras:
            row[f"image/{slot}"], row[f"image_mask/{slot}"] = images[slot], np.True_
        return row if prompt is None else {**row, "prompt": prompt}

    def _offset(self, state: np.ndarray, width: int) -> np.ndarray:
        """What relative actions of `width` dims are relative to, [..., 1, width]; dims beyond the mask are absolute."""
        mask = np.asarray(self.delta_mask, bool)
        offset = np.zeros((*state.shape[:-1], 1, width), state.dtype)
        offset[..., 0, : len(mask)] = np.where(mask, state[..., : len(mask)], 0)
        return offset
