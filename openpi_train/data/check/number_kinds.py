"""Kinds of faults of states and actions, judged by the measures of every episode. Read next: `episode_table.py`."""

from collections.abc import Iterator

import numpy as np

from openpi_train.data.check.episode_table import NumberColumn, forget, gripper_dims, is_gripper, pairs
from openpi_train.data.check.examined import FEWEST_EPISODE_STEPS, FEWEST_STEPS, ExaminedData
from openpi_train.data.core.findings import Finding
from openpi_train.data.robot.normalize import SPIKE_DISTANCE

# A dim is clipped if this share of its values, and at least so many, lies at an end of its range.
_CLIPPED_SHARE, _CLIPPED_STEPS = 0.01, 20
# Steps that are looked at for the distribution of values, and what a gripper or a switch looks like: few of its values
# lie away from both ends, or it has few different ones. Of a sine that is clipped so that half of it lies at the ends,
# 38 of 100 are in the middle.
_SAMPLE, _MIDDLE_SHARE, _FEW_VALUES = 20_000, 0.3, 20
# A state that is commanded over more than this share of its command's range, and does not move, is stuck.
_COMMANDED = 0.1
# If that is so in more than half of the episodes, they count where this share is commanded, and others are sound.
_WIDE, _MOST_EPISODES = 0.3, 0.9
# Which share of the steps has to agree where actions are states.
_AGREE = 0.99
# At most this share of the steps, or two, are spikes.
_FEW_STEPS = 5e-4
# A gripper that uses less than this share of its range is told.
_LEAST_USE = 0.1


def not_finite(data: ExaminedData) -> Iterator[Finding]:
    """NaN and infinity in states or actions."""
    table = data.table
    steps = np.flatnonzero(table["first_not_finite"] >= 0)
    if not len(steps):
        return
    counts = {
        dim: int(counts[:, number].sum())
        for column in data.numbers
        for counts in [table[f"not_finite/{column.name}"]]
        for number, dim in enumerate(column.dims)
        if counts[:, number].any()
    }
    yield Finding(
        kind="not finite",
        count=len(steps),
        total=data.source.num_episodes,
        unit="episodes",
        where=data.source.describe(int(table["first_not_finite"][steps[0]])),
        what=f"NaN or infinity in {_listed([f'{dim}: {count}' for dim, count in counts.items()])}",
        training="norm stats are refused, so nothing starts",
        remedy="Repair or remove these episodes",
    )


def constant(data: ExaminedData) -> Iterator[Finding]:
    """Dims with one value in all steps; zeros count where the dataset names them, or what belongs to them moves."""
    if data.source.num_steps < FEWEST_STEPS:
        return
    ends = {
        column.name: (_overall(data, "low", column.name), _overall(data, "high", column.name))
        for column in data.numbers
    }
    found = []
    for column in data.numbers:
        low, high = ends[column.name]
        # Zeros are padding where nothing belongs to them: an absent object, an arm that this robot lacks.
        beside = np.full(len(low), column.is_named)
        for other in data.numbers:
            if other.role != column.role and len(other.dims) == len(column.dims):
                beside |= ends[other.name][0] < ends[other.name][1]
        held = (low == high) & ((low != 0) | beside)
        found += [f"{column.dims[dim]} = {low[dim]:g}" for dim in np.flatnonzero(held).tolist()]
    if found:
        yield Finding(
            kind="constant dims",
            count=len(found),
            total=sum(len(column.dims) for column in data.numbers),
            unit="dims",
            what=_listed(found),
            training="they carry nothing: they become 0, and where a policy meets another value, that is unlike all "
            "it has seen",
            remedy="Leave the dims out, or find out why the sensor does not move",
        )


def stuck(data: ExaminedData) -> Iterator[Finding]:
    """State dims that hold one value through an episode, or a stretch of it, while their own action dim moves."""
    table, found, firsts = data.table, {}, {}
    lengths = np.diff(data.source.episode_ends, prepend=0)
    for state, action in pairs(data.numbers):
        low, high = table[f"low/{action.name}"], table[f"high/{action.name}"]
        spread = _overall(data, "high", action.name) - _overall(data, "low", action.name)
        commanded = (high - low > _COMMANDED * spread) & (spread > 0)
        moves = _overall(data, "high", state.name) > _overall(data, "low", state.name)
        still = (table[f"low/{state.name}"] == table[f"high/{state.name}"]) & moves & ~is_gripper(state.dims)
        long = (lengths >= FEWEST_EPISODE_STEPS)[:, None]
        ranges, at = (table[f"{what}/{state.name}/{action.name}"] for what in ("commanded", "commanded_at"))
        stretch = (ranges > _COMMANDED * spread) & (spread > 0) & ~is_gripper(state.dims)
        # Where most episodes are so, it is how the dim is: a gripper that holds, a dead band; but those are narrow.
        usual = stretch.mean(axis=0)
        stretch &= (usual <= 0.5) | ((ranges > _WIDE * spread) & (usual <= _MOST_EPISODES))
        begins = np.append(0, data.source.episode_ends[:-1])[:, None]
        which = (still & commanded & long) | stretch
        for dim in np.flatnonzero(which.any(axis=0)).tolist():
            ends = (float(_overall(data, what, action.name)[dim]) for what in ("low", "high"))
            if not _is_switch(action.values, dim, *ends):  # a gripper
                found[state.dims[dim]] = int(which[:, dim].sum())
                for episode in np.flatnonzero(which[:, dim]).tolist():
                    step = at[episode, dim] if stretch[episode, dim] else begins[episode, 0]
                    firsts[episode] = min(int(step), firsts.get(episode, int(step)))
    if found:
        yield Finding(
            kind="stuck dims",
            count=len(firsts),
            total=data.source.num_episodes,
            unit="episodes",
            where=data.source.describe(min(firsts.values())),
            what=f"the state does not move though it is commanded to: {_listed(list(found))}",
            training="the state of these episodes is wrong, and the policy learns to disregard it",
            remedy="Leave these episodes out, or repair the sensor",
        )


def clipped(data: ExaminedData) -> Iterator[Finding]:
    """State dims with many values at the very end of their range, on the way: a sensor's limit, or a stop."""
    if data.source.num_steps < FEWEST_STEPS:
        return
    found = []
    for column in data.numbers:
        if column.role != "state":
            continue
        table = data.table
        low, high = (_overall(data, what, column.name) for what in ("low", "high"))
        at_low = np.where(table[f"low/{column.name}"] == low, table[f"at_low/{column.name}"], 0).sum(axis=0)
        at_high = np.where(table[f"high/{column.name}"] == high, table[f"at_high/{column.name}"], 0).sum(axis=0)
        least = max(_CLIPPED_STEPS, _CLIPPED_SHARE * data.source.num_steps)
        suspects = np.flatnonzero(((at_low >= least) | (at_high >= least)) & ~is_gripper(column.dims))
        for dim in suspects.tolist():
            if not _is_switch(column.values, dim, float(low[dim]), float(high[dim])):
                end, steps = max(((low[dim], at_low[dim]), (high[dim], at_high[dim])), key=lambda pair: pair[1])
                found.append((f"{column.dims[dim]} at {end:g}", int(steps)))
    if found:
        yield Finding(
            kind="clipped sensors",
            count=max(steps for _, steps in found),
            total=data.source.num_steps,
            unit="control steps",
            what=_listed([text for text, _ in found]),
            training="different states look alike there",
            remedy="Look whether the sensor's range was too small, or the joint at its stop; record with a larger one",
        )


def spikes(data: ExaminedData) -> Iterator[Finding]:
    """A few values far outside all others."""
    if data.source.num_steps < FEWEST_STEPS:
        return
    for column in data.numbers:
        seen = _sample(column.values)
        for dim, name in enumerate(column.dims):
            values = seen[:, dim][np.isfinite(seen[:, dim])]
            if not len(values):
                continue
            q01, q99 = np.quantile(values, (0.01, 0.99))
            ends = q01 - SPIKE_DISTANCE * (q99 - q01), q99 + SPIKE_DISTANCE * (q99 - q01)
            low, high = (data.table[f"{what}/{column.name}"][:, dim] for what in ("low", "high"))
            episodes = np.flatnonzero((low < ends[0]) | (high > ends[1])).tolist() if q01 < q99 else []
            if not episodes or len(episodes) > most_spikes(data.source.num_steps):
                continue
            far = [
                step
                for episode in episodes
                for step, value in zip(
                    data.source.steps_of(episode), _of_episode(data, column, episode)[:, dim], strict=True
                )
                if value < ends[0] or value > ends[1]
            ]
            if len(far) <= most_spikes(data.source.num_steps):
                yield Finding(
                    kind="spike",
                    count=len(far),
                    total=data.source.num_steps,
                    unit="control steps",
                    where=data.source.describe(far[0]),
                    what=f"{name} = {float(column.values[far[0], dim]):.4g}, while 98 of 100 values lie in "
                    f"{q01:.4g}..{q99:.4g}",
                    training="these become numbers in the hundreds and above, or make all others small",
                    remedy="Repair these steps, or remove their episodes",
                )


def most_spikes(num_steps: int) -> int:
    """How many values may be spikes: what more values do is a motion."""
    return max(2, int(_FEW_STEPS * num_steps))


def actions_are_states(data: ExaminedData) -> Iterator[Finding]:
    """Actions that are the next, the present or the previous state to the last bit: nobody recorded the commands."""
    table, source = data.table, data.source
    steps = source.num_steps - source.num_episodes
    if table.get("is_next") is None or steps < FEWEST_STEPS:
        return
    by_convention = data.robot is not None and data.robot.actions_are_next_states
    nothing_moves = all(int(table[measure].sum()) >= _AGREE * steps for measure in ("is_next", "is_previous"))
    for measure, which in (("is_next", "next"), ("is_present", "present"), ("is_previous", "previous")):
        equal = int(table[measure].sum())
        if equal < _AGREE * steps or (which == "next" and by_convention) or (which != "present" and nothing_moves):
            continue
        yield Finding(
            kind=f"actions are the {which} states",
            count=equal,
            total=steps,
            unit="control steps",
            training="a policy learns where the arm came to be, not what was commanded: it lags behind, and a gripper "
            "that holds something does not press"
            if which == "next"
            else "a policy learns to stay where it is, or to go back",
            remedy="Record the commands. Where the next states are meant as targets, this is as it should be"
            if which == "next"
            else "Record the commands, or shift the actions by one step",
        )


def gripper_range(data: ExaminedData) -> Iterator[Finding]:
    """Gripper values that lie beyond the range that their robot reads, or use little of it."""
    out = data.table.get("gripper_out")
    if out is None:
        return
    low, high = data.table["gripper_low"].min(axis=0), data.table["gripper_high"].max(axis=0)
    for number, (name, (least, most)) in enumerate(gripper_dims(data.robot)):
        found = f"{name} from {low[number]:g} to {high[number]:g}, where its robot reads {least:g} to {most:g}"
        if out[:, number].any():
            first = data.table["gripper_at"][:, number]
            yield Finding(
                kind="gripper outside its range",
                count=int(out[:, number].sum()),
                total=data.source.num_steps,
                unit="control steps",
                where=data.source.describe(int(first[first >= 0][0])),
                what=found,
                training="norm stats are those of these values, and weights trained with others do not fit",
                remedy="Convert the column, or choose the robot that recorded these data",
            )
        elif 0 < high[number] - low[number] < _LEAST_USE * (most - least):
            yield Finding(
                kind="gripper uses little of its range",
                count=1,
                unit="dims",
                what=found,
                training="a policy sees a gripper that hardly moves",
                remedy="Look whether the column is in metres; convert it to the unit in the dim's name",
            )


def _overall(data: ExaminedData, what: str, column: str) -> np.ndarray:
    """The extreme of each dim over all episodes, without NaN."""
    reduce = np.fmin if what == "low" else np.fmax
    return reduce.reduce(data.table[f"{what}/{column}"], axis=0)


def _is_switch(values: np.ndarray, dim: int, low: float, high: float) -> bool:
    """Whether a dim has few different values, or lies mostly at its ends as a gripper does."""
    seen = _sample(values)[:, dim]
    middle = np.abs(seen - (low + high) / 2) < 0.4 * (high - low)
    return bool(len(np.unique(seen)) < _FEW_VALUES or middle.mean() < _MIDDLE_SHARE)


def _sample(values: np.ndarray) -> np.ndarray:
    """Rows of a column, evenly spread, float64 [n, dims]."""
    steps = np.unique(np.linspace(0, len(values) - 1, min(len(values), _SAMPLE)).astype(np.int64))
    seen = np.asarray(values[steps], np.float64)
    forget(values)
    return seen


def _of_episode(data: ExaminedData, column: NumberColumn, episode: int) -> np.ndarray:
    steps = data.source.steps_of(episode)
    return np.asarray(column.values[steps.start : steps.stop])


def _listed(texts: list[str], most: int = 6) -> str:
    return ", ".join([*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])])
