"""What the scripts in `interop/recorded` wrote of a policy of LeRobot's: its folder, with inputs, outputs and sizes."""

import functools
import json
from pathlib import Path

import numpy as np


class Recorded:
    """A recorded policy; `folder` is LeRobot's own, with `recorded.json` and `io.npz` beside its files."""

    def __init__(self, name: str):
        self.folder = Path(__file__).resolve().parent / "interop" / "recorded" / name

    @functools.cached_property
    def facts(self) -> dict:
        """Sizes, versions, and how far LeRobot's own float32 is from its float64."""
        return json.loads((self.folder / "recorded.json").read_text())

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Inputs and outputs."""
        with np.load(self.folder / "io.npz") as file:
            return dict(file)

    def with_field(self, field: str, value: object, to: Path) -> Path:
        """The folder, linked in `to`, with another value of a field of `config.json`."""
        for path in self.folder.iterdir():
            (to / path.name).symlink_to(path)
        changed = {**json.loads((self.folder / "config.json").read_text()), field: value}
        (to / "config.json").unlink()
        (to / "config.json").write_text(json.dumps(changed))
        return to
