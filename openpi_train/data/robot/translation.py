"""Translation of a robot's observations to model rows, and of the model's chunks to the robot's actions.

The steps and their order are the same as in training (`rows.py`), without actions. Read next: `transforms.py`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from openpi_train.data.robot.normalize import normalize
from openpi_train.data.robot.rows import RowSpec, RowTransform, with_all_cameras
from openpi_train.data.robot.transforms import Normalize, Unnormalize
from openpi_train.data.robot.windows import WindowShape
from openpi_train.robots.robot import Robot

# Entries of a training row that a policy does not get.
_TARGETS = ("actions", "action_mask", "dim_mask", "label")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
    """Translation between one robot and a model.

    `transforms` are the model config's, applied after `normalize`; `spec` is that of the model's finished rows,
    `window` what it sees and predicts; `prompt` is for tasks without an instruction, the dataset's own if it has one.
    """

    robot: Robot
    normalize: Normalize
    transforms: tuple[RowTransform, ...]
    spec: RowSpec
    window: WindowShape
    prompt: str = ""

    def row(self, images: Mapping[str, np.ndarray], state: np.ndarray, prompt: str) -> dict[str, np.ndarray]:
        """A model's row without actions, as a dict of entries.

        Args: `images` uint8 [(o,) height, width, 3] by the dataset's image features, `state` [(o,) s] in the robot's
        units; the axis o exists only if the model sees more than one control step.

        Raises ValueError if an image of the robot's cameras is missing, or the row does not fit the model.
        """
        for slot, feature in self.robot.cameras.items():
            if feature not in images:
                raise ValueError(
                    f"{type(self.robot).__name__}'s camera {slot} reads {feature!r}; given: "
                    f"{', '.join(images) or 'no image'}"
                )
        by_slot = {slot: np.asarray(images[feature]) for slot, feature in self.robot.cameras.items()}
        return self.finish(self.robot.row(by_slot, np.asarray(state, np.float32), prompt))

    def finish(self, row: Mapping[str, object]) -> dict[str, np.ndarray]:
        """The model's row from a row in the robot's own units; cameras of other robots are masked.

        Raises ValueError if the row does not fit the model.
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
                raise ValueError(f"the model reads {name}, which is missing")
            found[name] = np.asarray(made[name]).astype(dtype, copy=False)
            if found[name].shape != shape:
                raise ValueError(f"{name} has shape {list(found[name].shape)}; the model takes {list(shape)}")
        return found

    def chunk(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The model's normalised actions, the inverse of `actions`: float32 [p, a] from the robot's [p, a]."""
        _, relative = self.robot.to_model(np.asarray(state, np.float32), np.asarray(actions, np.float32))
        assert relative is not None
        return normalize(relative, self.normalize.stats["actions"], self.normalize.form)

    def actions(self, chunk: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The robot's actions from the present control step on, float32 [h, a].

        Args: `chunk` is the model's, normalised; `state` [s] is the robot's present one.
        """
        known = Unnormalize(self.normalize.stats, self.normalize.form)({"actions": chunk})["actions"]
        own = known[..., : len(self.robot.action_names)]
        actions = self.robot.from_model(own, np.asarray(state, np.float32))
        return np.ascontiguousarray(actions[-self.window.first_action :], np.float32)
