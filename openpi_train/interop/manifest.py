"""Manifest of a checkpoint: its files with sizes and CRCs, written last, which marks the checkpoint as complete.

Orbax stores no checksums and treats any directory with a number as its name as complete, so corrupted bytes would be
restored silently (seen with orbax-checkpoint 0.12.8). Read next: `training/checkpoints/checkpoint_store.py`, which
writes it.
"""

import concurrent.futures
import pathlib
import zlib

from openpi_train.data.files import read_json, write_json

MANIFEST = "manifest.json"
_CHUNK_BYTES = 4 << 20
_READERS = 4  # zlib.crc32 releases the GIL, so a few threads keep a disk busy


def write_manifest(directory: pathlib.Path) -> None:
    """List every file below `directory` in its `manifest.json`; reads all of them once."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        checksums = list(pool.map(_crc32, paths))
    files = {
        path.relative_to(directory).as_posix(): [path.stat().st_size, checksum]
        for path, checksum in zip(paths, checksums, strict=True)
    }
    write_json(directory / MANIFEST, {"files": files})


def has_manifest(directory: pathlib.Path) -> bool:
    """Whether the save of `directory` was completed (later damage is not checked)."""
    return (directory / MANIFEST).is_file()


def find_damage(directory: pathlib.Path, *, share: int = 0, shares: int = 1, below: str = "") -> str:
    """A text on what is wrong with the checkpoint in `directory`; empty if nothing.

    Args:
        share: which of `shares` equal parts of the files this caller reads completely. All callers check all sizes.
        below: look only at files whose path starts with this.
    """
    if not has_manifest(directory):
        return f"{MANIFEST} is missing: the save was interrupted"
    try:
        files = read_json(directory / MANIFEST)["files"]
        entries = sorted((size, name, crc) for name, (size, crc) in files.items() if name.startswith(below))
    except (OSError, ValueError, KeyError, TypeError) as error:
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
        found = pool.map(lambda entry: _crc32(directory / entry[1]), mine)
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
