"""Kinds of faults of pictures, judged by a sample of them. Read next: `summary.py`, which chooses the sample."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator

import numpy as np

from openpi_train.data.check import summary
from openpi_train.data.check.episode_table import is_gripper
from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.source import BadRecord

# A picture whose brightest pixel is below this counts as black: video codecs do not keep exact zeros.
_BLACK = 16
# Pictures of an episode that are looked at.
_PER_EPISODE = 8
# Pictures are compared by means of blocks, about so many along the shorter side. An encoder (libx264, crf 23 to 30)
# changes these by up to 12 of 255; the usual change of pictures that move is mostly ten times that.
_BLOCKS, _ENCODER, _LEAST_CHANGE = 32, 12.5, 0.15
# Cameras are exchanged in an episode if each is so much nearer to what the other usually shows, in 8 x 8 blocks, and if
# in this share of the episodes, and so many, it is clear which camera is which.
_VIEW, _NEARER, _MOST_CLEAR, _FEWEST_EPISODES = 8, 0.6, 0.8, 4
# A state dim has moved if it changed by this share of its range.
_MOVED = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class SeenPicture:
    """What was seen of one picture; `problem` says why it cannot be read, and the rest is then meaningless.

    `blocks` float32 [h, w, 3] are means of square blocks.
    """

    step: int
    episode: int
    digest: bytes = b""
    is_black: bool = False
    is_blank: bool = False
    problem: str = ""
    blocks: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 1, 3), np.float32))


def unreadable(data: ExaminedData) -> Iterator[Finding]:
    """Pictures that cannot be read or decoded."""
    for camera in data.cameras:
        seen = pictures(data, camera)
        bad = [picture for picture in seen if picture.problem]
        if bad:
            yield Finding(
                kind="unreadable pictures",
                count=len(bad),
                total=len(seen),
                unit="pictures looked at",
                where=bad[0].problem,
                what=camera,
                training="a run ends at the first one, or puts another row in its place (--data.on-bad-record skip)",
                remedy="Put whole copies of the files in their place, or leave these episodes out",
            )


def black(data: ExaminedData) -> Iterator[Finding]:
    """Pictures that are black, or of one other colour."""
    for camera in data.cameras:
        seen = [picture for picture in pictures(data, camera) if not picture.problem]
        kinds = {
            "black pictures": [picture for picture in seen if picture.is_black],
            "pictures of one colour": [picture for picture in seen if picture.is_blank and not picture.is_black],
        }
        for kind, bad in kinds.items():
            if bad:
                yield Finding(
                    kind=kind,
                    count=len(bad),
                    total=len(seen),
                    unit="pictures looked at",
                    where=data.source.describe(bad[0].step),
                    what=camera,
                    training="they are trained on like the others",
                    remedy=f"{leave_out(data, camera)}, or these episodes out of the data",
                )


def leave_out(data: ExaminedData, camera: str) -> str:
    """What leaves a camera out of a training."""
    flag = "Leave the camera out with --data.datasets.N.robot.cameras"
    if data.robot is not None:
        slots = {name: slot for slot, name in data.robot.cameras.items()}
        return f"{flag}.{slots.get(camera, 'SLOT')} none"
    # As ACT and diffusion policies take it (`formats/lerobot/described.py`).
    return f"{flag}.{camera.rpartition('/')[2]} none (act, diffusion; other models: the slot that a start tells)"


def frozen(data: ExaminedData) -> Iterator[Finding]:
    """Pictures of one episode that are equal but for what a video's encoder changes, though the robot moved."""
    for camera in data.cameras:
        seen = [one for one in pictures(data, camera) if not (one.problem or one.is_black or one.is_blank)]
        pairs = [(one, other) for one, other in itertools.pairwise(seen) if one.episode == other.episode]
        moved = [pair for pair in pairs if _moved(data, pair[0].step, pair[1].step)]
        changes = np.array([float(np.abs(one.blocks - other.blocks).max()) for one, other in moved])
        most = min(_ENCODER, _LEAST_CHANGE * float(np.median(changes))) if moved else 0.0
        bad = [pair for pair, change in zip(moved, changes, strict=True) if _equal(*pair) or change < most]
        if bad:
            yield Finding(
                kind="frozen pictures",
                count=len(bad),
                total=len(moved),
                unit="pairs looked at",
                where=data.source.describe(bad[0][1].step),
                what=f"{camera}: the picture is that of {bad[0][1].step - bad[0][0].step} steps before, and the "
                "robot's state is another",
                training="the policy learns to act on an old picture",
                remedy="Leave these episodes out; record with a camera that keeps up",
            )


def cameras_alike(data: ExaminedData) -> Iterator[Finding]:
    """Two cameras with the same pictures."""
    for one, other in itertools.combinations(data.cameras, 2):
        pairs = [
            (first, second)
            for first, second in zip(pictures(data, one), pictures(data, other), strict=True)
            if not any(seen.problem or seen.is_black or seen.is_blank for seen in (first, second))
        ]
        equal = [first for first, second in pairs if first.digest == second.digest]
        if equal:
            yield Finding(
                kind="cameras alike",
                count=len(equal),
                total=len(pairs),
                unit="pictures looked at",
                where=data.source.describe(equal[0].step),
                what=f"{one} and {other} show the same picture",
                training="the policy has one view less than it seems to have",
                remedy=f"Look which camera was recorded twice. {leave_out(data, other)}",
            )


def exchanged(data: ExaminedData) -> Iterator[Finding]:
    """Episodes in which two cameras show what the other one shows in most episodes."""
    views = {camera: _first_views(data, camera) for camera in data.cameras}
    for one, other in itertools.combinations(data.cameras, 2):
        episodes = sorted(views[one].keys() & views[other].keys())
        if len(episodes) < _FEWEST_EPISODES:
            continue
        both = [np.stack([views[camera][episode] for episode in episodes]) for camera in (one, other)]
        usual = [np.median(view, axis=0) for view in both]
        # [camera, median, episode]
        far = np.array([[np.abs(view - median).mean(axis=(1, 2, 3)) for median in usual] for view in both])
        swapped = (far[0, 1] < _NEARER * far[0, 0]) & (far[1, 0] < _NEARER * far[1, 1])
        as_usual = (far[0, 0] < _NEARER * far[0, 1]) & (far[1, 1] < _NEARER * far[1, 0])
        # Where cameras stand elsewhere in every episode, none shows what it usually does.
        if swapped.any() and (swapped | as_usual).mean() >= _MOST_CLEAR and as_usual.sum() > swapped.sum():
            yield Finding(
                kind="cameras exchanged",
                count=int(swapped.sum()),
                total=len(episodes),
                unit="episodes looked at",
                where=data.source.describe(data.first_step(episodes[int(np.argmax(swapped))])),
                what=f"{one} shows what {other} shows in the others, and the reverse",
                training="the policy takes one view for the other",
                remedy="Exchange the two in these episodes, or leave the episodes out",
            )


def _first_views(data: ExaminedData, camera: str) -> dict[int, np.ndarray]:
    """Of each episode that is looked at: its first picture in 8 x 8 blocks, float32 [8, 8, 3]."""
    found: dict[int, np.ndarray] = {}
    for seen in pictures(data, camera):
        if not (seen.problem or seen.is_black or seen.is_blank) and min(seen.blocks.shape[:2]) >= _VIEW:
            rows = [part.mean(axis=0) for part in np.array_split(seen.blocks, _VIEW, axis=0)]
            small = [part.mean(axis=1) for part in np.array_split(np.stack(rows), _VIEW, axis=1)]
            found.setdefault(seen.episode, np.stack(small, axis=1))
    return found


def missing_cameras(data: ExaminedData) -> Iterator[Finding]:
    """Cameras that the robot reads and the dataset does not have."""
    if data.robot is None:
        return
    missing = [f"{camera} ({slot})" for slot, camera in data.robot.cameras.items() if camera not in data.source.cameras]
    if missing:
        yield Finding(
            kind="missing cameras",
            count=len(missing),
            total=len(data.robot.cameras),
            unit="cameras",
            what=f"{', '.join(missing)}; the dataset has {', '.join(data.source.cameras) or 'no pictures'}",
            training="opening the dataset is refused",
            remedy="Name the dataset's own with --data.datasets.N.robot.cameras.SLOT",
        )


@functools.lru_cache(maxsize=16)
def pictures(data: ExaminedData, camera: str) -> tuple[SeenPicture, ...]:
    """What is seen of `data.num_frames` pictures of a camera: 8 of each of some episodes, both evenly spread."""
    episodes = summary.some_episodes(data.source, max(1, data.num_frames // _PER_EPISODE))
    return tuple(
        _seen(data, int(step), episode, camera)
        for episode in episodes
        for step in summary.spread(data.source, episode, _PER_EPISODE)
    )


def _seen(data: ExaminedData, step: int, episode: int, camera: str) -> SeenPicture:
    try:
        frame = data.source.frames(np.array([step]), camera)[0]
    except BadRecord as error:
        return SeenPicture(step, episode, problem=str(error))
    digest, is_black = hashlib.sha256(frame.tobytes()).digest(), bool(frame.max() < _BLACK)
    is_blank = bool(np.ptp(frame.reshape(-1, frame.shape[-1]), axis=0).max() == 0)
    return SeenPicture(step, episode, digest, is_black, is_blank, blocks=_blocks(frame))


def _equal(one: SeenPicture, other: SeenPicture) -> bool:
    return one.digest == other.digest


def _blocks(frame: np.ndarray) -> np.ndarray:
    """Means of square blocks of a picture [h, w, 3]; what is left at its ends does not count."""
    side = max(1, min(frame.shape[:2]) // _BLOCKS)
    height, width = (size // side for size in frame.shape[:2])
    whole = frame[: height * side, : width * side].reshape(height, side, width, side, -1)
    return whole.mean(axis=(1, 3), dtype=np.float32)


def _moved(data: ExaminedData, one: int, other: int) -> bool:
    """Whether the arm moved between two steps of an episode: two state dims, or its only one, besides grippers.

    Without a state it is taken to have moved.
    """
    moved = total = 0
    for column in data.numbers:
        if column.role != "state":
            continue
        low = np.fmin.reduce(data.table[f"low/{column.name}"], axis=0).astype(np.float64)
        high = np.fmax.reduce(data.table[f"high/{column.name}"], axis=0).astype(np.float64)
        counts = ~is_gripper(column.dims) & (high > low)
        change = np.abs(np.asarray(column.values[other], np.float64) - column.values[one])
        moved += int(((change > _MOVED * (high - low)) & counts).sum())
        total += int(counts.sum())
    return moved >= min(2, total)
