"""All kinds of faults that `data check` looks for in robots' demonstrations, in the order of the table.

To add one, write a function from `ExaminedData` to findings, put it into `KINDS`, and describe it in
`docs/howto/check_data.md`.
Faults that are found while a dataset is read are told by its reader. Read next: `number_kinds.py`,
`following_kinds.py`, `episode_kinds.py`, `picture_kinds.py`, `text_kinds.py` (those of texts).
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from openpi_train.data.check import (
    comparison_kinds,
    episode_kinds,
    following_kinds,
    number_kinds,
    picture_kinds,
    prompt_kinds,
)
from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.source import Source
from openpi_train.robots.robot import Robot

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        find: What looks for it; its docstring says what it is.
        names: `Finding.kind` of what it tells.
        at_opening: Whether opening a dataset for the first time looks for it already: in columns alone.
    """

    find: Callable[[ExaminedData], Iterator[Finding]]
    names: tuple[str, ...]
    at_opening: bool = False

    @property
    def about(self) -> str:
        """What it is, in one sentence."""
        return (self.find.__doc__ or "").partition("\n")[0]


KINDS = (
    FaultKind(number_kinds.not_finite, ("not finite",), at_opening=True),
    FaultKind(number_kinds.constant, ("constant dims",), at_opening=True),
    FaultKind(number_kinds.stuck, ("stuck dims",), at_opening=True),
    FaultKind(number_kinds.clipped, ("clipped sensors",), at_opening=True),
    FaultKind(number_kinds.spikes, ("spike",)),
    FaultKind(
        number_kinds.actions_are_states,
        ("actions are the next states", "actions are the present states", "actions are the previous states"),
    ),
    FaultKind(comparison_kinds.doubled, ("steps doubled",)),
    FaultKind(comparison_kinds.zero_actions, ("zero actions in some episodes",)),
    FaultKind(comparison_kinds.units_mixed, ("units mixed",)),
    FaultKind(number_kinds.gripper_range, ("gripper outside its range", "gripper uses little of its range")),
    FaultKind(following_kinds.gripper_inverted, ("gripper inverted in some episodes",)),
    FaultKind(following_kinds.gripper_scales, ("gripper of several scales",)),
    FaultKind(following_kinds.inverted, ("action inverted",)),
    FaultKind(following_kinds.late, ("actions late",)),
    FaultKind(episode_kinds.copies, ("copies of episodes",), at_opening=True),
    FaultKind(episode_kinds.nearly_copies, ("near-copies of episodes",), at_opening=True),
    FaultKind(episode_kinds.held_out_too, ("held-out episodes in training",)),
    FaultKind(episode_kinds.of_one_step, ("episodes of one step",), at_opening=True),
    FaultKind(episode_kinds.flags, ("flags in some episodes only",)),
    FaultKind(episode_kinds.dropped_frames, ("dropped frames",), at_opening=True),
    FaultKind(episode_kinds.time_jumps, ("time stamps that jump",), at_opening=True),
    FaultKind(episode_kinds.time_backwards, ("time stamps that go back",), at_opening=True),
    FaultKind(prompt_kinds.mixed_scripts, ("languages mixed",), at_opening=True),
    FaultKind(picture_kinds.missing_cameras, ("missing cameras",)),
    FaultKind(picture_kinds.unreadable, ("unreadable pictures",)),
    FaultKind(picture_kinds.black, ("black pictures", "pictures of one colour")),
    FaultKind(picture_kinds.frozen, ("frozen pictures",)),
    FaultKind(picture_kinds.cameras_alike, ("cameras alike",)),
    FaultKind(picture_kinds.exchanged, ("cameras exchanged",)),
)


def examine(data: ExaminedData) -> list[Finding]:
    """The findings of all kinds, after those of its reader.

    Kinds that the dataset's opening looked for are looked for again, in the columns that the robot reads.
    """
    found = []
    try:
        _ = data.numbers
    except ValueError as error:
        found.append(_unfit(data.robot, error))
        data = dataclasses.replace(data, robot=None)
    found += _told(data, KINDS)
    ours = {name for kind in KINDS for name in kind.names}
    return [*(finding for finding in data.source.findings if finding.kind not in ours), *found]


def at_opening(name: str, source: Source) -> list[Finding]:
    """The findings of the kinds that columns alone show, for the index of a dataset that is built."""
    data = ExaminedData(name=name, source=source)
    return _told(data, [kind for kind in KINDS if kind.at_opening])


def _told(data: ExaminedData, kinds: Sequence[FaultKind]) -> list[Finding]:
    # Absurd numbers, which these may be, overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        return [finding for kind in kinds for finding in kind.find(data)]


def _unfit(robot: Robot | None, error: ValueError) -> Finding:
    return Finding(
        kind="robot does not fit",
        count=1,
        unit="dataset",
        what=str(error),
        training="opening is refused",
        remedy="Choose the robot that recorded these data, or name its columns",
    )
