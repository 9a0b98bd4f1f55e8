"""`doctor`'s checks of a directory: free space, and the speed of writing and reading. Read next: `doctor.py`."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from openpi_train.tools.finding import Finding, fail, ok, warn

_SAMPLE_BYTES = 64 << 20
_BLOCK = os.urandom(1 << 20)  # random, since some file systems store nothing for zeros
_SLOW_SAVE_S = 600.0
_SLOW_BYTES_S = 20e6


def written(place: Path, flag: str, checkpoint_bytes: int = 0) -> Iterator[Finding]:
    """Check space and speed of a directory that a run writes to, set by `flag`; it need not exist yet.

    Args: `checkpoint_bytes` is the size of one checkpoint. There must be space for two: an old one is deleted only
    when a new one is complete.
    """
    folder = place.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    other = f"choose another directory with {flag}"
    if not folder.is_dir():
        yield fail("disk", f"{place} cannot be made: {folder} is a file", other)
        return
    free = shutil.disk_usage(folder).free
    if free < 2 * checkpoint_bytes:
        room = f"{_size(free)} are free in {folder}, two checkpoints need {_size(2 * checkpoint_bytes)}"
        yield fail("disk", room, f"free some space, or {other}")
    elif free < max(4 * checkpoint_bytes, 1 << 30):
        yield warn("disk", f"only {_size(free)} are free in {folder}", f"free some space, or {other}")
    try:
        write_s, read_s, size = _try(folder, min(_SAMPLE_BYTES, free // 4))
    except OSError as error:
        yield fail("disk", f"{folder} cannot be written ({error.strerror})", other)
        return
    text = f"{place}: {_size(free)} free, written at {_speed(size, write_s)}, read at {_speed(size, read_s)}"
    save_s = checkpoint_bytes * write_s / max(size, 1)
    if save_s > _SLOW_SAVE_S or size / write_s < _SLOW_BYTES_S:
        seconds = f"; a checkpoint of {_size(checkpoint_bytes)} takes {save_s:.0f} s" if checkpoint_bytes else ""
        yield warn("disk", text + seconds, f"{other} on a faster disk, or raise --save-interval")
    else:
        yield ok("disk", text)


def read(dataset: Path) -> Iterator[Finding]:
    """Check the read speed of the largest file of a dataset, bypassing the page cache."""
    files = [path for path in dataset.rglob("*") if path.is_file()] if dataset.is_dir() else [dataset]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is None or not largest.is_file() or not largest.stat().st_size:
        return
    try:
        seconds, size = _read(largest)
    except OSError as error:
        yield fail("disk", f"{largest} cannot be read ({error.strerror})", "check its permissions and its disk")
        return
    text = f"{dataset}: read at {_speed(size, seconds)}"
    if size >= 1 << 20 and size / seconds < _SLOW_BYTES_S:
        yield warn("disk", text, "copy the dataset to a faster disk, or `data repack` it there")
    else:
        yield ok("disk", text)


def _try(folder: Path, size: int) -> tuple[float, float, int]:
    """Seconds to write `size` bytes to the disk itself and to read them back, and the number of bytes."""
    size = max(1 << 16, size // len(_BLOCK) * len(_BLOCK))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".openpi_train_doctor_") as file:
        begin = time.perf_counter()
        for offset in range(0, size, len(_BLOCK)):
            file.write(_BLOCK[: size - offset])
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - begin, _read(Path(file.name))[0], size


def _read(path: Path) -> tuple[float, int]:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # Linux: forget what is in memory of this file
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, size = time.perf_counter(), 0
        while size < _SAMPLE_BYTES and (block := file.read(1 << 20)):
            size += len(block)
        return max(time.perf_counter() - begin, 1e-9), size


def _speed(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e6:.0f} MB/s"


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
