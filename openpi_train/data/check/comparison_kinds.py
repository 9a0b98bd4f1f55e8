"""Kinds of faults that show where states are compared with actions. Read next: `motion_measures.py`, the measures."""

from collections.abc import Iterator

import numpy as np

from openpi_train.data.check.episode_table import NumberColumn, is_gripper
from openpi_train.data.check.examined import FEWEST_EPISODE_STEPS, ExaminedData
from openpi_train.data.findings import Finding

# An episode has doubled steps from so many on, or all together from this share on.
_DOUBLED, _DOUBLED_SHARE = 5, 0.01
# A state moves as usual if its range is at least this share of the median of those of other episodes.
_AS_USUAL = 0.5
# Units differ between two groups of episodes whose largest values lie at least so far apart, with none between, in
# three of four dims of a column by about the same factor: degrees and radians by 57, metres and millimetres by 1000.
_UNIT_FACTOR, _UNIT_DIMS, _SAME_FACTOR = 20.0, 0.75, 3.0
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
            beyond = np.flatnonzero(largest[:, dim] > _TURNS) if in_radians else []
            if len(beyond):
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


def _groups(data: ExaminedData, column: NumberColumn, largest: np.ndarray) -> Iterator[Finding]:
    """Two groups of episodes with very different values; `largest` [e, d] are the largest absolute ones of each."""
    arm = np.flatnonzero(~is_gripper(column.dims) & (largest > 0).all(axis=0))
    if len(arm) < 2 or len(largest) < 4:
        return
    values = np.log(largest[:, arm])
    order = np.argsort(values.mean(axis=1), kind="stable")
    sorted_ = values[order]
    # The best place for a cut is where the mean jumps most; then every dim has to jump there.
    cut = int(np.argmax(np.diff(sorted_.mean(axis=1)))) + 1
    gaps = sorted_[cut:].min(axis=0) - sorted_[:cut].max(axis=0)
    factors = np.median(sorted_[cut:], axis=0) - np.median(sorted_[:cut], axis=0)
    alike = (gaps > 0) & (np.abs(factors - np.median(factors)) < np.log(_SAME_FACTOR))
    factor = float(np.exp(np.median(factors)))
    if factor < _UNIT_FACTOR or alike.mean() < _UNIT_DIMS:
        return
    few = order[:cut] if cut <= len(order) / 2 else order[cut:]
    size = "smaller" if cut <= len(order) / 2 else "larger"
    yield Finding(
        kind="units mixed",
        count=len(few),
        total=len(order),
        unit="episodes",
        where=data.source.describe(data.first_step(int(few.min()))),
        what=f"{column.name} is about {factor:.3g} times {size} than in the others",
        training="norm stats are those of the larger unit, and all of the smaller one looks alike",
        remedy="Convert these episodes: degrees are 57.3 times radians, millimetres 1000 times metres",
    )
