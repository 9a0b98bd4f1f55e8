"""Kinds of faults that show where states are compared with actions. Read next: `motion_measures.py`, the measures."""

from collections.abc import Iterator

import numpy as np

from openpi_train.data.check.episode_table import NumberColumn, is_gripper, pairs
from openpi_train.data.check.examined import FEWEST_EPISODE_STEPS, ExaminedData
from openpi_train.data.check.following_measures import FORMS
from openpi_train.data.check.number_kinds import most_spikes
from openpi_train.data.core.findings import Finding

# An episode has doubled steps from so many on, or all together from this share on.
_DOUBLED, _DOUBLED_SHARE = 5, 0.01
# A state moves as usual if its range is at least this share of the median of those of other episodes.
_AS_USUAL = 0.5
# Units differ between two groups of episodes whose largest values lie at least so far apart, with none between, in
# three of four dims of a column by about the same factor: degrees and radians by 57, metres and millimetres by 1000.
_UNIT_FACTOR, _UNIT_DIMS, _SAME_FACTOR = 20.0, 0.75, 3.0
# If only some dims differ, each of them and all together by so much that nothing lies between, and by about a unit:
# degrees in radians, centimetres or millimetres in metres.
_SOME_GAP, _JOINT_GAP, _UNITS, _NEAR_UNIT = 3.0, 10.0, (180 / np.pi, 100.0, 1000.0), 1.7
# A dim is away from zero if the middle of its range is at least this share of its largest value; idle ones are not.
_AWAY, _FOLLOWS = 0.6, 0.5
# A joint turns less than this, in radians.
_TURNS = 4 * np.pi


def doubled(data: ExaminedData) -> Iterator[Finding]:
    """Control steps whose states and actions repeat those of the step before, while the arm moves."""
    counts, first = data.table.get("doubled"), data.table.get("doubled_at")
    if counts is None or first is None:
        return
    if counts.max() < _DOUBLED and counts.sum() < max(_DOUBLED, _DOUBLED_SHARE * data.source.num_steps):
        return
    yield Finding(
        kind="steps doubled",
        count=int(counts.sum()),
        total=data.source.num_steps,
        unit="control steps",
        where=data.source.describe(int(first[np.flatnonzero(counts)[0]])),
        what=f"states and actions are those of the step before, between steps that move; in "
        f"{np.count_nonzero(counts)} of {len(counts)} episodes",
        training="the policy learns to stop and go",
        remedy="Remove the copies, or record at the rate of the robot",
    )


def zero_actions(data: ExaminedData) -> Iterator[Finding]:
    """Episodes whose actions are all zero though their states move, where those of others are not."""
    table, lengths = data.table, np.diff(data.source.episode_ends, prepend=0)
    of_all, moves, usual = None, np.zeros(len(lengths), bool), {}
    zero = {}
    for column in data.numbers:
        low, high = table[f"low/{column.name}"], table[f"high/{column.name}"]
        if column.role == "action":
            zero[column.name] = (low == 0) & (high == 0)
            arm = zero[column.name][:, ~is_gripper(column.dims)].all(axis=1)
            of_all = arm if of_all is None else of_all & arm
        else:
            usual[column.name] = high - low
    if of_all is None or not of_all.any() or of_all.all():
        return
    for column in data.numbers:
        if column.role == "state":
            ranges = usual[column.name]
            median = np.median(ranges[~of_all], axis=0)
            arm = (median > 0) & ~is_gripper(column.dims)
            if arm.any():
                # Half of the dims: an object that rolls is no robot that moves.
                moves |= (ranges >= _AS_USUAL * median)[:, arm].mean(axis=1) >= 0.5
    found = np.flatnonzero(of_all & moves & (lengths >= FEWEST_EPISODE_STEPS))
    if len(found):
        yield Finding(
            kind="zero actions in some episodes",
            count=len(found),
            total=data.source.num_episodes,
            unit="episodes",
            where=data.source.describe(data.first_step(int(found[0]))),
            what="the states move as in other episodes",
            training="the policy learns to do nothing there",
            remedy="Leave these episodes out, or find their actions again",
        )


def units_mixed(data: ExaminedData) -> Iterator[Finding]:
    """Episodes whose states have other units than those of others; degrees in dims whose names say radians."""
    for column in data.numbers:
        low, high = (data.table[f"{what}/{column.name}"] for what in ("low", "high"))
        largest = np.fmax(np.abs(low), np.abs(high)).astype(np.float64)
        if column.role == "state":
            yield from _groups(data, column, largest)
        for dim, name in enumerate(column.dims):
            in_radians = name.lower().rpartition("_")[2] in ("rad", "radian", "radians")
            beyond = np.flatnonzero(largest[:, dim] > _TURNS) if in_radians else np.empty(0, np.int64)
            if len(beyond) and not _are_few(data, column, dim, beyond):
                yield Finding(
                    kind="units mixed",
                    count=len(beyond),
                    total=len(largest),
                    unit="episodes",
                    where=data.source.describe(data.first_step(int(beyond[0]))),
                    what=f"{name} reaches {largest[beyond, dim].max():.4g}, which no joint does in radians",
                    training="the numbers are taken as they are",
                    remedy="Convert the column to the unit of its name",
                )


def _are_few(data: ExaminedData, column: NumberColumn, dim: int, episodes: np.ndarray) -> bool:
    """Whether so few steps of these episodes are beyond what a joint does that they are spikes."""
    most = most_spikes(data.source.num_steps)
    if len(episodes) > most:
        return False
    steps = [data.source.steps_of(int(episode)) for episode in episodes]
    values = np.concatenate([column.values[one.start : one.stop, dim] for one in steps]).astype(np.float64)
    return int((np.abs(values) > _TURNS).sum()) <= most


def _groups(data: ExaminedData, column: NumberColumn, largest: np.ndarray) -> Iterator[Finding]:
    """Two groups of episodes with very different values; `largest` [e, d] are the largest absolute ones of each."""
    arm = np.flatnonzero(~is_gripper(column.dims) & (largest > 0).all(axis=0))
    if len(arm) < 2 or len(largest) < 4:
        return
    values = np.log(largest[:, arm])
    prompts = data.source.prompt_index[np.append(0, data.source.episode_ends[:-1])]
    whole = _cut(values.mean(axis=1))
    factors = np.median(values[whole], axis=0) - np.median(values[~whole], axis=0)
    gaps = values[whole].min(axis=0) - values[~whole].max(axis=0)
    alike = (gaps > 0) & (np.abs(factors - np.median(factors)) < np.log(_SAME_FACTOR))
    if np.exp(np.median(factors)) >= _UNIT_FACTOR and alike.mean() >= _UNIT_DIMS:
        if _moves(data, column, arm, ~whole).mean() >= 0.5:
            yield _told(data, column.name, whole, float(np.median(factors)))
        return
    # Some of the dims alone: dims that split the episodes alike, and by the factor of a unit.
    dims: dict[bytes, list[int]] = {}
    for place in range(len(arm)):
        large = _cut(values[:, place])
        if values[large, place].min() - values[~large, place].max() >= np.log(_SOME_GAP):
            dims.setdefault(large.tobytes(), []).append(place)
    for which, places in dims.items():
        large, mean = np.frombuffer(which, bool), values[:, places].mean(axis=1)
        gap, factor = mean[large].min() - mean[~large].max(), float(np.median(mean[large]) - np.median(mean[~large]))
        is_unit = gap >= np.log(_JOINT_GAP) and min(abs(factor - np.log(unit)) for unit in _UNITS) < np.log(_NEAR_UNIT)
        # What rests in one task moves in another.
        if len(places) < 2 or not is_unit or not np.isin(prompts[large], prompts[~large]).any():
            continue
        if min(_moves(data, column, arm[places], group).mean() for group in (large, ~large)) >= 0.5:
            yield _told(data, ", ".join(column.dims[dim] for dim in arm[places].tolist()), large, factor)


def _cut(values: np.ndarray) -> np.ndarray:
    """Which of these lie above the widest gap between them, bool."""
    order = np.argsort(values, kind="stable")
    large = np.zeros(len(values), bool)
    large[order[int(np.argmax(np.diff(values[order]))) + 1 :]] = True
    return large


def _moves(data: ExaminedData, column: NumberColumn, dims: np.ndarray, episodes: np.ndarray) -> np.ndarray:
    """Which of these episodes are no idle ones at zero, bool: half of the dims are away from it or follow actions."""
    low, high = (data.table[f"{what}/{column.name}"][episodes][:, dims].astype(np.float64) for what in ("low", "high"))
    away = np.abs(low + high) / 2 > _AWAY * np.fmax(np.abs(low), np.abs(high))
    for state, action in pairs(data.numbers):
        if state.name == column.name:
            for form in FORMS:
                away |= data.table[f"follow_sign/{form}/{state.name}/{action.name}"][episodes][:, dims] >= _FOLLOWS
    return away.mean(axis=1) >= 0.5


def _told(data: ExaminedData, what: str, large: np.ndarray, factor: float) -> Finding:
    few = large if large.mean() <= 0.5 else ~large
    return Finding(
        kind="units mixed",
        count=int(few.sum()),
        total=len(few),
        unit="episodes",
        where=data.source.describe(data.first_step(int(np.flatnonzero(few)[0]))),
        what=f"{what} is about {np.exp(factor):.3g} times {'larger' if few is large else 'smaller'} than in the others",
        training="norm stats are those of the larger unit, and all of the smaller one looks alike",
        remedy="Convert these episodes: degrees are 57.3 times radians, millimetres 1000 times metres",
    )
