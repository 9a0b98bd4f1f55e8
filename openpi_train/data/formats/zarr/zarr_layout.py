"""Roles of a replay buffer's arrays: cameras, columns, episodes and tasks. Read next: `zarr_index.py`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openpi_train.data.core.findings import Finding
from openpi_train.data.core.source import WIDEST_COLUMN
from openpi_train.data.formats.zarr.store import EPISODE_ENDS, BadChunk, Store, is_zarr

# Added by `merge.py`: the index of each row's task in the root's attributes.
TASK_ID, TASKS = "task_id", "tasks"
# Largest distance of a pixel from a whole number in 0..255.
_ROUNDING = 1e-3
# The attribute that holds `About.as_json`.
ABOUT = "about"


@dataclasses.dataclass(frozen=True)
class PictureArray:
    """A camera: height and width of its pictures, and whether channels come first."""

    size: tuple[int, int]
    channels_first: bool


@dataclasses.dataclass(frozen=True)
class ZarrLayout:
    """A replay buffer's arrays, named without the prefix `data/`.

    Attributes:
        columns: dtype name and shape per step.
        skipped: Arrays left out, each with the reason.
        episode_ends: int64 [episodes].
        tasks: name and prompt of each task; empty if the store has none.
        findings: What is suspicious in the arrays.
    """

    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    cameras: Mapping[str, PictureArray]
    skipped: Mapping[str, str]
    episode_ends: np.ndarray
    tasks: tuple[tuple[str, str], ...]
    findings: Sequence[Finding] = ()


def read_layout(store: Store) -> ZarrLayout:
    """Read the layout, from metadata and `meta/episode_ends` alone.

    Raises FileNotFoundError if there is no replay buffer, ValueError if no array has a row for each step.
    """
    root = store.root
    require(store)
    ends = _episode_ends(store)
    columns, cameras, skipped, findings = _sort_arrays(store, len(ends), int(ends[-1]))
    if not columns and not cameras:
        found = ", ".join(f"{name}: {why}" for name, why in skipped.items())
        raise ValueError(
            f"{root}: none of its arrays has a row for each of the {ends[-1]} steps of {EPISODE_ENDS} ({found}): the "
            "store was not written completely, or does not follow diffusion_policy's layout"
        )
    tasks = tuple((str(task["name"]), str(task["prompt"])) for task in store.attributes.get(TASKS, ()))
    if tasks and columns.pop(TASK_ID, ("", None))[1] != ():
        raise ValueError(f"{root} names {len(tasks)} tasks, but has no data/{TASK_ID} with one number per step")
    return ZarrLayout(columns, cameras, skipped, ends, tasks, findings)


def require(store: Store) -> None:
    """Raise FileNotFoundError if the store is not a replay buffer, ValueError if it is unfinished."""
    root = store.root
    if not is_zarr(root):
        raise FileNotFoundError(f"{root} holds no zarr store; give a folder with .zgroup or zarr.json, or a zip file")
    data = [name for name in store.drivers if name.startswith("data/")]
    if EPISODE_ENDS not in store.drivers or not data:
        raise ValueError(
            f"{root} is a zarr store, but not a replay buffer: it needs {EPISODE_ENDS} and arrays in data/, but has "
            f"{', '.join(store.drivers) or 'no arrays in data/ and meta/'}"
        )


def _sort_arrays(
    store: Store, num_episodes: int, num_steps: int
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, PictureArray], dict[str, str], list[Finding]]:
    """Columns, cameras, skipped arrays with the reason, and what is suspicious, from the arrays in data/, by name."""
    columns: dict[str, tuple[str, tuple[int, ...]]] = {}
    cameras: dict[str, PictureArray] = {}
    skipped = {name.removeprefix("data/"): why for name, why in store.unread.items()}
    findings: list[Finding] = []
    for path, info in store.arrays.items():
        group, name = path.split("/", 1)
        shape, width = info.shape[1:], math.prod(info.shape[1:])
        if group != "data":
            continue
        if info.dtype.kind not in "biuf":
            skipped[name] = f"of type {info.dtype}"
        elif info.shape[0] == num_episodes != num_steps:
            skipped[name] = "one row per episode, not per step"
        elif info.shape[0] != num_steps:
            skipped[name] = f"{info.shape[0]} rows for {num_steps} steps"
            findings.append(
                Finding(
                    kind="an array of another length",
                    count=1,
                    unit="arrays",
                    where=path,
                    what=skipped[name],
                    training="it is left out",
                    remedy="If a robot reads it, write the store again: it was not written completely",
                )
            )
        elif len(shape) == 3 and shape[0] == shape[-1] == 3:
            skipped[name] = f"{list(shape)} per step: the channel axis is ambiguous"
        elif len(shape) == 3 and 3 in (shape[0], shape[-1]):
            channels_first = shape[0] == 3
            cameras[name] = PictureArray(shape[1:] if channels_first else shape[:2], channels_first)
        elif width > WIDEST_COLUMN:
            skipped[name] = f"{width} numbers wide"
        else:
            columns[name] = (info.dtype.name, shape)
    return columns, cameras, skipped, findings


def pictures(name: str, values: np.ndarray, camera: PictureArray) -> np.ndarray:
    """Stored pictures as uint8 [n, height, width, 3]. Raises ValueError for values that are not pixels."""
    if values.dtype != np.uint8:
        # Push-T's pictures are whole numbers in float32; resizing leaves numbers that are so but for rounding.
        pixels = np.rint(values).clip(0, 255)
        if not (np.abs(pixels - values) <= _ROUNDING).all():
            low, high = np.nanmin(values), np.nanmax(values)
            raise ValueError(
                f"{name} holds numbers from {low:g} to {high:g} that are not all pixels, whole numbers in 0..255"
            )
        values = pixels.astype(np.uint8)
    return np.moveaxis(values, 1, -1) if camera.channels_first else values


def _episode_ends(store: Store) -> np.ndarray:
    if EPISODE_ENDS not in store.arrays:
        raise ValueError(f"{store.root}: {EPISODE_ENDS} cannot be opened, or is a scalar")
    try:
        ends: Any = store.read(EPISODE_ENDS, slice(None))
    except BadChunk as error:
        raise ValueError(f"{store.root}: {EPISODE_ENDS} cannot be read: {error}") from error
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or not len(ends) or (np.diff(ends, prepend=0) <= 0).any():
        raise ValueError(
            f"{store.root}: {EPISODE_ENDS} must be integers that increase from episode to episode; it is "
            f"{ends.dtype} {list(ends.shape)}, beginning with {ends.reshape(-1)[:5].tolist()}"
        )
    return ends.astype(np.int64)
