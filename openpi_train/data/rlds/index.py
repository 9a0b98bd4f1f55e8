"""Builds the sidecar index of an RLDS split: where every encoded image lies, and all that is small, as arrays.

Read next: `data/tables.py` (how the arrays lie on disk), `shard.py` (reads one shard), `source.py` (the source).

    <cache_dir>/<name>-<version>-<split>-<key>/
      manifest.json          shards with size and mtime, counts, dropped records, fingerprint, files with checksums
      parts/<shard>-<key>.npz   one per shard, kept: a killed build goes on, a changed shard costs only itself
      tables-<key>/
        episode_ends.npy int64 [episodes]      episode_ids.npy <U32 [episodes]   records.npy int64 [episodes]
        shard_ends.npy int64 [shards]          steps up to and with each shard
        columns/<name>.npy [steps, ...]        spans/<camera>.npy int64 [steps, 2]: byte offset and length
        prompt_index.npy int32 [steps]         prompts.json
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data import tables
from openpi_train.data.rlds.schema import (
    FEATURES_FILE,
    INFO_FILE,
    Schema,
    Shard,
    list_shards,
    load_builder,
    read_schema,
)
from openpi_train.data.rlds.shard import scan_shard
from openpi_train.data.source import BadRecord

logger = logging.getLogger(__name__)

FORMAT = 1
_REPORT_S = 5.0


@dataclasses.dataclass(frozen=True)
class IndexOptions:
    """What decides an index's content, next to the dataset itself."""

    split: str
    prompt_feature: str
    wide_columns: tuple[str, ...]
    check_crc: bool


def open_index(directory: Path, options: IndexOptions, *, cache_dir: Path, workers: int) -> tables.Tables:
    """The index of a dataset's split: the cached one where it is fresh, else built or brought up to date first.

    Raises FileNotFoundError for missing shards, ValueError for metadata that does not fit, BadRecord where no
    episode is readable, OSError for a cache that cannot be written.
    """
    label, root = _place(directory, options, cache_dir)
    manifest = _fresh_manifest(root, directory)
    if manifest is None:
        with (
            tables.explain_cache_errors(root, "the source's cache_dir (--...cache-dir)"),
            tables.locked(root, f"index of {label}"),
        ):
            manifest = _fresh_manifest(root, directory) or _build(root, label, directory, options, workers)
    return tables.open_tables(root, manifest, check_crc=options.check_crc)


def is_fresh(directory: Path, options: IndexOptions, *, cache_dir: Path) -> bool:
    """Whether `open_index` has nothing to build. Raises as it does for an unknown split or missing shards."""
    fresh = _fresh_manifest(_place(directory, options, cache_dir)[1], directory) is not None
    if not fresh:
        _stat_shards(directory, list_shards(load_builder(directory), options.split))
    return fresh


def _place(directory: Path, options: IndexOptions, cache_dir: Path) -> tuple[str, Path]:
    """What an index is called in the log, and its folder."""
    key = _key([str(directory.resolve()), *dataclasses.astuple(options)])
    label = f"{directory.parent.name}-{directory.name}-{options.split.replace(' ', '')}"
    return label, cache_dir / f"{label}-{key}"


def _fresh_manifest(root: Path, directory: Path) -> dict[str, Any] | None:
    """The manifest, where the dataset's metadata and shards are still those that it was built from."""
    manifest = tables.read_manifest(root, format_version=FORMAT)
    if manifest is None or manifest["metadata_sha256"] != _metadata_digest(directory):
        return None
    for shard in manifest["shards"]:
        try:
            found = (directory / shard["name"]).stat()
        except FileNotFoundError:
            return None
        if (found.st_size, found.st_mtime_ns) != (shard["size"], shard["mtime_ns"]):
            logger.info("%s changed since its index was built: reading it again", shard["name"])
            return None
    return manifest


def _build(root: Path, label: str, directory: Path, options: IndexOptions, workers: int) -> dict[str, Any]:
    """Read the shards that have no part yet, join all parts, and put the new manifest in place."""
    builder = load_builder(directory)
    shards = list_shards(builder, options.split)
    schema = read_schema(builder, options.prompt_feature, options.wide_columns)
    stats = _stat_shards(directory, shards)
    parts_directory = root / "parts"
    parts_directory.mkdir(exist_ok=True)
    content = [FORMAT, dataclasses.asdict(schema), options.check_crc]
    parts = [
        parts_directory / f"{shard.name}-{_key([*content, shard.num_episodes, stat])}.npz"
        for shard, stat in zip(shards, stats, strict=True)
    ]
    missing = [index for index, part in enumerate(parts) if not part.is_file()]
    progress = _Progress(label, len(missing), sum(stats[index][0] for index in missing))
    logger.info("%s: indexing %d of %d shards, %.1f MB", label, len(missing), len(shards), progress.total / 1e6)

    def scan(index: int, keep_going: Callable[[int], None]) -> None:
        _write_part(parts[index], scan_shard(directory, shards[index], schema, options.check_crc, keep_going))

    _run_parallel(scan, missing, workers or os.cpu_count() or 1, progress)
    manifest = {
        "format": FORMAT,
        "dataset": str(directory),
        "name": builder.info.name,
        "version": str(builder.info.version),
        **dataclasses.asdict(options),
        "metadata_sha256": _metadata_digest(directory),
        "prompt_feature": schema.prompt,
        "cameras": schema.cameras,
        "skipped": schema.skipped,
    }
    joined = _join(root, parts, shards, stats, schema)
    # As a later open will read it, so that both see the same.
    published = tables.publish(root, {**manifest, **joined})
    for path in root.glob("parts/*"):
        if path not in parts:
            path.unlink()
    progress.report_end(joined, schema)
    return published


def _write_part(path: Path, arrays: dict[str, np.ndarray]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _join(root: Path, parts: list[Path], shards: list[Shard], stats: list[tuple[int, int]], schema: Schema) -> dict:
    """Write the tables from all parts; returns what the manifest says about them."""
    texts: dict[str, int] = {}
    heads, dropped = [], []
    for path in parts:
        with np.load(path) as part:
            part_texts, part_dropped = json.loads(part["texts"].tobytes())
            renumbered = np.array([texts.setdefault(text, len(texts)) for text in part_texts], np.int32)
            prompt_index = renumbered[part["prompt_index"]] if len(renumbered) else part["prompt_index"]
            heads.append({**{key: part[key] for key in ("lengths", "ids", "records")}, "prompt_index": prompt_index})
            dropped += part_dropped
    shard_steps = [int(head["lengths"].sum()) for head in heads]
    num_steps, num_episodes = sum(shard_steps), sum(len(head["ids"]) for head in heads)
    if num_steps == 0:
        first = "{file}, record {record}: {why}".format(**dropped[0]) if dropped else "they are empty"
        raise BadRecord(f"no readable episode in {len(shards)} shards; the first: {first}")
    name = f"tables-{_key([path.name for path in parts])}"
    temporary = root / f".{name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()

    def pieces(key: str) -> Iterator[np.ndarray]:
        for path in parts:
            with np.load(path) as part:
                yield part[key]

    ends = np.cumsum(np.concatenate([head["lengths"] for head in heads]))
    tables.write_array(temporary, "episode_ends", np.int64, (num_episodes,), [ends])
    tables.write_array(temporary, "shard_ends", np.int64, (len(parts),), [np.cumsum(shard_steps)])
    tables.write_array(temporary, "episode_ids", "<U32", (num_episodes,), (head["ids"] for head in heads))
    tables.write_array(temporary, "records", np.int64, (num_episodes,), (head["records"] for head in heads))
    tables.write_array(temporary, "prompt_index", np.int32, (num_steps,), (head["prompt_index"] for head in heads))
    for camera in schema.cameras:
        tables.write_array(temporary, f"spans/{camera}", np.int64, (num_steps, 2), pieces(f"spans/{camera}"))
    for column, (dtype, shape) in schema.columns.items():
        tables.write_array(temporary, f"columns/{column}", dtype, (num_steps, *shape), pieces(f"columns/{column}"))
    tables.write_prompts(temporary, list(texts))
    return {
        "num_episodes": num_episodes,
        "num_steps": num_steps,
        "dropped": dropped,
        "fingerprint": tables.content_fingerprint(temporary, list(texts), list(schema.cameras)),
        "shards": [
            {"name": shard.name, "size": size, "mtime_ns": mtime_ns, "episodes": len(head["ids"]), "steps": steps}
            for shard, (size, mtime_ns), head, steps in zip(shards, stats, heads, shard_steps, strict=True)
        ],
        "files": tables.list_files(temporary),
        "tables": tables.put_in_place(temporary, root / name),
    }


def _run_parallel(scan: Callable, indices: list[int], workers: int, progress: "_Progress") -> None:
    """Scan shards on threads: their time goes into reads, checksums and hashes, which release Python's lock."""
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    with ThreadPoolExecutor(workers, thread_name_prefix="index") as pool:
        pending = {pool.submit(scan, index, progress.add) for index in indices}
        try:
            while pending:
                done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    progress.shards += 1
                progress.report()
        except BaseException:
            progress.stopped = True
            for future in pending:
                future.cancel()
            raise


class _Progress:
    """Counts what the threads read, and logs it every few seconds; `stopped` makes them give up."""

    def __init__(self, label: str, num_shards: int, total: int):
        self.label, self.num_shards, self.total = label, num_shards, total
        self.shards, self.bytes, self.stopped = 0, 0, False
        self.start = self.last_report = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self.stopped:
            raise InterruptedError("the index build was stopped")
        with self._lock:
            self.bytes += count

    def report(self) -> None:
        now = time.monotonic()
        if now - self.last_report < _REPORT_S:
            return
        self.last_report = now
        rate = self.bytes / (now - self.start)
        left_s = (self.total - self.bytes) / rate if rate else math.inf
        logger.info(
            "%s: %d of %d shards, %.0f of %.0f MB, %.0f MB/s, about %.0f s left",
            *(self.label, self.shards, self.num_shards, self.bytes / 1e6, self.total / 1e6, rate / 1e6, left_s),
        )

    def report_end(self, joined: dict[str, Any], schema: Schema) -> None:
        seconds = time.monotonic() - self.start
        logger.info(
            "%s: index done in %.1f s (%.0f MB/s): %d episodes, %d steps, cameras %s, %d records dropped",
            *(self.label, seconds, self.bytes / 1e6 / seconds, joined["num_episodes"], joined["num_steps"]),
            *(list(schema.cameras), sum(entry["episodes"] for entry in joined["dropped"])),
        )
        for name, why in schema.skipped.items():
            logger.info("%s: %s is not in the index: %s", self.label, name, why)


def _stat_shards(directory: Path, shards: list[Shard]) -> list[tuple[int, int]]:
    """Size and mtime_ns of every shard. Raises FileNotFoundError naming those that are missing."""
    paths = [directory / shard.name for shard in shards]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(paths)} shards that {INFO_FILE} names are missing in {directory}: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Download them, or choose another split."
        )
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _metadata_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in (INFO_FILE, FEATURES_FILE):
        path = directory / name
        digest.update(path.read_bytes() if path.is_file() else b"missing")
    return digest.hexdigest()


def _key(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
