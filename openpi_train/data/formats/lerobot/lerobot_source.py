"""Random access to LeRobot datasets (2.0, 2.1, 3.0): columns from the index, frames from video or copied pictures.

Read next: `lerobot_layout.py` (the files), `lerobot_index.py` (built at the first opening), `lerobot_video.py`
(one frame of a video). Neither lerobot nor torch is needed; pyarrow reads the parquet files while indexing, PyAV the
videos.
"""

from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import files, tables
from openpi_train.data.core.damage import of_record
from openpi_train.data.core.source import About, column_name
from openpi_train.data.formats.lerobot import lerobot_video
from openpi_train.data.formats.lerobot.lerobot_layout import INFO_FILE, flat_names
from openpi_train.data.formats.lerobot.lerobot_metadata import require
from openpi_train.data.formats.spans import read_span
from openpi_train.data.formats.stored import StoredSource


class LeRobotSource(StoredSource):
    """An opened dataset. See `Source`."""

    def __init__(self, root: Path, index: tables.Tables):
        super().__init__(root, index)
        self._spans, self._files = index.group("spans/"), index.group("files/")
        self._encodings = [lerobot_video.Encoding(**fields) for fields in index.manifest["encodings"]]

    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        """See `Source.frames`; frames that share a video's key frame are decoded in one pass."""
        steps = np.asarray(steps).reshape(-1)
        for step in steps.tolist():
            self.check(step, camera)
        height, width = self.stored.manifest["cameras"][camera]
        if not len(steps) or self._encoding(int(steps[0]), camera) is None:
            return super().frames(steps, camera)
        groups: dict[tuple[int, int], list[int]] = {}
        for position, step in enumerate(steps.tolist()):
            groups.setdefault((self._file(step, camera), int(self._spans[camera][step, 0])), []).append(position)
        frames: dict[int, np.ndarray] = {}
        for positions in groups.values():
            decoded = self._decode(steps[positions], camera, (height, width, 3))
            frames |= zip(positions, decoded, strict=True)
        # A single frame, the usual case, is not copied again.
        return frames[0][None] if len(steps) == 1 else np.stack([frames[position] for position in range(len(steps))])

    def encoded(self, step: int, camera: str) -> bytes:
        """The camera's picture at one step as stored. Raises ValueError if the camera's frames are a video."""
        self.check(step, camera)
        if self._encoding(step, camera) is not None:
            raise ValueError(f"{camera} of {self._root} is a video, whose frames are not stored as single pictures")
        file = self._file(step, camera)
        path = self.stored.root / self.stored.manifest["tables"] / "pictures" / f"{file}.bin"
        try:
            return read_span(path, *self.stored.manifest["pictures"][str(file)], *self._spans[camera][step].tolist())
        except OSError as error:
            raise of_record(error, f"{self.describe(step)}, {camera}") from error

    def about(self) -> About:
        """See `Source.about`; names are those of the features."""
        info, skipped = files.read_json(self._root / INFO_FILE), self.stored.manifest["skipped"]
        features = {column_name(name): feature for name, feature in info["features"].items()}
        names = {column: flat_names(features[column].get("names")) for column in self.columns}
        return About(
            control_hz=info.get("fps"),
            dim_names={column: dims for column, dims in names.items() if dims},
            left_out={column_name(name): why for name, why in skipped.items()},
            robot_type=info.get("robot_type"),
        )

    @property
    def recorded_hz(self) -> float | None:
        """See `Source.recorded_hz`; the episodes' metadata are not read."""
        return files.read_json(self._root / INFO_FILE).get("fps")

    def times(self, first: int, end: int) -> np.ndarray:
        """See `Source.times`; the column `timestamp` of the parquet files, s from the episode's beginning."""
        episodes = range(self.episode_of(first), self.episode_of(end - 1) + 1)
        records, data_files = self.stored.arrays["records"], self.stored.arrays["data_files"]
        found, of_file, file = [], {}, -1
        for episode in episodes:
            if int(data_files[episode]) != file:
                file = int(data_files[episode])
                of_file = _times_of_file(self._root / self.stored.manifest["sources"][file][0])
            found.append(of_file[int(records[episode])])
        return np.concatenate(found)

    def describe(self, step: int) -> str:
        episode = self.episode_of(step)
        file = self.stored.manifest["sources"][int(self.stored.arrays["data_files"][episode])][0]
        return f"{self._root / file}, record {int(self.stored.arrays['records'][episode])}, {self.place_of(step)}"

    def _decode(self, steps: np.ndarray, camera: str, shape: tuple[int, ...]) -> list[np.ndarray]:
        """Decode the frames of these steps, which must follow the same key frame of the same file."""
        first_step = int(steps[0])
        name, size, mtime_ns = self.stored.manifest["sources"][self._file(first_step, camera)]
        spans = self._spans[camera][steps]
        rows = self.stored.arrays["packets"][spans[0, 0] : spans[:, 1].max() + 1].tolist()
        times = self.stored.arrays["packets"][spans[:, 1], 2].tolist()
        encoding = self._encoding(first_step, camera)
        assert encoding is not None
        try:
            path = self._root / name
            packets = [(read_span(path, size, mtime_ns, offset, length), time) for offset, length, time in rows]
            decoded = lerobot_video.decode(encoding, packets, set(times))
            found = {frame.shape for frame in decoded.values()}
            if found != {shape}:
                raise ValueError(f"its frames are {found}, expected {shape}")
        except (OSError, ValueError) as error:
            raise of_record(error, f"{self.describe(first_step)}, {camera}, {name}") from error
        return [decoded[time] for time in times]

    def _file(self, step: int, camera: str) -> int:
        """The index, in the manifest's files, of the file that holds a step's frame."""
        return int(self._files[camera][self.episode_of(step)])

    def _encoding(self, step: int, camera: str) -> lerobot_video.Encoding | None:
        """The encoding of a step's video; None if the frame is a picture."""
        number: Any = self.stored.manifest["encoding_of"].get(str(self._file(step, camera)))
        return None if number is None else self._encodings[number]


def _times_of_file(path: Path) -> dict[int, np.ndarray]:
    """The time stamps in a parquet file by the number of their episode."""
    table = require("pyarrow.parquet").read_table(path, columns=["episode_index", "timestamp"])
    numbers, times = (table[name].to_numpy().reshape(-1) for name in ("episode_index", "timestamp"))
    order = np.argsort(numbers, kind="stable")
    episodes, begins = np.unique(numbers[order], return_index=True)
    return dict(zip(episodes.tolist(), np.split(times[order], begins[1:]), strict=True))
