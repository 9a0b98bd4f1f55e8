"""From what a robot sees to a model's row, and from the model's chunk back to the robot's actions.

The same steps as training's (`rows.py`), in the same order, without actions. Read next: `transforms.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from openpi_train.data.rows import RowSpec, RowTransform, with_all_cameras
from openpi_train.data.transforms import Normalize, Unnormalize
from openpi_train.data.windows import WindowShape
from openpi_train.robots.robot import Robot

# Entries of a training row that no policy is given.
_TARGETS = ("actions", "action_mask", "dim_mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
    """One robot's way to a model and back.

    `transforms` are the model config's, for rows that `normalize` has normalised; `spec` is that of its finished rows,
    `window` what it sees and predicts.
    """

    robot: Robot
    normalize: Normalize
    transforms: tuple[RowTransform, ...]
    spec: RowSpec
    window: WindowShape

    def row(self, images: Mapping[str, np.ndarray], state: np.ndarray, prompt: str) -> dict[str, np.ndarray]:
        """A model's row without actions, by entry.

        Args: `images` uint8 [(o,) height, width, 3] by the dataset's image features, `state` [(o,) s] in the robot's
        units; the axis o is there where the model sees more than one control step.

        Raises ValueError where an image of the robot's cameras is missing, or the row does not fit the model.
        """
        for slot, feature in self.robot.cameras.items():
            if feature not in images:
                raise ValueError(
                    f"{type(self.robot).__name__}'s camera {slot} reads {feature!r}; there is "
                    f"{', '.join(images) or 'no image'}"
                )
        by_slot = {slot: np.asarray(images[feature]) for slot, feature in self.robot.cameras.items()}
        return self.finish(self.robot.row(by_slot, np.asarray(state, np.float32), prompt))

    def finish(self, row: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """A row in the robot's own units, normalised and as the model reads it; other robots' cameras are masked.

        Raises ValueError where it does not fit the model.
        """
        made = dict(row)
        for transform in (self.normalize, *self.transforms):
            made = transform(made)
        made = with_all_cameras(made, self.spec)
        found = {}
        for name, (shape, dtype) in self.spec.items():
            if name in _TARGETS:
                continue
            if name not in made:
                raise ValueError(f"there is no {name}, which the model reads")
            found[name] = np.asarray(made[name]).astype(dtype, copy=False)
            if found[name].shape != shape:
                raise ValueError(f"{name} has shape {list(found[name].shape)}; the model takes {list(shape)}")
        return found

    def actions(self, chunk: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The robot's actions float32 [h, a] from the present control step on.

        Args: `chunk` the model's, normalised; `state` [s] the robot's present one.
        """
        known = Unnormalize(self.normalize.stats, self.normalize.form)({"actions": chunk})["actions"]
        own = known[..., : len(self.robot.action_names)]
        actions = self.robot.from_model(own, np.asarray(state, np.float32))
        return np.ascontiguousarray(actions[-self.window.first_action :], np.float32)
