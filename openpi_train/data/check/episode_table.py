"""Measures of every episode, made in one pass over the columns, in blocks of whole episodes.

A finished block is kept as a file, so that an interrupted pass goes on with the next one. Memory holds one block and a
row of measures per episode. Read next: `near_copies.py` (digests of episodes), `fault_kinds.py`
(what is judged by them).
"""

import dataclasses
import hashlib
import json
import logging
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.check import following_measures, motion_measures
from openpi_train.data.check.near_copies import RowDigests
from openpi_train.data.core import files
from openpi_train.data.core.progress import Progress
from openpi_train.data.core.source import Source
from openpi_train.robots.robot import Robot

logger = logging.getLogger(__name__)

# Increase it when a measure changes: parts of an interrupted pass are then made again.
_VERSION = 4
_BLOCK_STEPS = 1 << 15
# Columns, by the last part of their names, that say how an episode ended.
_FLAGS = ("success", "is_success", "done", "is_last")
# A gap between two time stamps that is longer than so many usual ones has lost a frame.
LONGEST_GAP = 1.5
# Ranges of grippers by the last word of the dim's name (`robots/`).
GRIPPER_RANGES = {"fraction": (0.0, 1.0), "sign": (-1.0, 1.0)}
# How far beyond its range a gripper may be measured, in ranges.
_SLACK = 0.1

Measures = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class NumberColumn:
    """A column of states or actions [steps, dims], with its role and the name of each dim, its own if `is_named`."""

    name: str
    role: str
    values: np.ndarray
    dims: tuple[str, ...]
    is_named: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeTable:
    """`measures` by name, each [episodes, ...]; `None` for those that the dataset does not have.

    Of each column: `low/<name>`, `high/<name>` [e, d] (of finite values), `not_finite/<name>` int [e, d], `at_low/...`
    and `at_high/...` int [e, d] (steps at the episode's extreme, between its first and last change), and
    `first_not_finite` int [e], a step or -1. `is_next`, `is_present` and `is_previous` int [e]: steps whose action
    equals that state. `hashes` uint64 [e, k] (`near_copies.py`). `flag/<name>` [e]: 1 if ever set, 0 if not, -1 if
    missing. `gaps`, `jumps`, `backwards` int [e]: of time stamps; `gap_at` and so on the first step of each, or -1.
    `doubled` int32 [e], `doubled_at` int64 [e]: rows that repeat the one before while the arm moves. Of each pair of
    columns: `commanded/<state>/<action>` [e, d] and `commanded_at/...` int64 [e, d], the action's largest range in a
    stretch in which the state is still, and its first step.
    `gripper_out`, `gripper_at` int [e, g], `gripper_low`, `gripper_high` [e, g]: of the robot's gripper dims.
    `follow/<form>/<state>/<action>` [e, lags] and `follow_sign/...` [e, d]: `following_measures.py: of_arms`.
    `grip` [e, p, 2] and `grip_range` [e, p, 2], of the state and the action: of each of `gripper_pairs`.
    """

    digests: RowDigests
    measures: Mapping[str, np.ndarray]
    gripper_dims: tuple[str, ...]

    def get(self, name: str) -> np.ndarray | None:
        """A measure."""
        return self.measures.get(name)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.measures[name]

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The measures whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): array for name, array in self.measures.items() if name.startswith(prefix)}


def measured(
    source: Source, numbers: Sequence[NumberColumn], robot: Robot | None, *, name: str, kept: Path | None
) -> EpisodeTable:
    """The measures of all episodes; those of blocks that an earlier pass has kept are not made again."""
    digests = RowDigests.of([column.values for column in numbers])
    for column in source.columns.values():
        forget(column)
    grippers = gripper_dims(robot)
    key = _key(source, numbers, robot)
    progress = Progress(f"check of {name}", source.num_steps, "steps")
    parts: list[Measures] = []
    all_blocks = list(blocks(source.episode_ends))
    paths = [None if kept is None else kept / "parts" / f"{first}-{end}-{key}.npz" for first, end in all_blocks]
    finished = finished_parts(paths, name)
    for (first, end), path in zip(all_blocks, paths, strict=True):
        if path in finished:
            with np.load(path) as part:
                parts.append(dict(part))
        else:
            parts.append(_Block(source, numbers, robot, digests, first, end).measures())
            if path is not None:
                files.write_npz(path, parts[-1])
        for column in source.columns.values():
            forget(column)
        progress.add(len(source.steps_of(end - 1)) + source.steps_of(end - 1).start - source.steps_of(first).start)
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
    return EpisodeTable(digests, joined, tuple(dim for dim, _ in grippers))


def finished_parts(paths: Sequence[Path | None], name: str) -> set[Path]:
    """The files of an interrupted pass that are whole, which is told of `name`."""
    finished = {path for path in paths if path is not None and files.is_whole_npz(path)}
    if finished:
        logger.info("check of %s: %d of %d parts are those of an earlier one", name, len(finished), len(paths))
    return finished


def blocks(episode_ends: np.ndarray, most: int = _BLOCK_STEPS) -> Iterator[tuple[int, int]]:
    """First episode and the one after the last of blocks with at most `most` steps, or one episode."""
    first, number = 0, len(episode_ends)
    while first < number:
        start = int(episode_ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(episode_ends, start + most, side="right")))
        yield first, end
        first = end


def gripper_dims(robot: Robot | None) -> list[tuple[str, tuple[float, float]]]:
    """Name and range of each gripper dim of a robot's state, then of its actions, if the name says the range."""
    if robot is None:
        return []
    names = [f"state: {name}" for name in robot.state_names] + [f"action: {name}" for name in robot.action_names]
    return [
        (name, GRIPPER_RANGES[unit])
        for name in names
        if "gripper" in name and (unit := name.rpartition("_")[2]) in GRIPPER_RANGES
    ]


def gripper_pairs(numbers: Sequence[NumberColumn], robot: Robot | None) -> list[tuple[str, str]]:
    """The names of a state dim and of an action dim of each gripper: of the robot, or else of the columns' own names.

    Dims with equal names belong together, else equally many in their order, or all with the only action.
    """
    if robot is not None:
        states, actions = list(robot.state_names), list(robot.action_names)
    else:
        states, actions = (
            [dim for column in numbers if column.role == role for dim in column.dims] for role in ("state", "action")
        )
    states, actions = ([name for name in names if is_gripper([name])[0]] for names in (states, actions))
    of_action = {name.rpartition(": ")[2]: name for name in actions}
    if len(of_action) == len(states) and all(name.rpartition(": ")[2] in of_action for name in states):
        return [(name, of_action[name.rpartition(": ")[2]]) for name in states]
    if len(actions) == 1:
        return [(name, actions[0]) for name in states]
    return list(zip(states, actions, strict=True)) if len(states) == len(actions) else []


def pairs(numbers: Sequence[NumberColumn]) -> Iterator[tuple[NumberColumn, NumberColumn]]:
    """Columns of states and of actions whose dims belong together, one by one: they have equally many."""
    for state in numbers:
        for action in numbers:
            if (state.role, action.role) == ("state", "action") and len(state.dims) == len(action.dims):
                yield state, action


def is_gripper(dims: Sequence[str]) -> np.ndarray:
    """Whether each of these names is that of a gripper, bool [dims]."""
    return np.array([any(part in dim.lower() for part in ("gripper", "finger", "jaw")) for dim in dims], bool)


def flag_columns(source: Source) -> list[str]:
    """The columns that say how an episode ended."""
    return [
        name
        for name, column in source.columns.items()
        if name.rpartition("/")[2] in _FLAGS and column.size == len(column)
    ]


def _key(source: Source, numbers: Sequence[NumberColumn], robot: Robot | None) -> str:
    parts = [_VERSION, source.fingerprint, [column.name for column in numbers], repr(robot)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def forget(column: np.ndarray) -> None:
    """Let the system take back the pages of a mapped column that were read: they are not needed again soon."""
    mapped = getattr(column, "_mmap", None)
    if mapped is not None and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


class _Block:
    """The episodes `first` up to `end`, without that one; makes their measures."""

    def __init__(
        self,
        source: Source,
        numbers: Sequence[NumberColumn],
        robot: Robot | None,
        digests: RowDigests,
        first: int,
        end: int,
    ):
        self.source, self.numbers, self.robot, self.digests = source, numbers, robot, digests
        self.start, self.stop = source.steps_of(first).start, int(source.episode_ends[end - 1])
        self.ends = np.asarray(source.episode_ends[first:end], np.int64) - self.start
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.episode = np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))

    def measures(self) -> Measures:
        values = {column.name: np.asarray(column.values[self.start : self.stop]) for column in self.numbers}
        found: Measures = {}
        bad = np.zeros(len(self.episode), bool)
        for name, block in values.items():
            finite = np.isfinite(block)
            bad |= ~finite.all(axis=1)
            found |= {f"{what}/{name}": array for what, array in self._extremes(block, finite).items()}
        found["first_not_finite"] = self._first(bad)
        found |= self._shifted(values)
        found |= self._together(values)
        rows = [values[column.name] for column in self.numbers]
        found["hashes"] = self.digests.of_episodes(rows, self.starts, self.ends)
        for name in flag_columns(self.source):
            found[f"flag/{name}"] = self._flag(np.asarray(self.source.columns[name][self.start : self.stop]).ravel())
        times = self.source.times(self.start, self.stop)
        if times is not None:
            found |= self._gaps(np.asarray(times, np.float64))
        return found | self._followed(values) | self._grippers(values)

    def _extremes(self, block: np.ndarray, finite: np.ndarray) -> dict[str, Any]:
        """Of one column: extremes, and steps at them that are not in the first or last stretch of equal values."""
        if not finite.all():
            block = np.where(finite, block, np.nan)  # which fmin and fmax leave out
        low, high = (reduce.reduceat(block, self.starts, axis=0) for reduce in (np.fmin, np.fmax))
        number = np.arange(len(block), dtype=np.int32)[:, None]
        changed = block != block[self.starts][self.episode]
        first = np.minimum.reduceat(np.where(changed, number, len(block)), self.starts, axis=0)
        changed = block != block[self.ends - 1][self.episode]
        last = np.maximum.reduceat(np.where(changed, number, -1), self.starts, axis=0)
        inside = (number >= first[self.episode]) & (number <= last[self.episode])
        return {
            "low": low,
            "high": high,
            "not_finite": self._count(~finite),
            "at_low": self._count((block == low[self.episode]) & inside),
            "at_high": self._count((block == high[self.episode]) & inside),
        }

    def _shifted(self, values: Mapping[str, np.ndarray]) -> Measures:
        """Steps whose action equals the next state, the present one, and the previous one.

        The episodes' last steps do not count, of the previous one the first steps.
        """
        of = {role: [column for column in self.numbers if column.role == role] for role in ("state", "action")}
        pairs = [
            (values[state.name], values[action.name])
            for state in of["state"]
            for action in of["action"]
            if state.values.shape[1] == action.values.shape[1] > 1
        ]
        if not pairs:
            return {}
        counts = []
        for shift in (1, 0, -1):
            equal = np.zeros(len(self.episode), bool)
            for state, action in pairs:
                if shift < 0:
                    equal[1:] |= (action[1:] == state[:-1]).all(axis=1)
                else:
                    equal[: len(equal) - 1] |= (action[:-1] == state[shift:][: len(state) - 1]).all(axis=1)
            equal[self.starts if shift < 0 else self.ends - 1] = False
            counts.append(self._count(equal))
        return {"is_next": counts[0], "is_present": counts[1], "is_previous": counts[2]}

    def _together(self, values: Mapping[str, np.ndarray]) -> Measures:
        """States that are still while their actions move, and rows that are there twice."""
        found: Measures = {}
        for state, action in pairs(self.numbers):
            name = f"{state.name}/{action.name}"
            ranges, at = motion_measures.ranges_while_held(
                values[state.name], values[action.name], self.starts, self.ends
            )
            found |= {f"commanded/{name}": ranges, f"commanded_at/{name}": np.where(at < 0, -1, at + self.start)}
        roles = [column.role for column in self.numbers]
        states, actions = (
            np.concatenate(
                [np.empty((len(self.episode), 0)), *(values[one.name] for one in self.numbers if one.role == role)], 1
            )
            for role in ("state", "action")
        )
        cells = self.digests.cells[np.repeat(np.array(roles) == "state", [len(one.dims) for one in self.numbers])]
        doubled, at = motion_measures.doubled_rows(states, actions, self.starts, self.ends, cells)
        return found | {"doubled": doubled, "doubled_at": np.where(at < 0, -1, at + self.start)}

    def _flag(self, flags: np.ndarray) -> np.ndarray:
        """Whether a flag is ever set (1), or not (0), or missing (-1)."""
        missing = np.isnan(flags) if flags.dtype.kind == "f" else np.zeros(len(flags), bool)
        is_set = self._count(np.where(missing, 0, flags) > 0) > 0
        return np.where(self._count(missing) > 0, -1, is_set).astype(np.int8)

    def _gaps(self, times: np.ndarray) -> Measures:
        """Time stamps that go on by more than usual in their episode: by whole frames, by other times, or backwards."""
        found = {
            name: np.zeros(len(self.ends), np.int32 if name in ("gaps", "jumps", "backwards") else np.int64)
            for name in ("gaps", "jumps", "backwards", "gap_at", "jump_at", "backward_at")
        }
        for episode, (start, end) in enumerate(zip(self.starts.tolist(), self.ends.tolist(), strict=True)):
            steps = np.diff(times[start:end])
            finite = steps[np.isfinite(steps)]
            usual = float(np.median(finite)) if len(finite) else 0.0
            long = steps > LONGEST_GAP * usual if usual > 0 else np.zeros(len(steps), bool)
            ratio = steps / usual if usual > 0 else steps
            whole = long & (ratio < 20) & (np.abs(ratio - np.round(ratio)) < 0.25)
            for name, at, which in (
                ("gaps", "gap_at", whole),
                ("jumps", "jump_at", (long & ~whole) | ~np.isfinite(steps)),
                ("backwards", "backward_at", steps <= 0),
            ):
                found[name][episode] = which.sum()
                found[at][episode] = self.start + start + 1 + int(np.argmax(which)) if which.any() else -1
        return found

    def _followed(self, values: Mapping[str, np.ndarray]) -> Measures:
        """How states follow their actions, at several lags."""
        found: Measures = {}
        for state, action in pairs(self.numbers):
            arm = ~(is_gripper(state.dims) | is_gripper(action.dims))
            rows = values[state.name], values[action.name]
            for form, (profile, signs) in following_measures.of_arms(*rows, self.starts, self.ends, arm).items():
                name = f"{form}/{state.name}/{action.name}"
                found |= {f"follow/{name}": profile, f"follow_sign/{name}": signs}
        return found

    def _grippers(self, values: Mapping[str, np.ndarray]) -> Measures:
        dims, together = gripper_dims(self.robot), gripper_pairs(self.numbers, self.robot)
        if not dims and not together:
            return {}
        if self.robot is None:
            blocks_of = [(column.role, column.dims, values[column.name]) for column in self.numbers]
        else:
            columns = {name: np.asarray(column[self.start : self.stop]) for name, column in self.source.columns.items()}
            steps = self.robot.read(columns, self.ends)
            blocks_of = [
                ("state", self.robot.state_names, steps.state),
                ("action", self.robot.action_names, steps.actions),
            ]
        read = {
            f"{role}: {dim}": block[:, number] for role, names, block in blocks_of for number, dim in enumerate(names)
        }
        found: Measures = {}
        if together:
            states = np.stack([read[f"state: {state}"] for state, _ in together], axis=1)
            actions = np.stack([read[f"action: {action}"] for _, action in together], axis=1)
            found["grip"] = following_measures.of_grippers(states, actions, self.starts, self.ends)
            both = np.stack([states, actions], axis=2)
            high, low = (reduce.reduceat(both, self.starts, axis=0) for reduce in (np.fmax, np.fmin))
            found["grip_range"] = (high - low).astype(np.float32)
        if dims:
            block = np.stack([read[name] for name, _ in dims], axis=1)
            low, high = (np.array([bounds[end] for _, bounds in dims]) for end in (0, 1))
            slack = _SLACK * (high - low)
            out = (block < low - slack) | (block > high + slack)
            found |= {
                "gripper_out": self._count(out),
                "gripper_at": np.stack([self._first(out[:, dim]) for dim in range(len(dims))], axis=1),
                "gripper_low": np.fmin.reduceat(block, self.starts, axis=0),
                "gripper_high": np.fmax.reduceat(block, self.starts, axis=0),
            }
        return found

    def _count(self, which: np.ndarray) -> np.ndarray:
        """How many steps of each episode, int32 [e, ...]."""
        return np.add.reduceat(which.astype(np.int32), self.starts, axis=0)

    def _first(self, which: np.ndarray) -> np.ndarray:
        """The first such step of each episode, of the whole dataset's numbers, or -1; int64 [e]."""
        number = np.arange(self.start, self.stop)
        first = np.minimum.reduceat(np.where(which, number, np.iinfo(np.int64).max), self.starts)
        return np.where(first == np.iinfo(np.int64).max, -1, first)
