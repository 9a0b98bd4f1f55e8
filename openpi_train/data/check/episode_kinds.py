"""Kinds of faults of whole episodes: copies, flags, time stamps. Read next: `near_copies.py`, `episode_table.py`."""

from collections.abc import Iterator

import numpy as np

from openpi_train.data.check import near_copies
from openpi_train.data.check.episode_table import LONGEST_GAP
from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.core.findings import Finding

# Candidates whose rows are compared.
_MOST_COMPARED = 20_000


def copies(data: ExaminedData) -> Iterator[Finding]:
    """Episodes that are there twice, with equal pictures and columns."""
    first: dict[str, int] = {}
    pairs = [
        (first[digest], episode)
        for episode, digest in enumerate(map(str, data.source.episode_ids))
        if first.setdefault(digest, episode) != episode
    ]
    if pairs:
        yield Finding(
            kind="copies of episodes",
            count=len(pairs),
            total=data.source.num_episodes,
            unit="episodes",
            where=_pair(data, *pairs[0]),
            training="they count as often as they are there; copies are held out together, or not at all",
            remedy="Remove the copies, unless they are meant as a weight",
        )


def held_out_too(data: ExaminedData) -> Iterator[Finding]:
    """Episodes that are held out, too, in the dataset that is given for that."""
    if data.held_out is None:
        return
    others = set(map(str, data.held_out.episode_ids))
    both = [episode for episode, digest in enumerate(map(str, data.source.episode_ids)) if digest in others]
    if both:
        yield Finding(
            kind="held-out episodes in training",
            count=len(both),
            total=data.source.num_episodes,
            unit="episodes",
            where=data.source.describe(data.first_step(both[0])),
            training="the held-out loss and errors are too good",
            remedy="Hold out other episodes, or a fraction of these (--data.datasets.N.validation None), which keeps "
            "copies together",
        )


def nearly_copies(data: ExaminedData) -> Iterator[Finding]:
    """Episodes whose numbers are nearly those of another one, or of a part of it."""
    source, ids = data.source, data.source.episode_ids
    if "hashes" not in data.table.measures:
        return
    found: dict[int, int] = {}
    for one, other in near_copies.candidates(data.table["hashes"])[:_MOST_COMPARED]:
        if other in found or str(ids[one]) == str(ids[other]):
            continue
        hashes = [_rows(data, episode) for episode in (one, other)]
        if near_copies.share_of_rows(*hashes) >= near_copies.SHARE:
            found[other] = one
    if found:
        other = min(found)
        yield Finding(
            kind="near-copies of episodes",
            count=len(found),
            total=source.num_episodes,
            unit="episodes",
            where=_pair(data, found[other], other),
            what=f"{near_copies.SHARE:.0%} of the rows are equal to a hundredth of the spread; pictures may differ",
            training="they weigh twice, and one of them may be held out while the other is trained on",
            remedy="Remove the copies, or hold out a dataset of its own (--data.datasets.N.validation)",
        )


def of_one_step(data: ExaminedData) -> Iterator[Finding]:
    """Episodes of a single step."""
    short = np.flatnonzero(np.diff(data.source.episode_ends, prepend=0) == 1)
    if len(short):
        yield Finding(
            kind="episodes of one step",
            count=len(short),
            total=data.source.num_episodes,
            unit="episodes",
            where=data.source.describe(data.first_step(int(short[0]))),
            training="their chunks are one action and padding",
            remedy="Look whether episodes were cut wrongly; leave these out",
        )


def flags(data: ExaminedData) -> Iterator[Finding]:
    """Flags of an episode's end that some episodes set, and others do not, or do not have."""
    for name, values in data.table.group("flag/").items():
        without = np.flatnonzero(values < 1)
        if not len(without) or len(without) == len(values):
            continue
        missing = int((values < 0).sum())
        yield Finding(
            kind="flags in some episodes only",
            count=len(without),
            total=len(values),
            unit="episodes",
            where=data.source.describe(data.first_step(int(without[0]))),
            what=f"{name} is never set, but in others it is{f'; in {missing} it is NaN' if missing else ''}",
            training="they are imitated like the others",
            remedy="Find out whether they failed or were never labelled; leave failures out of imitation",
        )


def dropped_frames(data: ExaminedData) -> Iterator[Finding]:
    """Time stamps with a gap of whole frames."""
    yield from _of_times(
        data,
        "dropped frames",
        "gaps",
        "gap_at",
        f"time stamps {LONGEST_GAP:g} and more times as far apart as usual in their episode, by whole frames",
        "the steps beside the gap count as neighbours, so the motion is too fast there",
        "Split the episodes at the gaps, or record again without load",
    )


def time_jumps(data: ExaminedData) -> Iterator[Finding]:
    """Time stamps with a gap that is no whole number of frames, or is longer than 20 of them."""
    yield from _of_times(
        data,
        "time stamps that jump",
        "jumps",
        "jump_at",
        f"time stamps more than {LONGEST_GAP:g} times as far apart as usual in their episode",
        "the steps beside the jump count as neighbours",
        "Split the episodes at the jumps; look for pauses, and for clocks that were set",
    )


def time_backwards(data: ExaminedData) -> Iterator[Finding]:
    """Time stamps that do not increase within an episode."""
    yield from _of_times(
        data,
        "time stamps that go back",
        "backwards",
        "backward_at",
        "a time stamp that is not later than the one before",
        "steps are in the order of the file, whatever their time",
        "Sort the steps by time, and remove those that are there twice",
    )


def _of_times(
    data: ExaminedData, kind: str, measure: str, at: str, what: str, training: str, remedy: str
) -> Iterator[Finding]:
    counts = data.table.get(measure)
    if counts is None or not counts.any():
        return
    yield Finding(
        kind=kind,
        count=int(counts.sum()),
        total=data.source.num_steps,
        unit="control steps",
        where=data.source.describe(int(data.table[at][np.flatnonzero(counts)[0]])),
        what=f"{what}; in {np.count_nonzero(counts)} of {len(counts)} episodes",
        training=training,
        remedy=remedy,
    )


def _rows(data: ExaminedData, episode: int) -> np.ndarray:
    steps = data.source.steps_of(episode)
    return data.table.digests.rows([np.asarray(column.values[steps.start : steps.stop]) for column in data.numbers])


def _pair(data: ExaminedData, one: int, other: int) -> str:
    return f"{data.source.describe(data.first_step(other))} (as {data.source.describe(data.first_step(one))})"
