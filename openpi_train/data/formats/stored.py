"""Base class of sources whose episodes and columns are memory-mapped tables; encoded pictures are stored elsewhere.

Read next: `core/tables.py`, then `rlds/rlds_source.py`, `lerobot/lerobot_source.py` and `repack.py`, which read
pictures.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from openpi_train.data.core import image
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.source import BadRecord, Source
from openpi_train.data.core.tables import Tables


class StoredSource(Source):
    """A source with the tables `stored` of an index or repacked dataset; `root` is the dataset's folder."""

    def __init__(self, root: Path, stored: Tables):
        self._root, self.stored = root, stored
        self.fingerprint = stored.manifest["fingerprint"]
        self.episode_ends = stored.arrays["episode_ends"]
        self.episode_ids = cast(Sequence[str], stored.arrays["episode_ids"])
        self.columns = stored.group("columns/")
        self.prompts = stored.prompts
        self.prompt_index = stored.arrays["prompt_index"]
        self.cameras = tuple(stored.manifest["cameras"])
        self.num_dropped = sum(entry.get("episodes", 1) for entry in stored.manifest.get("dropped", ()))
        self.findings = [Finding.from_json(entry) for entry in stored.manifest.get("findings", ())]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._root, self.stored)

    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        """See `Source.frames`; one read and one decode for each step."""
        steps = np.asarray(steps).reshape(-1)
        # The size is that of the first picture; without a step it is the manifest's, which may be unknown.
        frames = np.empty((0, *self.stored.manifest["cameras"].get(camera, (0, 0)), 3), np.uint8)
        for position, step in enumerate(steps.tolist()):
            data = self.encoded(step, camera)
            try:
                if position == 0:
                    frames = np.empty((len(steps), *image.image_size(data), 3), np.uint8)
                image.decode_into(data, frames[position])
            except ValueError as error:
                raise BadRecord(f"{self.describe(step)}, {camera}: cannot decode the image: {error}") from error
        return frames

    def check(self, step: int, camera: str) -> None:
        """Raise KeyError or IndexError if there is no such camera or step."""
        if camera not in self.cameras:
            raise KeyError(f"no camera {camera!r} in {self._root}; it has {list(self.cameras)}")
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is not in 0..{self.num_steps - 1}")
