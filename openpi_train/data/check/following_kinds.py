"""Kinds of faults that show in how states follow their actions. Read next: `following_measures.py`, the measures."""

import re
from collections.abc import Iterator

import numpy as np

from openpi_train.data.check.episode_table import NumberColumn, gripper_pairs, is_gripper, pairs
from openpi_train.data.check.examined import FEWEST_EPISODE_STEPS, ExaminedData
from openpi_train.data.check.following_measures import FORMS, LAGS
from openpi_train.data.core.findings import Finding

# A gripper follows its action, or goes against it, if their levels correlate so much, and so much more than otherwise.
_FOLLOWS, _MORE = 0.7, 0.3
# Levels of two things that have nothing to do with each other do so by chance: it is clear in this share of episodes.
_CLEAR = 0.5
# Its motion counts if its range is at least this share of the usual one; another scale is so many times larger.
_MOTION, _SCALE = 0.1, 20.0
# An arm's dim follows its action from this correlation on; a lag is another one from so many control steps on, and
# where the correlation is larger there by so much.
_ARM_FOLLOWS, _OTHER_LAG, _CLEARER = 0.5, 2, 0.25
# Episodes that are shorter say nothing of lags.
_FEWEST_STEPS = 20
# Actions that equal the previous states in this share of the steps are told as such.
_EQUAL = 0.99
# Positions of the state are those of the action if the ends of their ranges differ by less than this share of these.
_SAME_RANGE = 0.2
# Fewer episodes than this say nothing of what is usual.
_FEWEST_EPISODES = 4


def gripper_inverted(data: ExaminedData) -> Iterator[Finding]:
    """Episodes in which a gripper goes against its action, where in most it goes with it, or the reverse."""
    grip, ranges = data.table.get("grip"), data.table.get("grip_range")
    if grip is None or ranges is None:
        return
    lengths = np.diff(data.source.episode_ends, prepend=0)
    for number, (state, action) in enumerate(gripper_pairs(data.numbers, data.robot)):
        along, against = (_follows(grip[:, number, way], grip[:, number, 1 - way]) for way in (0, 1))
        moving = ranges[along | against, number]
        if not len(moving):
            continue
        moves = (ranges[:, number] >= _MOTION * np.median(moving, axis=0)).all(axis=1)
        along, against = (which & moves & (lengths >= FEWEST_EPISODE_STEPS) for which in (along, against))
        few, most = sorted((along, against), key=np.count_nonzero)
        told = few.sum() + most.sum()
        if not few.any() or told < max(_FEWEST_EPISODES, _CLEAR * moves.sum()):
            continue
        yield Finding(
            kind="gripper inverted in some episodes",
            count=int(few.sum()),
            total=int(told),
            unit="episodes that move it",
            where=data.source.describe(data.first_step(int(np.flatnonzero(few)[0]))),
            what=f"{state} goes {'against' if few is against else 'with'} {action}, and in the others "
            f"{'with' if few is against else 'against'} it",
            training="opening and closing are mixed up, and the policy learns neither",
            remedy="Give the gripper of these episodes the convention of the others: 1 - x where it is 0 to 1",
        )


def gripper_scales(data: ExaminedData) -> Iterator[Finding]:
    """Episodes in which a gripper has another scale than in others: 0 to 1 and 0 to 100, or 0 to 255."""
    grip, ranges = data.table.get("grip"), data.table.get("grip_range")
    if grip is None or ranges is None:
        return
    told = set()
    for number, names in enumerate(gripper_pairs(data.numbers, data.robot)):
        follows = np.flatnonzero((grip[:, number].max(axis=1) >= _FOLLOWS) & (ranges[:, number] > 0).all(axis=1))
        if len(follows) < _FEWEST_EPISODES:
            continue
        for role, name in enumerate(names):
            own = ranges[follows, number, role].astype(np.float64)
            order = np.argsort(own, kind="stable")
            factors = own[order][1:] / own[order][:-1]
            cut = int(np.argmax(factors)) + 1
            if factors[cut - 1] < _SCALE or (role, name) in told:
                continue
            told.add((role, name))
            small, large = follows[order[:cut]], follows[order[cut:]]
            few, other = sorted((small, large), key=len)
            ends = [float(np.median(ranges[group, number, role])) for group in (few, other)]
            yield Finding(
                kind="gripper of several scales",
                count=len(few),
                total=len(follows),
                unit="episodes that move it",
                where=data.source.describe(data.first_step(int(few.min()))),
                what=f"{('state', 'action')[role]}: {name} moves by {ends[0]:.4g}, and in the others by {ends[1]:.4g}",
                training="norm stats are those of the larger scale, and with the smaller one the gripper hardly moves",
                remedy="Convert these episodes to the scale of the others",
            )


def late(data: ExaminedData) -> Iterator[Finding]:
    """Actions that come after the motion they command; episodes whose states follow at another lag than others'."""
    table, source = data.table, data.source
    previous = table.get("is_previous")
    if previous is not None and previous.sum() >= _EQUAL * (source.num_steps - source.num_episodes):
        return
    for state, action in pairs(data.numbers):
        form, which = _usual(data, state, action)
        profile = table[f"follow/{form}/{state.name}/{action.name}"][which]
        if len(profile) < _FEWEST_EPISODES:
            continue
        overall = np.median(profile, axis=0)
        usual = int(overall.argmax())
        near = profile[:, max(0, usual - 1) : usual + 2].max(axis=1)
        if overall[usual] < _ARM_FOLLOWS or (near >= _ARM_FOLLOWS).mean() < 0.5:
            continue
        places = np.arange(len(LAGS))
        best = profile.argmax(axis=1)
        other = (profile.max(axis=1) >= _ARM_FOLLOWS) & (np.abs(best - usual) >= _OTHER_LAG)
        found = which[other & (profile.max(axis=1) >= near + _CLEARER)]
        what = "their motions come {} control steps after the actions, those of others {}"
        if len(found):
            lags = np.unique(LAGS[best[np.searchsorted(which, found)]])
            what = what.format(" or ".join(map(str, lags.tolist())), int(LAGS[usual]))
        # A state is measured before or after its action; two steps are more than that.
        elif LAGS[usual] <= -_OTHER_LAG and overall[usual] >= overall[LAGS >= -1].max() + _CLEARER:
            found = which[(np.abs(best - usual) < _OTHER_LAG) & (places[best] >= 0)]
            what = f"the states move {-int(LAGS[usual])} control steps before the actions that move them"
        if len(found):
            yield Finding(
                kind="actions late",
                count=len(found),
                total=len(which),
                unit="episodes",
                where=source.describe(data.first_step(int(found[0]))),
                what=f"{what} ({state.name}, {action.name}; below 0 is before)",
                training="the policy learns actions that belong to other observations",
                remedy="Shift the actions of these episodes by as many steps, or leave the episodes out",
            )


def inverted(data: ExaminedData) -> Iterator[Finding]:
    """A dim whose actions have the opposite sign of its motions, in some episodes or in all."""
    for state, action in pairs(data.numbers):
        form, which = _usual(data, state, action)
        if len(which) < _FEWEST_EPISODES:
            continue
        arm = ~(is_gripper(state.dims) | is_gripper(action.dims))
        signs = np.where(arm, data.table[f"follow_sign/{form}/{state.name}/{action.name}"][which], 0)
        along, against = signs >= _ARM_FOLLOWS, signs <= -_ARM_FOLLOWS
        usual = np.where(along.mean(axis=0) >= 0.5, 1, np.where(against.mean(axis=0) >= 0.5, -1, 0))
        flipped = np.where(usual == 1, against, along) & (usual != 0)
        # A hand that is turned over has two axes flipped; an odd number is a mirror, which no turn makes.
        flipped &= (flipped.sum(axis=1) % 2 == 1)[:, None] | (form == "position")
        # The others follow as ever; where they do not, the arm is held by what it touches.
        as_usual = np.where(usual == 1, along, against) & (usual != 0)
        needed = np.maximum(min(2, (usual != 0).sum() - 1), 0.5 * ((usual != 0).sum() - flipped.sum(axis=1)))
        flipped &= (as_usual.sum(axis=1) >= needed)[:, None]
        everywhere = (usual == -1) & _mirrored(data, state, action, form, usual)
        for dim in np.flatnonzero(flipped.any(axis=0) | everywhere).tolist():
            some = np.flatnonzero(against[:, dim] if everywhere[dim] else flipped[:, dim])
            yield Finding(
                kind="action inverted",
                count=len(some),
                total=len(which),
                unit="episodes that move",
                where=data.source.describe(data.first_step(int(which[some[0]]))),
                what=f"{state.dims[dim]} moves against {action.dims[dim]}"
                + ("" if everywhere[dim] else ", and with it in the others" if usual[dim] == 1 else " in the others"),
                training="the policy learns to move the wrong way"
                if not everywhere[dim]
                else "relative actions are wrong, and the robot that takes these actions moves the other way",
                remedy="Change the sign of this dim's actions, or of its states, as the robot has it",
            )


def _usual(data: ExaminedData, state: NumberColumn, action: NumberColumn) -> tuple[str, np.ndarray]:
    """Which of `FORMS` the actions have, and the episodes that are long enough and move."""
    profiles = {form: data.table[f"follow/{form}/{state.name}/{action.name}"] for form in FORMS}
    form = max(FORMS, key=lambda form: float(np.median(profiles[form].max(axis=1))))
    lengths = np.diff(data.source.episode_ends, prepend=0)
    return form, np.flatnonzero((lengths >= _FEWEST_STEPS) & (profiles[form].max(axis=1) > 0))


def _mirrored(
    data: ExaminedData, state: NumberColumn, action: NumberColumn, form: str, usual: np.ndarray
) -> np.ndarray:
    """Dims whose negative actions are as their states while those of other dims are, bool [d].

    Positions are compared by their ranges. Motions are so if one or three of the axes called x, y, z are inverted and
    the others not.
    """
    if form == "motion":
        axes = [_axis(dim) for dim in action.dims]
        places = [
            axes.index(axis) for axis in "xyz" if axes.count(axis) == 1 and axis == _axis(state.dims[axes.index(axis)])
        ]
        is_mirror = len(places) == 3 and bool((usual[places] != 0).all()) and int((usual[places] == -1).sum()) % 2 == 1
        return np.isin(np.arange(len(usual)), places) & is_mirror
    (low, high), (least, most) = (
        (
            np.fmin.reduce(data.table[f"low/{column.name}"], axis=0).astype(np.float64),
            np.fmax.reduce(data.table[f"high/{column.name}"], axis=0).astype(np.float64),
        )
        for column in (state, action)
    )
    near = _SAME_RANGE * (high - low)
    same = (np.abs(low - least) < near) & (np.abs(high - most) < near) & (usual == 1)
    negative = (np.abs(low + most) < near) & (np.abs(high + least) < near)
    return negative & (same.sum() >= max(2, int((usual == -1).sum())))


def _axis(dim: str) -> str:
    """The axis that a dim's name is of: `delta_x_m` is of x; empty if it is of none."""
    words = re.findall("[a-z]+", dim.rpartition(": ")[2].lower())
    found = [word for word in words if word in ("x", "y", "z")]
    return found[0] if len(found) == 1 and not {"rot", "rotation", "q", "quat", "torque", "force"} & set(words) else ""


def _follows(way: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (way >= _FOLLOWS) & (way >= other + _MORE)
