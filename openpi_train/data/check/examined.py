"""A dataset under examination: its columns of states and actions, and a table with a row of measures per episode.

Read next: `episode_table.py` (the measures), `fault_kinds.py` (what is looked for in them).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from openpi_train.data.check.episode_table import EpisodeTable, NumberColumn, measured
from openpi_train.data.core.source import Source
from openpi_train.robots.robot import Robot

# Shares of control steps, and what an episode usually does, are judged from this many on.
FEWEST_STEPS, FEWEST_EPISODE_STEPS = 100, 10
# Parts of columns' names without a robot that says what it reads.
_ACTIONS = ("action",)
_STATES = ("state", "joint", "qpos", "pose", "proprio", "gripper", "cartesian", "eef")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExaminedData:
    """An opened dataset and what is known about it.

    Attributes:
        name: What messages call it.
        held_out: The dataset whose episodes are held out, if that is another one.
        robot: Whose states and actions these are; None: columns are told by their names.
        num_frames: Pictures of each camera that are looked at.
        kept: Folder for the finished parts of the table, so that an interrupted examination goes on; None: none.
    """

    name: str
    source: Source
    held_out: Source | None = None
    robot: Robot | None = None
    num_frames: int = 200
    kept: Path | None = None

    @functools.cached_property
    def numbers(self) -> tuple[NumberColumn, ...]:
        """The columns of states and actions. Raises ValueError if the robot does not find its own."""
        source, names = self.source, self.source.about().dim_names
        wanted = source.columns if self.robot is None else columns_read(self.robot, source)
        found = []
        for name in sorted(wanted):
            role, values = role_of(name), source.columns[name]
            if role is None or values.dtype.kind not in "fiu" or name.startswith("next/"):
                continue
            wide = values.reshape(len(values), -1)
            own = names.get(name, ())
            is_named = len(own) == wide.shape[1]
            dims = [f"{name}: {dim}" for dim in own] if is_named else [f"{name}[{dim}]" for dim in range(wide.shape[1])]
            found.append(NumberColumn(name, role, wide, tuple(dims), is_named))
        return tuple(found)

    @functools.cached_property
    def table(self) -> EpisodeTable:
        """The measures of every episode; made at the first use, which reads all columns once."""
        return measured(self.source, self.numbers, self.robot, name=self.name, kept=self.kept)

    @property
    def cameras(self) -> Sequence[str]:
        """The cameras that the robot reads, or all."""
        if self.robot is None:
            return self.source.cameras
        return [camera for camera in self.robot.cameras.values() if camera in self.source.cameras]

    def first_step(self, episode: int) -> int:
        """The first control step of an episode."""
        return self.source.steps_of(episode).start


class _SeenColumns(dict[str, np.ndarray]):
    """Columns that remember which of them were read."""

    def __init__(self, columns: Mapping[str, np.ndarray]):
        super().__init__(columns)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.asked.add(name)
        return super().__getitem__(name)


def columns_read(robot: Robot, source: Source) -> set[str]:
    """The columns that a robot reads, seen while it reads the first episode. Raises ValueError as `Robot.read`."""
    end = int(source.episode_ends[0])
    columns = _SeenColumns({name: column[:end] for name, column in source.columns.items()})
    robot.read(columns, np.array([end]))
    return columns.asked


def role_of(name: str) -> str | None:
    """Whether a column of this name holds a "state" or an "action"; None for others."""
    lower = name.lower()
    if any(part in lower for part in _ACTIONS):
        return "action"
    return "state" if any(part in lower for part in _STATES) else None
