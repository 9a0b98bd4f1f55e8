"""The robot that the arrays of a zarr store describe: `lerobot/described.py` does it for LeRobot's features.

Reads metadata alone. Read next: `robots/dataset_arm.py`, and `choice.py: on_features`, the caller.
"""

import logging
import math
from collections.abc import Mapping, Sequence

from openpi_train.data.core.source import About, column_name
from openpi_train.data.formats.lerobot.described import camera_slots
from openpi_train.data.formats.zarr.zarr_index import Zarr
from openpi_train.data.formats.zarr.zarr_layout import ABOUT, read_layout
from openpi_train.robots.dataset_arm import GRIPPERS, DatasetArm

logger = logging.getLogger(__name__)

_STATES = ("state", "observation.state", "agent_pos", "robot_state", "qpos")
_ACTIONS = ("action", "actions")
# Of a store that does not say its rate: nothing that is trained depends on it.
_RATE_HZ = 10.0


def described_store(source: Zarr, slots: Sequence[str] | None = None, *, relative: bool = False) -> DatasetArm:
    """The robot of the store, with all of its cameras; `slots` and `relative` are as in `described`.

    Raises FileNotFoundError if there is no store, ValueError if its arrays have no state or no action.
    """
    store = source.store()
    layout, about = read_layout(store), About.from_json(store.attributes.get(ABOUT, {}))
    state, action = (_vector(layout.columns, names, source.path) for names in (_STATES, _ACTIONS))
    if about.control_hz is None:
        logger.info(
            "%s does not say its control rate: %g Hz is taken (--data.datasets.0.robot.rate-hz)", source.path, _RATE_HZ
        )
    cameras = camera_slots(list(layout.cameras), slots)
    return DatasetArm(
        cameras={slot: column_name(name) for slot, name in cameras.items()},
        state_columns=(column_name(state),),
        action_columns=(column_name(action),),
        state_dims=_names(about, state, layout.columns, "state"),
        action_dims=_names(about, action, layout.columns, "action"),
        rate_hz=about.control_hz or _RATE_HZ,
        relative=relative,
        grippers=GRIPPERS,
    )


def store_cameras(source: Zarr) -> tuple[str, ...]:
    """The arrays of pictures. Raises as `described_store`."""
    return tuple(map(column_name, read_layout(source.store()).cameras))


def _vector(columns: Mapping[str, tuple[str, tuple[int, ...]]], names: Sequence[str], path: str) -> str:
    """The first of these arrays that the store has, a row of numbers per step. Raises ValueError."""
    for name in names:
        if name in columns and len(columns[name][1]) == 1:
            return name
    there = ", ".join(f"{name} {list(shape)}" for name, (_, shape) in sorted(columns.items()))
    raise ValueError(
        f"{path} has no array {' or '.join(names)} with a row of numbers per step; it has {there}. For a robot whose "
        "state or action is made up of others write a class (docs/tutorials/my_robot.md)"
    )


def _names(about: About, name: str, columns: Mapping[str, tuple[str, tuple[int, ...]]], what: str) -> tuple[str, ...]:
    """The names of an array's dims; numbered ones if it has none, or not one for each dim."""
    names, size = about.dim_names.get(name, ()), math.prod(columns[name][1])
    return names if len(names) == size == len({*names}) else tuple(f"{what}_{number}" for number in range(size))
