"""The robot that a LeRobot dataset's features describe: no class of one's own is needed for the common case.

The state is `observation.state` (or `state`), the action is `action` (or `actions`), cameras are the image features.
Reads metadata alone. Read next: `robots/dataset_arm.py`, and `choice.py: on_features`, the caller.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from openpi_train.data.core.files import read_json
from openpi_train.data.core.image import says_depth
from openpi_train.data.core.source import column_name
from openpi_train.data.formats.lerobot.lerobot_layout import INFO_FILE, flat_names, read_layout
from openpi_train.json_object import JsonObject
from openpi_train.robots.dataset_arm import GRIPPERS, DatasetArm

logger = logging.getLogger(__name__)

_STATES, _ACTIONS = ("observation.state", "state"), ("action", "actions")
# Cameras that move with a hand, by a part of their names.
_ON_HANDS = ("wrist", "hand", "gripper")


def described(folder: str | Path, slots: Sequence[str] | None = None, *, relative: bool = False) -> DatasetArm:
    """The robot of the dataset in this folder, with all of its cameras.

    Args:
        slots: the model's camera slots; None: a slot for each camera, with the last part of its name.
        relative: as `DatasetArm.relative`.

    Raises FileNotFoundError if there is no dataset, ValueError if its features have no state or no action.
    """
    root = Path(folder).expanduser()
    layout = read_layout(root)
    info = read_json(root / INFO_FILE)
    state, action = (_vector(layout.columns, names, root) for names in (_STATES, _ACTIONS))
    pictures = [name for name in layout.cameras if not says_depth(name)]
    if depth := [name for name in layout.cameras if says_depth(name)]:
        logger.warning(
            "%s of %s: depth by the name, left out; if it has colours, give --data.datasets.N.robot.cameras.SLOT",
            *(", ".join(map(column_name, depth)), root),
        )
    cameras = camera_slots(pictures, slots)
    return DatasetArm(
        cameras={slot: column_name(name) for slot, name in cameras.items()},
        state_columns=(column_name(state),),
        action_columns=(column_name(action),),
        state_dims=_names(info["features"][state], "state"),
        action_dims=_names(info["features"][action], "action"),
        rate_hz=float(info["fps"]),
        relative=relative,
        grippers=GRIPPERS,
    )


def camera_names(folder: str | Path) -> tuple[str, ...]:
    """The image features of the dataset in this folder, as robots name them. Raises as `described`."""
    return tuple(map(column_name, read_layout(Path(folder).expanduser()).cameras))


def _vector(columns: Mapping[str, tuple[str, tuple[int, ...]]], names: Sequence[str], root: Path) -> str:
    """The first of these features that the dataset has, a row of numbers per step. Raises ValueError."""
    for name in names:
        if name in columns and len(columns[name][1]) <= 1:
            return name
    there = ", ".join(f"{name} {list(shape)}" for name, (_, shape) in sorted(columns.items()))
    raise ValueError(
        f"{root} has no feature {' or '.join(names)} with a row of numbers per step; it has {there}. For a robot whose "
        "state or action is made up of others write a class (docs/tutorials/my_robot.md)"
    )


def _names(feature: JsonObject, what: str) -> tuple[str, ...]:
    """The names of a feature's dims; numbered ones if it has none, or not one for each dim."""
    names, size = flat_names(feature.get("names")), math.prod(feature["shape"])
    is_named = len(names) == size == len(set(names))
    return names if is_named else tuple(f"{what}_{number}" for number in range(size))


def camera_slots(cameras: Sequence[str], slots: Sequence[str] | None) -> dict[str, str]:
    """The camera of each slot: of these slots as far as they go; None: a slot for each camera."""
    return _own_slots(cameras) if slots is None else _placed(cameras, slots)


def _own_slots(cameras: Collection[str]) -> dict[str, str]:
    """A slot for each camera, with the last part of its name, or where that is another's, too, the whole."""
    last = {name.rpartition(".")[2]: name for name in cameras}
    return last if len(last) == len(cameras) else {name.replace(".", "_"): name for name in cameras}


def _placed(cameras: Collection[str], slots: Sequence[str]) -> dict[str, str]:
    """A camera for each slot, as far as they go: those on hands for slots of wrists, left and right where so named."""
    free, found = list(slots), dict[str, str]()

    def place(name: str, fitting: Sequence[str]) -> None:
        if fitting:
            found[fitting[0]] = name
            free.remove(fitting[0])

    def on_hand(name: str) -> bool:
        return any(part in name.lower() for part in _ON_HANDS)

    for name in sorted(cameras, key=lambda name: ("left" not in name, "right" not in name)):
        if on_hand(name):
            of_wrists = [slot for slot in free if "wrist" in slot]
            sided = [slot for slot in of_wrists if any(side in slot and side in name for side in ("left", "right"))]
            place(name, sided or of_wrists)
    for name in cameras:
        if not on_hand(name):
            place(name, [slot for slot in free if "wrist" not in slot])
    for name in cameras:
        if name not in found.values():
            place(name, free)
    if left := [name for name in cameras if name not in found.values()]:
        logger.warning("the model has no camera slot left for %s: left out", ", ".join(left))
    return {slot: found[slot] for slot in slots if slot in found}
