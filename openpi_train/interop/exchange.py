"""`Exchange`: what a family of models exchanges with other projects.

Read next: `families.py`, where each is registered; `checkpoint_format.py`, `lerobot_form.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.lerobot_form import LeRobotForm
from openpi_train.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """A family of models, and what it exchanges with other projects.

    Attributes:
        family: its name.
        models: the classes of its configs; their subclasses belong to it, too.
        formats: the formats of checkpoints that are its alone, the first that recognises a place before the others.
        lerobot: its policies as LeRobot has them; None: LeRobot has no such policies.
        in_openpi: whether openpi has such models, so that it loads their checkpoints in its own format.
        hub_tasks: the hub's word for what a model does, by the name of its config's class; of all others robotics.
    """

    family: str
    models: tuple[type[ModelConfig], ...]
    formats: tuple[Format, ...] = ()
    lerobot: LeRobotForm[Any] | None = None
    in_openpi: bool = False
    hub_tasks: Mapping[str, str] = dataclasses.field(default_factory=dict)
