"""All kinds of faults that `data check` looks for in robots' demonstrations, in the order of the table.

To add one, write a function from `Examined` to findings, put it into `KINDS`, and describe it in `docs/data_check.md`.
Faults that are found while a dataset is read are told by its reader. Read next: `number_kinds.py`, `episode_kinds.py`,
`picture_kinds.py`, `text_kinds.py` (those of texts).
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator

from openpi_train.data.check import episode_kinds, number_kinds, picture_kinds, prompt_kinds
from openpi_train.data.check.examined import Examined
from openpi_train.data.findings import Finding
from openpi_train.data.source import Source
from openpi_train.robots.robot import Robot

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FaultKind:
    """A kind of fault: what looks for it, and whether opening a dataset for the first time does so already."""

    find: Callable[[Examined], Iterator[Finding]]
    at_opening: bool = False

    @property
    def about(self) -> str:
        """What it is, in one sentence."""
        return (self.find.__doc__ or "").partition("\n")[0]


KINDS = (
    FaultKind(number_kinds.not_finite, at_opening=True),
    FaultKind(number_kinds.constant, at_opening=True),
    FaultKind(number_kinds.stuck, at_opening=True),
    FaultKind(number_kinds.clipped, at_opening=True),
    FaultKind(number_kinds.actions_are_states),
    FaultKind(number_kinds.gripper_range),
    FaultKind(episode_kinds.copies, at_opening=True),
    FaultKind(episode_kinds.nearly_copies, at_opening=True),
    FaultKind(episode_kinds.flags),
    FaultKind(episode_kinds.dropped_frames, at_opening=True),
    FaultKind(episode_kinds.time_jumps, at_opening=True),
    FaultKind(episode_kinds.time_backwards, at_opening=True),
    FaultKind(prompt_kinds.mixed_scripts, at_opening=True),
    FaultKind(picture_kinds.missing_cameras),
    FaultKind(picture_kinds.unreadable),
    FaultKind(picture_kinds.black),
    FaultKind(picture_kinds.frozen),
)


def examine(data: Examined) -> list[Finding]:
    """The findings of all kinds, after those that opening the dataset told."""
    found = []
    try:
        _ = data.numbers
    except ValueError as error:
        found.append(_unfit(data.robot, error))
        data = dataclasses.replace(data, robot=None)
    found += [finding for kind in KINDS for finding in kind.find(data)]
    told = {finding.kind for finding in found}
    return [*(finding for finding in data.source.findings if finding.kind not in told), *found]


def at_opening(name: str, source: Source) -> list[Finding]:
    """The findings of the kinds that columns alone show, for the index of a dataset that is built."""
    data = Examined(name=name, source=source)
    return [finding for kind in KINDS if kind.at_opening for finding in kind.find(data)]


def _unfit(robot: Robot | None, error: ValueError) -> Finding:
    return Finding(
        kind="robot does not fit",
        count=1,
        unit="dataset",
        what=str(error),
        training="opening is refused",
        remedy="Choose the robot that recorded these data, or name its columns",
    )
