"""Conversion of a dataset from any readable format to any writable one, with a report of what was kept.

Read next: `formats/conversion.py`. A new source or a new writer needs one entry here, not one for each pair.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from openpi_train.data.core.source import Source
from openpi_train.data.formats import detection
from openpi_train.data.formats.conversion import Conversion, Pictures, WithPictures, stores_pictures
from openpi_train.data.formats.lerobot import to_lerobot
from openpi_train.data.formats.lerobot.features import NUMBERING
from openpi_train.data.formats.repack import repack
from openpi_train.data.formats.rlds import to_rlds
from openpi_train.data.formats.sidecar import IndexedConfig
from openpi_train.data.formats.zarr import to_zarr

# Frames of each camera that are compared after writing, spread over the dataset.
_COMPARED = 16


@dataclasses.dataclass(frozen=True)
class Form:
    """A writable format: its function, and the picture encodings it supports, the default first."""

    write: Callable[[Conversion, Path], object]
    pictures: tuple[Pictures, ...]
    # Columns that the writer makes itself.
    own: Collection[str] = ()
    added: Collection[str] = ()


def _write_steps(conversion: Conversion, out: Path) -> None:
    repack(WithPictures(conversion), out, split="train")


_LEROBOT: tuple[Pictures, ...] = ("av1", "h264", "png", "jpeg", "as-stored")
DATASET_WRITERS = {
    "lerobot": Form(functools.partial(to_lerobot.write, version="v3.0"), _LEROBOT, NUMBERING),
    "lerobot-2.1": Form(functools.partial(to_lerobot.write, version="v2.1"), _LEROBOT, NUMBERING),
    "rlds": Form(to_rlds.write, ("as-stored", "png", "jpeg"), added=to_rlds.BOUNDARIES),
    "zarr": Form(to_zarr.write, ("png",)),
    "steps": Form(_write_steps, ("as-stored", "png", "jpeg")),
}


@dataclasses.dataclass(frozen=True)
class Account:
    """Report of a conversion: one line per item, with what happened to it."""

    lines: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The lines, in two columns."""
        width = max(len(name) for name, _ in self.lines)
        return "\n".join(f"  {name:<{width}}  {what}" for name, what in self.lines)


def convert(
    source: Source,
    out: str | Path,
    form: str,
    *,
    control_hz: float | None = None,
    pictures: Pictures | None = None,
    leave_out: Collection[str] = (),
    cache_dir: str | None = None,
) -> Account:
    """Write `source` to `out`, read it back, and report what happened to every item.

    Args: `control_hz` sets or replaces the dataset's control rate; `leave_out` names columns to omit; `cache_dir` is
    the folder of the index by which the result is read back (None: that of all indexes).

    Raises ValueError if something cannot be kept and was not left out, or does not read back unchanged,
    FileExistsError, BadRecord, OSError.
    """
    out, target = Path(out).expanduser(), DATASET_WRITERS[form]
    unknown = sorted(set(leave_out) - set(source.columns))
    if unknown:
        raise ValueError(f"cannot leave out {', '.join(unknown)}: the columns are {', '.join(sorted(source.columns))}")
    if control_hz is not None and not 0 < control_hz < math.inf:
        raise ValueError(f"--control-hz {control_hz:g} is not a valid rate; give a number of steps per second above 0")
    as_stored = stores_pictures(source)
    allowed: list[Pictures] = [kind for kind in target.pictures if as_stored or kind != "as-stored"]
    kept = pictures or allowed[0]
    if kept not in allowed:
        raise ValueError(f"pictures cannot be kept as {kept} here; allowed are {', '.join(allowed)}")
    about = source.about()
    dropped = dict(about.left_out)
    dropped |= {name: "the format numbers rows itself" for name in source.columns if name in target.own}
    dropped |= dict.fromkeys(leave_out, "as asked (--leave-out)")
    columns = {name: column for name, column in source.columns.items() if name not in dropped}
    names = {name: dims for name, dims in about.dim_names.items() if name in columns}
    told = dataclasses.replace(about, control_hz=control_hz or about.control_hz, dim_names=names, left_out={})
    conversion = Conversion(source=source, about=told, columns=columns, pictures=kept)
    target.write(conversion, out)
    at = detection.source_at(str(out))
    written = (dataclasses.replace(at, cache_dir=cache_dir) if isinstance(at, IndexedConfig) else at).open()
    added = {name: f"added: {form} requires it for every step" for name in target.added if name not in columns}
    return _account(conversion, written, dropped | added, form)


def _account(conversion: Conversion, written: Source, notes: Mapping[str, str], form: str) -> Account:
    """Compare what was written with the source. Raises ValueError naming what differs."""
    source, about = conversion.source, conversion.about
    problems = []
    if not np.array_equal(source.episode_ends, written.episode_ends):
        problems.append("the episodes' lengths")
    again = dataclasses.replace(conversion, source=written)
    if any(conversion.prompts(steps) != again.prompts(steps) for steps in conversion.episodes()):
        problems.append("the instructions")
    lines = [
        ("episodes", f"{source.num_episodes}, {source.num_steps} control steps"),
        ("instructions", f"{len(source.prompts)}"),
        ("control rate", f"{about.control_hz:g} Hz" if about.control_hz else "not given by the dataset"),
    ]
    if source.num_dropped:
        lines.append(("bad episodes", f"{source.num_dropped} left out (--on-bad-record skip)"))
    told = written.about().dim_names
    for name, column in conversion.columns.items():
        other = written.columns.get(name)
        if other is None or column.dtype != other.dtype or not np.array_equal(column, other):
            problems.append(f"column {name}")
            continue
        named = f", {', '.join(told[name])}" if name in told else ""
        lines.append((name, f"{column.dtype} {list(column.shape[1:])}, equal{named}"))
        if about.dim_names.get(name, ()) != told.get(name, ()):
            problems.append(f"names of {name}")
    steps = np.unique(np.linspace(0, source.num_steps - 1, _COMPARED).astype(np.int64))
    for camera in source.cameras:
        error = np.abs(source.frames(steps, camera).astype(np.int16) - written.frames(steps, camera))
        lossless = conversion.pictures in ("png", "as-stored") or form == "zarr"
        if lossless and error.any():
            problems.append(f"pictures of {camera}")
        same = "equal" if not error.any() else f"off by {error.mean():.2f} of 255 on average, {error.max()} at most"
        how = "pixels" if form == "zarr" else conversion.pictures
        lines.append((camera, f"{how}, {same} in {len(steps)} frames"))
    if problems:
        raise ValueError(f"the written dataset differs from the source when read back: {', '.join(problems)}")
    lines += [(name, f"left out: {why}" if not why.startswith("added") else why) for name, why in notes.items()]
    return Account(tuple(lines))
