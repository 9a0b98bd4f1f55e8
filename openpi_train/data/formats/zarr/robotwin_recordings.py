"""Converts RoboTwin's recordings, one HDF5 file per episode, to a replay buffer, as its `policy/DP/process_data.py`.

    data/episode0.hdf5  joint_action/vector [n, dims]    observation/<camera>/rgb [n] pictures, JPEG

The action of a step is the joint vector of the next one, so an episode of n recorded steps has n - 1 rows.
RoboTwin passes RGB to an encoder that takes BGR, so its decoded pictures have red and blue swapped; they are swapped
back here, as in its script. Read next: `zarr_writer.py`, which writes the store.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import image
from openpi_train.data.core.damage import raise_if_system
from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.zarr.store import ArrayInfo
from openpi_train.data.formats.zarr.zarr_writer import Contents, read_across, write_store

_VECTOR = "joint_action/vector"


def convert(
    recordings: Path, out: Path, *, cameras: Sequence[str], task: str, prompt: str, chunk_rows: int = 100
) -> None:
    """Write all episodes in `recordings`, or in its folder data/, to the store `out`; if interrupted, call it again.

    Raises FileNotFoundError if there are none, ValueError for a missing extra, missing cameras or inconsistent
    episodes, BadRecord for damaged files, FileExistsError, OSError if it cannot be written.
    """
    episodes = [_Episode(path, cameras) for path in _files(recordings)]
    first, problems = episodes[0], []
    for episode in episodes[1:]:
        for what, mine, other in zip(("dims", "picture sizes"), episode.shapes, first.shapes, strict=True):
            if mine != other:
                problems.append(f"{episode.path.name} has {what} {mine}, {first.path.name} {other}")
    if problems:
        raise ValueError(f"the episodes in {recordings} do not fit into one store:\n  " + "\n  ".join(problems))
    ends = np.cumsum([episode.rows for episode in episodes])
    joints = ArrayInfo((int(ends[-1]), first.dims), np.dtype(np.float32), chunk_rows)
    sizes = {name: (int(ends[-1]), 3, *first.sizes[name]) for name in cameras}
    arrays = {name: ArrayInfo(shape, np.dtype(np.uint8), chunk_rows) for name, shape in sizes.items()}

    contents = Contents(
        arrays={**arrays, "state": joints, "action": joints},
        read=functools.partial(read_across, episodes),
        episode_ends=ends.astype(np.int64),
        tasks=[(task, prompt)],
        task_ids=np.zeros(len(ends), np.int32),
        identity={"files": [episode.stamp for episode in episodes], "task": [task, prompt]},
    )
    write_store(contents, out)


class _Episode:
    """One file; its rows are the recorded steps except the last, which has no action."""

    def __init__(self, path: Path, cameras: Sequence[str]):
        self.path, found = path, path.stat()
        self.stamp = [str(path.resolve()), found.st_size, found.st_mtime_ns]
        with _opened(path) as file:
            recorded = sorted(name for name, group in file.get("observation", {}).items() if "rgb" in group)
            lacking = [name for name in cameras if name not in recorded]
            if lacking:
                raise ValueError(
                    f"{path} has no pictures of {', '.join(lacking)}; it has {', '.join(recorded) or 'none'}: "
                    "see --cameras"
                )
            if _VECTOR not in file or file[_VECTOR].ndim != 2:
                raise ValueError(f"{path} has no {_VECTOR} with one row per step; it has {', '.join(sorted(file))}")
            steps, self.dims = file[_VECTOR].shape
            if steps < 2:
                raise ValueError(f"{path} has {steps} steps; at least two are needed for one action")
            for name in cameras:
                pictures = file[f"observation/{name}/rgb"].shape[0]
                if pictures != steps:
                    raise ValueError(f"{path} has {pictures} pictures of {name} for {steps} steps")
            self.rows = steps - 1
            self.sizes = {name: self._decode(file, name, 0).shape[:2] for name in cameras}

    @property
    def shapes(self) -> tuple[Any, Any]:
        """The shapes that all episodes of a store must share."""
        return self.dims, {name: list(size) for name, size in self.sizes.items()}

    def read(self, name: str, first: int, end: int) -> np.ndarray:
        """Rows first..end-1 of `state`, `action` or a camera's pictures, channels first."""
        with _opened(self.path) as file:
            if name in ("state", "action"):
                shift = int(name == "action")
                return np.asarray(file[_VECTOR][first + shift : end + shift], np.float32)
            frames = [self._decode(file, name, row) for row in range(first, end)]
        wrong = [row for row, frame in enumerate(frames) if frame.shape[:2] != self.sizes[name]]
        if wrong:
            raise BadRecord(
                f"{self.path}: step {first + wrong[0]} of {name} is {list(frames[wrong[0]].shape[:2])} pixels, the "
                f"first one {list(self.sizes[name])}"
            )
        return np.moveaxis(np.stack(frames), -1, 1)

    def _decode(self, file: Any, name: str, row: int) -> np.ndarray:
        """One picture, uint8 [height, width, 3], in RGB."""
        stored = file[f"observation/{name}/rgb"][row]
        if isinstance(stored, np.ndarray) and stored.ndim == 3:
            return stored.astype(np.uint8, casting="safe")
        data = stored if isinstance(stored, bytes) else np.asarray(stored).tobytes()
        try:
            return image.decode(data)[..., ::-1]
        except ValueError as error:
            raise BadRecord(f"{self.path}: the picture of {name} at step {row} cannot be decoded: {error}") from error


def is_recording(path: Path) -> bool:
    """Whether the path holds RoboTwin's recordings."""
    return any(any(folder.glob("episode*.hdf5")) for folder in (path, path / "data"))


def _files(recordings: Path) -> list[Path]:
    """The episodes' files in the order of their numbers."""
    folder = recordings / "data" if (recordings / "data").is_dir() else recordings
    numbered = {}
    for path in folder.glob("*.hdf5"):
        if match := re.fullmatch(r"episode_?(\d+)", path.stem):
            numbered[int(match[1])] = path
    if not numbered:
        raise FileNotFoundError(f"{folder} holds no episode<number>.hdf5; give a folder of RoboTwin's recordings")
    return [numbered[number] for number in sorted(numbered)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError as error:
        raise ValueError(f"HDF5 files need h5py: pip install 'openpi_train[hdf5]' ({error})") from error
    try:
        with h5py.File(path, "r") as file:
            yield file
    except OSError as error:
        raise_if_system(error, path)
        raise BadRecord(f"{path} cannot be read as HDF5: {error}") from error
