"""Manifest of a checkpoint: its files with sizes and CRCs, written last, which marks the checkpoint as complete.

Orbax stores no checksums and treats any directory with a number as its name as complete, so corrupted bytes would be
restored silently (seen with orbax-checkpoint 0.12.8). Read next: `checkpoints/checkpoint_store.py`, which
writes it.
"""

import concurrent.futures
import heapq
import logging
import os
import pathlib
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping

from openpi_train.data.core.files import read_json, write_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_CHUNK_BYTES = 4 << 20
_READERS = 4  # zlib.crc32 releases the GIL, so a few threads keep a disk busy
_OPENING_BYTES = 64 << 10  # to open a file takes about as long as to read so many

Sums = Mapping[str, list[int]]
"""Size in bytes and crc32 of files, by path."""


def write_manifest(directory: pathlib.Path, known: Mapping[str, Sums] | None = None) -> int:
    """List every file below `directory` in its `manifest.json`, and return their bytes.

    Reads each file once, but for those in the folders of `known`, of which it has all sums by their path in the folder.
    """
    known = known or {}
    files = dict(sums(directory, passed_over=known.keys()))
    for folder, inside in known.items():
        files |= {f"{folder}/{name}": list(sum_) for name, sum_ in inside.items()}
    write_json(directory / MANIFEST, {"files": dict(sorted(files.items()))})
    return sum(size for size, _ in files.values())


def sums(directory: pathlib.Path, *, passed_over: Iterable[str] = ()) -> Sums:
    """Size and crc32 of every file below `directory`, by its path there, read once; without the folders passed over."""
    passed_over, paths = set(passed_over), []
    for place, folders, names in os.walk(directory, onerror=_raise):
        here = pathlib.Path(place)
        folders[:] = [name for name in folders if (here / name).relative_to(directory).as_posix() not in passed_over]
        # Nor what an attempt to write it has left.
        paths += [here / name for name in names if name != MANIFEST and not name.startswith(f".{MANIFEST}.")]
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(_size_and_crc32, paths)
        return {path.relative_to(directory).as_posix(): list(sum_) for path, sum_ in zip(paths, found, strict=True)}


def has_manifest(directory: pathlib.Path) -> bool:
    """Whether the save of `directory` was completed (later damage is not checked)."""
    try:
        return stat.S_ISREG(os.stat(directory / MANIFEST).st_mode)
    except (FileNotFoundError, NotADirectoryError):  # not other errors of the system: they say nothing about it
        return False


def find_damage(directory: pathlib.Path, *, share: int = 0, shares: int = 1, below: str = "") -> str:
    """A text on what is wrong with the checkpoint in `directory`; empty if nothing.

    What seems wrong is read a second time, past the system's cache. That the system cannot read is no damage.

    Args:
        share: which of `shares` parts of the files, of about equally many bytes, this caller opens and reads; it asks
            for nothing about the others.
        below: look only at files whose path starts with this.

    Raises:
        OSError: the system failed to read a file.
    """
    damage = _find_damage(directory, share, shares, below, _size_and_crc32)
    if damage and not _find_damage(directory, share, shares, below, _from_disk):
        logger.warning("%s: %s, but not when it was read again: look at this host's memory and disk", directory, damage)
        return ""
    return damage


def _find_damage(
    directory: pathlib.Path, share: int, shares: int, below: str, read: Callable[[pathlib.Path], tuple[int, int]]
) -> str:
    try:
        files = read_json(directory / MANIFEST)["files"]
        entries = [(size, name, crc) for name, (size, crc) in files.items() if name.startswith(below)]
        mine = _share(entries, share, shares)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{MANIFEST} is missing: the save was interrupted"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if not files:
        return f"{MANIFEST} lists no file"
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        for problem in pool.map(lambda entry: _problem(directory, entry, read), mine):
            if problem:
                return problem
    return ""


def _problem(
    directory: pathlib.Path, entry: tuple[int, str, int], read: Callable[[pathlib.Path], tuple[int, int]]
) -> str:
    """What is wrong with one file, given its size, path and crc32; empty if nothing."""
    saved_size, name, saved = entry
    try:
        size, now = read(directory / name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{name} is missing"
    if size != saved_size:
        return f"{name} is truncated: it has {size} bytes and was saved with {saved_size}"
    return "" if now == saved else f"{name} is corrupt: its crc32 is {now:08x} and was saved as {saved:08x}"


def _share(entries: list[tuple[int, str, int]], share: int, shares: int) -> list[tuple[int, str, int]]:
    """One of the shares of the files: each file, the largest first, goes to the share with the fewest bytes so far."""
    loads, mine = [(0, number) for number in range(shares)], []
    for entry in sorted(entries, reverse=True):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + entry[0] + _OPENING_BYTES, number))
        if number == share:
            mine.append(entry)
    return mine


def _size_and_crc32(path: pathlib.Path) -> tuple[int, int]:
    size, checksum = 0, 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return size, checksum


def _from_disk(path: pathlib.Path) -> tuple[int, int]:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _size_and_crc32(path)


def _raise(error: OSError) -> None:
    raise error
