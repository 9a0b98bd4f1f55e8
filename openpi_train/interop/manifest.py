"""Manifest of a checkpoint: its files with sizes and CRCs, written last, which marks the checkpoint as complete.

Orbax stores no checksums and treats any directory with a number as its name as complete, so corrupted bytes would be
restored silently (seen with orbax-checkpoint 0.12.8). Read next: `training/checkpoints/checkpoint_store.py`, which
writes it.
"""

import concurrent.futures
import logging
import os
import pathlib
import stat
import zlib
from collections.abc import Callable

from openpi_train.data.files import read_json, write_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_CHUNK_BYTES = 4 << 20
_READERS = 4  # zlib.crc32 releases the GIL, so a few threads keep a disk busy


def write_manifest(directory: pathlib.Path) -> int:
    """List every file below `directory` in its `manifest.json`, and return their bytes; reads all of them once."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        checksums = list(pool.map(_crc32, paths))
    files = {
        path.relative_to(directory).as_posix(): [path.stat().st_size, checksum]
        for path, checksum in zip(paths, checksums, strict=True)
    }
    write_json(directory / MANIFEST, {"files": files})
    return sum(size for size, _ in files.values())


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
        share: which of `shares` equal parts of the files this caller reads completely. All callers check all sizes.
        below: look only at files whose path starts with this.

    Raises:
        OSError: the system failed to read a file.
    """
    damage = _find_damage(directory, share, shares, below, _crc32)
    if damage and not _find_damage(directory, share, shares, below, _crc32_from_disk):
        logger.warning("%s: %s, but not when it was read again: look at this host's memory and disk", directory, damage)
        return ""
    return damage


def _find_damage(
    directory: pathlib.Path, share: int, shares: int, below: str, crc32: Callable[[pathlib.Path], int]
) -> str:
    if not has_manifest(directory):
        return f"{MANIFEST} is missing: the save was interrupted"
    try:
        files = read_json(directory / MANIFEST)["files"]
        entries = sorted((size, name, crc) for name, (size, crc) in files.items() if name.startswith(below))
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if not files:
        return f"{MANIFEST} lists no file"
    for size, name, _ in entries:
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} is truncated: it has {path.stat().st_size} bytes and was saved with {size}"
    mine = entries[share::shares]  # sorted by size, so that the shares are similar
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda entry: crc32(directory / entry[1]), mine)
        for (_, name, saved), now in zip(mine, found, strict=True):
            if now != saved:
                return f"{name} is corrupt: its crc32 is {now:08x} and was saved as {saved:08x}"
    return ""


def _crc32(path: pathlib.Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _crc32_from_disk(path: pathlib.Path) -> int:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _crc32(path)
