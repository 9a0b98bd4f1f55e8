"""Directories of memory-mapped arrays with a manifest, used by indexes, repacked datasets (for all but images)
and the tokens of texts.

Read next: `formats/sidecar.py`, `formats/repack.py` and `text/token_cache.py` (the writers), `formats/stored.py` (the
reader).

    <root>/manifest.json        replaced atomically, last: the files that it names are complete
    <root>/<tables>/*.npy       the arrays; `columns/observation/state.npy`, `episode_ends.npy`, ...
    <root>/<tables>/prompts.json
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import DTypeLike

from openpi_train.data.core import files
from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PROMPTS = "prompts.json"
# The lock file that a process holds while it writes.
LOCK = "lock"
_CONTENT = ("episode_ends.npy", "episode_ids.npy", "prompt_index.npy")
_CHUNK_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tables:
    """An opened directory: its manifest, its arrays by name, and the distinct instruction texts, if stored.

    A pickled copy, as data workers get it, maps the same files.
    """

    root: Path
    manifest: JsonObject
    arrays: Mapping[str, np.ndarray]
    prompts: Sequence[str]

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen_tables, (self.root, self.manifest["fingerprint"])

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays below a folder, by the rest of their names."""
        return {name.removeprefix(prefix): array for name, array in self.arrays.items() if name.startswith(prefix)}


def write_array(directory: Path, name: str, dtype: DTypeLike, shape: tuple[int, ...], chunks: Iterable[Any]) -> None:
    """Write `<name>.npy` of a known shape from consecutive pieces of its first axis.

    Uses plain writes and no memory map: on a full disk a write raises, but a store to a mapped page kills the process.
    """
    path = directory / f"{name}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype, rows = np.dtype(dtype), 0
    with open(path, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in chunks:
            file.write(_bytes(np.asarray(chunk, dtype)))
            rows += len(chunk)
    assert rows == shape[0], f"{path} got {rows} rows of {shape[0]}"


def write_arrays(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write whole arrays, by name, as `write_array` does."""
    for name, array in arrays.items():
        write_array(directory, name, array.dtype, array.shape, [array])


def write_prompts(directory: Path, prompts: Sequence[str]) -> None:
    """Store the distinct texts."""
    (directory / PROMPTS).write_text(json.dumps(list(prompts), ensure_ascii=False), encoding="utf-8")


def list_files(directory: Path) -> dict[str, dict[str, int]]:
    """Size and CRC32C of every file of a finished tables directory, by relative name, for the manifest."""
    paths = sorted(path for path in directory.rglob("*") if path.suffix in (".npy", ".json") and path.is_file())
    return {
        str(path.relative_to(directory)): {"bytes": path.stat().st_size, "crc32c": _file_crc(path)} for path in paths
    }


def read_manifest(root: Path) -> dict[str, Any] | None:
    """The manifest; None if it is missing or, with a warning, damaged. Raises OSError if the system cannot read it."""
    try:
        manifest = files.read_json(root / MANIFEST)
        if not isinstance(manifest, dict):
            raise ValueError(f"it holds {type(manifest).__name__}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        logger.warning("%s cannot be read: %s", root / MANIFEST, error)
        return None
    return manifest


def open_tables(root: Path, manifest: JsonObject, *, check_crc: bool) -> Tables:
    """Map all arrays that the manifest names.

    Raises ValueError naming the file that is missing, has another size, or (with `check_crc`) other bytes.
    """
    directory = root / manifest["tables"]
    arrays = {}
    for name, expected in manifest["files"].items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != expected["bytes"] or (check_crc and _file_crc(path) != expected["crc32c"]):
            what = "is missing" if found is None else f"is damaged ({found} of {expected['bytes']} bytes)"
            raise ValueError(f"{path} {what}")
        if path.suffix == ".npy":
            arrays[name.removesuffix(".npy")] = np.load(path, mmap_mode="r")
    prompts = json.loads((directory / PROMPTS).read_text(encoding="utf-8")) if PROMPTS in manifest["files"] else []
    return Tables(root, manifest, arrays, prompts)


def reopen_tables(root: Path, fingerprint: str) -> Tables:
    """Map the arrays again, in another process. Raises ValueError if they were built again with other content."""
    manifest = read_manifest(root)
    if manifest is None or manifest["fingerprint"] != fingerprint:
        raise ValueError(f"the tables {root} were removed or built again while a run was using them; restart it")
    return open_tables(root, manifest, check_crc=False)


def content_fingerprint(directory: Path, prompts: Sequence[str], cameras: Sequence[str]) -> str:
    """sha256 of the tables' content, independent of the dataset's location and of how it is split into files.

    Covers columns, prompts and episode digests (which cover the images), but not byte offsets or file names.
    """
    digest = hashlib.sha256(json.dumps([list(prompts), sorted(cameras)]).encode())
    columns = sorted(directory.glob("columns/**/*.npy"))
    add_arrays(digest, directory, [*(str(path.relative_to(directory)) for path in columns), *_CONTENT])
    return digest.hexdigest()


def add_arrays(digest: Any, directory: Path, names: Iterable[str]) -> None:
    """Add name, dtype, shape and bytes of written arrays to a hash; names may end with `.npy`, which counts."""
    for name in names:
        array = np.load(directory / f"{name.removesuffix('.npy')}.npy", mmap_mode="r")
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(_bytes(array))


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def drafted(root: Path) -> Iterator[Path]:
    """An empty folder for tables that are being written, for `publish`; it is removed if the block raises.

    A full disk must not stay full of half the tables.
    """
    draft = root / f".tables.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def publish(root: Path, draft: Path, manifest: JsonObject) -> dict[str, Any]:
    """Put a finished tables directory and then its manifest in place; returns the manifest as later opens read it.

    The directory is renamed to the manifest's entry `tables`. Older ones are removed.
    """
    final = root / manifest["tables"]
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    files.write_json(root / MANIFEST, manifest)
    for path in (*root.glob("tables-*"), *root.glob(".tables*")):
        if path != final:
            shutil.rmtree(path)
    return files.read_json(root / MANIFEST)


@contextlib.contextmanager
def explain_cache_errors(root: Path, setting: str) -> Iterator[None]:
    """Turn a full disk or an unwritable `root` into an OSError that says which setting to change.

    Errors about files elsewhere are not changed.
    """
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EROFS: "the file system is read-only",
            errno.EACCES: "writing there is not permitted",
            errno.EPERM: "writing there is not permitted",
        }
        path = Path(error.filename) if isinstance(error.filename, str) else root
        elsewhere = not (path.is_relative_to(root) or root.is_relative_to(path))
        if error.errno not in reasons or elsewhere:
            raise
        raise OSError(
            error.errno, f"cannot write {root}: {reasons[error.errno]}. Make room there or point {setting} elsewhere"
        ) from error


def _file_crc(path: Path) -> int:
    crc = google_crc32c.Checksum()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            crc.update(chunk)
    return int.from_bytes(crc.digest(), "big")
