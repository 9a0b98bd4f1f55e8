"""`RobotRows`: what a policy sees of an environment, as rows of its model, and its chunks as the robot's actions.

Read next: `data/robot/translation.py`, `closed_loop_success.py`.
"""

import numpy as np
from jaxtyping import Float

from openpi_train.data.core.interface import OpenedData
from openpi_train.data.robot.opened import OpenedDatasets
from openpi_train.data.robot.transforms import Normalize
from openpi_train.data.robot.translation import Translation
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.runtime.exits import UsageError


class RobotRows:
    """The translation of batches between an environment and a model.

    Attributes: `robot`; `cameras`, the environment's camera of each image feature that the robot reads.
    """

    def __init__(self, translation: Translation, env: Env):
        self._translation, self._env, self.robot = translation, env, translation.robot
        self.cameras = {feature: env.camera_of(feature) for feature in translation.robot.cameras.values()}

    def columns(self, observation: EnvObservation) -> dict[str, np.ndarray]:
        """The model's rows of these episodes, stacked by entry, without actions."""
        images = {feature: np.asarray(observation.images[camera]) for feature, camera in self.cameras.items()}
        states, tasks = np.asarray(observation.state), np.asarray(observation.task)
        rows = [
            self._translation.row(
                {name: image[index] for name, image in images.items()},
                states[index],
                self._env.instruction(int(task)) or self._translation.prompt,
            )
            for index, task in enumerate(tasks)
        ]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def actions(self, chunks: Float[np.ndarray, "b h a"], observation: EnvObservation) -> np.ndarray:
        """The robot's actions [b, h, a] from the present control step on, from the first chunks of the model."""
        states = np.asarray(observation.state)
        present = states[:, -1] if states.ndim == 3 else states
        return np.stack([self._translation.actions(*pair) for pair in zip(chunks, present, strict=False)])


def translation_of(data: OpenedData, env: Env, dataset: int, *, flag: str) -> Translation:
    """The translation for the robot of this dataset. Raises UsageError if robot and environment do not fit.

    `flag` is that of the config which has `env` and `dataset`, for messages.
    """
    if not isinstance(data, OpenedDatasets):
        raise UsageError(f"{flag}.env: {type(data).__name__} has no robot to act in it")
    windows = data.train.windows
    if not 0 <= dataset < len(windows):
        raise UsageError(f"{flag}.dataset {dataset}: the run has {len(windows)} datasets, numbered from 0")
    robot = windows[dataset].robot
    widths = {"actions": (len(robot.action_names), env.action_dim), "state": (len(robot.state_names), env.state_dim)}
    for name, (has, takes) in widths.items():
        if has != takes:
            raise UsageError(
                f"{type(robot).__name__} of dataset {dataset} has {has} {name} dims, {type(env).__name__} has "
                f"{takes}: choose another {flag}.dataset or environment"
            )
    if missing := sorted(name for name in robot.cameras.values() if env.camera_of(name) not in env.cameras):
        raise UsageError(
            f"{type(robot).__name__} of dataset {dataset} reads {', '.join(missing)}; {type(env).__name__} has "
            f"{', '.join(env.cameras) or 'no camera'}"
        )
    normalize, *transforms = data.train.transforms[dataset]
    assert isinstance(normalize, Normalize), "rows are normalised first (data/robot/opened.py)"
    return Translation(
        robot=robot,
        normalize=normalize,
        transforms=tuple(transforms),
        spec=data.train.spec,
        window=windows[dataset].shape,
        prompt=windows[dataset].prompt or "",
    )
