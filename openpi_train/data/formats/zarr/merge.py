"""Merges several replay buffers into one: episodes in the order of the stores, with a task for each row.

Read next: `zarr_writer.py`, which copies block by block; `zarr_layout.py`, which reads the tasks again.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.formats.zarr.store import ArrayInfo, BadChunk, Store
from openpi_train.data.formats.zarr.zarr_layout import TASK_ID, TASKS, read_layout
from openpi_train.data.formats.zarr.zarr_writer import Contents, read_across, write_store

logger = logging.getLogger(__name__)

# Blocks of the merged store begin and end inside the parts' chunks, which are cached from one block to the next.
_CACHE_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class StoreToMerge:
    """A store to be merged, with the name of its task, unless the store has its own tasks."""

    path: Path
    name: str

    @classmethod
    def parse(cls, text: str) -> "StoreToMerge":
        """Parse `NAME=PATH`, or a path alone: its task is the file name up to the first `-` or `.`, as in RoboTwin."""
        name, separator, path = text.partition("=")
        if separator and "/" not in name:
            return cls(Path(path).expanduser(), name)
        path = Path(text).expanduser()
        return cls(path, path.name.split("-")[0].split(".")[0])


def merge(
    parts: Sequence[StoreToMerge], out: Path, *, prompts: Mapping[str, str], chunk_rows: int | None = None
) -> None:
    """Write all episodes of the parts to the store `out`; an interrupted call continues when called again.

    Args: `prompts` by task name (default: the name in words); `chunk_rows` of all arrays (default: the first part's).

    Raises ValueError naming every difference between the parts or an unknown task in `prompts`, FileNotFoundError,
    FileExistsError, BadChunk for damaged parts, OSError if it cannot be written.
    """
    stores = [_Opened(part, prompts) for part in parts]
    _check(stores)
    tasks = list(dict.fromkeys(task for store in stores for task in store.tasks))
    names = [name for name, _ in tasks]
    if len(set(names)) < len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the parts have different prompts for the same task: {', '.join(repeated)}; see --prompt")
    unknown = set(prompts) - set(names)
    if unknown:
        raise ValueError(f"--prompt {', '.join(sorted(unknown))}: no such task; there are {', '.join(names)}")
    offsets = np.cumsum([0, *(store.rows for store in stores)])
    arrays = {
        name: ArrayInfo((int(offsets[-1]), *info.shape[1:]), info.dtype, chunk_rows or info.chunk_rows)
        for name, info in stores[0].arrays.items()
    }

    ends = [store.ends + offset for store, offset in zip(stores, offsets[:-1], strict=True)]
    ids = [[tasks.index(task) for task in store.task_of_episode] for store in stores]
    contents = Contents(
        arrays=arrays,
        read=functools.partial(read_across, stores),
        episode_ends=np.concatenate(ends),
        tasks=tasks,
        task_ids=np.concatenate(ids),
        identity={"stores": [[str(s.store.root.resolve()), s.store.stamp()] for s in stores], "tasks": tasks},
    )
    write_store(contents, out)
    for store in stores:
        logger.info("%s: %d episodes, %d steps", store.store.root.name, len(store.ends), store.rows)


class _Opened:
    """A part with its arrays, episodes and tasks."""

    def __init__(self, part: StoreToMerge, prompts: Mapping[str, str]):
        self.store = Store(part.path, cache_bytes=_CACHE_BYTES)
        layout = read_layout(self.store)
        for name, why in self.store.unread.items():
            logger.warning("%s: %s is not merged: %s", part.path, name, why)
        self.ends, self.rows = layout.episode_ends, int(layout.episode_ends[-1])
        paths = {path.removeprefix("data/"): info for path, info in self.store.arrays.items() if path[:5] == "data/"}
        named = {name: prompts.get(name, prompt) for name, prompt in layout.tasks}
        named = named or {part.name: prompts.get(part.name, part.name.replace("_", " "))}
        self.tasks = list(named.items())
        self.task_of_episode = [self.tasks[0]] * len(self.ends)
        if layout.tasks:
            ids = self.store.read(f"data/{TASK_ID}", slice(None))
            last = ids[self.ends - 1]
            if not np.array_equal(ids, np.repeat(last, np.diff(self.ends, prepend=0))):
                raise ValueError(f"{part.path}: data/{TASK_ID} changes within an episode")
            self.task_of_episode = [self.tasks[number] for number in last.tolist()]
            paths.pop(TASK_ID)
        self.arrays = paths

    def read(self, name: str, first: int, end: int) -> np.ndarray:
        try:
            return self.store.read(f"data/{name}", slice(first, end))
        except BadChunk as error:
            raise BadChunk(
                f"{self.store.root}: rows {first}..{end - 1} of data/{name} cannot be read ({error}): repair the store "
                "or leave it out"
            ) from error


def _check(stores: Sequence[_Opened]) -> None:
    """Raise ValueError naming every reason why the stores cannot be merged."""
    places = [store.store.root.resolve() for store in stores]
    problems = [f"{place} is given twice" for place in dict.fromkeys(places) if places.count(place) > 1]
    first = stores[0]
    for store in stores:
        name = store.store.root.name
        if TASK_ID in store.arrays:
            problems.append(f"{name} has a data/{TASK_ID}, but its attributes have no {TASKS} to explain it")
        for array in sorted({*first.arrays, *store.arrays}):
            mine, other = store.arrays.get(array), first.arrays.get(array)
            if mine is None or other is None:
                lacking, having = (name, first.store.root.name) if mine is None else (first.store.root.name, name)
                problems.append(f"{lacking} has no data/{array}, but {having} has one")
            elif mine.shape[0] != store.rows:
                problems.append(f"{name}: data/{array} has {mine.shape[0]} rows for {store.rows} steps")
            elif _kind(mine) != _kind(other):
                other_name = first.store.root.name
                problems.append(f"data/{array} is {_kind(mine)} per step in {name}, {_kind(other)} in {other_name}")
    if problems:
        raise ValueError("these stores cannot be merged:\n  " + "\n  ".join(problems))


def _kind(info: ArrayInfo) -> Any:
    return f"{info.dtype.name} {list(info.shape[1:])}"
