"""Builds the index of a LeRobot dataset: where every frame lies, and all that is small, as arrays.

Read next: `data/tables.py` (how the arrays lie on disk), `episodes.py` (reads one file), `source.py` (the source).

    <cache_dir>/<name>-<key>/
      manifest.json          files with size and mtime, dropped episodes, encodings, fingerprint, tables with checksums
      tables-<key>/
        episode_ends.npy int64 [episodes]      episode_ids.npy <U32 [episodes]   records.npy int64 [episodes]
        columns/<name>.npy [steps, ...]        prompt_index.npy int32 [steps]    prompts.json
        data_files.npy int32 [episodes]        which file of the manifest holds its columns
        files/<camera>.npy int32 [episodes]    which one holds its frames
        packets.npy int64 [packets, 3]         byte offset, size and presentation time of every packet of all videos
        spans/<camera>.npy int64 [steps, 2]    first and own packet; of pictures byte offset and length
        pictures/<file>.bin                    the pictures of a parquet file, byte for byte
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from openpi_train.data import tables
from openpi_train.data.lerobot import video
from openpi_train.data.lerobot.episodes import ParquetScan, Scanned
from openpi_train.data.lerobot.layout import Layout, read_layout
from openpi_train.data.source import BadRecord, column_name

logger = logging.getLogger(__name__)

FORMAT = 1
_REPORT_S = 5.0
Item = TypeVar("Item")
Result = TypeVar("Result")


def open_index(
    root: Path, *, cache_dir: Path, tolerance_s: float, check_crc: bool = True, workers: int = 0
) -> tables.Tables:
    """The index of a dataset: the cached one where it is fresh, else built first.

    Raises FileNotFoundError for missing files, ValueError for metadata that do not fit, BadRecord where no episode is
    readable, OSError for a cache that cannot be written.
    """
    place = _place(root, cache_dir, tolerance_s)
    manifest = _fresh_manifest(place, root)
    if manifest is None:
        with (
            tables.explain_cache_errors(place, "the source's cache_dir (--...cache-dir)"),
            tables.locked(place, f"index of {root.name}"),
        ):
            manifest = _fresh_manifest(place, root) or _build(root, place, tolerance_s, workers or os.cpu_count() or 1)
    return tables.open_tables(place, manifest, check_crc=check_crc)


def is_fresh(root: Path, *, cache_dir: Path, tolerance_s: float) -> bool:
    """Whether `open_index` has nothing to build. Raises as it does for metadata that do not fit or missing files."""
    if _fresh_manifest(_place(root, cache_dir, tolerance_s), root) is not None:
        return True
    _list_files(read_layout(root))
    return False


def _place(root: Path, cache_dir: Path, tolerance_s: float) -> Path:
    key = hashlib.sha256(f"{root.resolve()} {tolerance_s}".encode()).hexdigest()[:12]
    return cache_dir / f"{root.name}-{key}"


def _fresh_manifest(place: Path, root: Path) -> dict[str, Any] | None:
    """The manifest, where all files are still those that it was built from."""
    manifest = tables.read_manifest(place, format_version=FORMAT)
    if manifest is None:
        return None
    for name, size, mtime_ns in manifest["sources"]:
        try:
            found = (root / name).stat()
        except FileNotFoundError:
            return None
        if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
            logger.info("%s changed since its index was built: reading the dataset again", name)
            return None
    return manifest


def _list_files(layout: Layout) -> list[tuple[str, int, int]]:
    """Name, size and mtime_ns of every file. Raises FileNotFoundError naming those that are missing."""
    names = [*layout.metadata, *layout.data, *layout.videos]
    missing = [name for name in names if not (layout.root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(names)} files of {layout.root} are missing: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Download them."
        )
    stats = [(layout.root / name).stat() for name in names]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(names, stats, strict=True)]


def _build(root: Path, place: Path, tolerance_s: float, workers: int) -> dict[str, Any]:
    """Read all files of the dataset and put the new manifest in place."""
    started = time.monotonic()
    layout = read_layout(root)
    sources = _list_files(layout)
    key = hashlib.sha256(json.dumps([FORMAT, sources]).encode()).hexdigest()[:12]
    temporary = place / f".tables-{key}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "pictures").mkdir(parents=True)
    number = {name: index for index, (name, _, _) in enumerate(sources)}
    with ThreadPoolExecutor(workers, thread_name_prefix="index") as pool:
        found = _all(pool, video.scan, [root / name for name in layout.videos], root)
        videos = dict(zip(layout.videos, found, strict=True))
        scan = ParquetScan(layout, videos, tolerance_s)
        parts = [(file, temporary / "pictures" / f"{number[file]}.bin") for file in layout.data]
        scanned = [entry for part in _all(pool, lambda part: scan.read(*part), parts, root) for entry in part]
    dropped = [
        {"file": entry.episode.data, "episode": entry.episode.number, "why": entry.problem}
        for entry in scanned
        if entry.problem
    ]
    good = sorted((entry for entry in scanned if not entry.problem), key=lambda entry: entry.episode.number)
    if not good:
        why = "it is empty" if not dropped else "the first: {file}, episode {episode}: {why}".format(**dropped[0])
        raise BadRecord(f"no readable episode in {root}; {why}")
    encodings = list(dict.fromkeys(entry.encoding for entry in videos.values() if entry.encoding))
    manifest = {
        "format": FORMAT,
        "dataset": str(root),
        "sources": sources,
        "cameras": {column_name(name): list(camera.size) for name, camera in layout.cameras.items()},
        "encodings": [dataclasses.asdict(encoding) for encoding in encodings],
        "encoding_of": {number[n]: encodings.index(entry.encoding) for n, entry in videos.items() if entry.encoding},
        "dropped": dropped,
        **_write_tables(temporary, layout, good, videos, number),
        "tables": tables.put_in_place(temporary, place / f"tables-{key}"),
    }
    # As a later open will read it, so that both see the same.
    published = tables.publish(place, manifest)
    _report(layout, published, time.monotonic() - started)
    return published


def _write_tables(
    directory: Path, layout: Layout, good: Sequence[Scanned], videos: dict[str, video.Video], number: dict[str, int]
) -> dict[str, Any]:
    """Write the tables of all readable episodes; returns what the manifest says about them."""
    ends = np.cumsum([entry.episode.length for entry in good])
    episodes, steps = len(good), int(ends[-1])
    sizes = [len(entry.packets) for entry in videos.values()]
    first_packet = dict(zip(videos, np.cumsum([0, *sizes]).tolist(), strict=False))
    texts = {text: index for index, text in enumerate(dict.fromkeys(layout.tasks.values()))}
    prompt_of = np.zeros(max(layout.tasks) + 1, np.int32)
    prompt_of[list(layout.tasks)] = [texts[text] for text in layout.tasks.values()]

    def write(name: str, dtype: Any, shape: tuple[int, ...], pieces: Iterable[Any]) -> None:
        tables.write_array(directory, name, dtype, shape, (np.asarray(piece) for piece in pieces))

    write("episode_ends", np.int64, (episodes,), [ends])
    write("episode_ids", "<U32", (episodes,), [[entry.digest for entry in good]])
    write("records", np.int64, (episodes,), [[entry.episode.number for entry in good]])
    write("prompt_index", np.int32, (steps,), (prompt_of[entry.tasks] for entry in good))
    write("data_files", np.int32, (episodes,), [[number[entry.episode.data] for entry in good]])
    write("packets", np.int64, (sum(sizes), 3), (entry.packets for entry in videos.values()))
    for name, camera in layout.cameras.items():
        files = [entry.episode.clips[name].file if camera.is_video else entry.episode.data for entry in good]
        shifts = [first_packet[file] if camera.is_video else 0 for file in files]
        spans = (entry.spans[name] + shift for entry, shift in zip(good, shifts, strict=True))
        write(f"files/{column_name(name)}", np.int32, (episodes,), [[number[file] for file in files]])
        write(f"spans/{column_name(name)}", np.int64, (steps, 2), spans)
    for name, (dtype, shape) in layout.columns.items():
        pieces = (entry.columns[name] for entry in good)
        write(f"columns/{column_name(name)}", dtype, (steps, *shape), pieces)
    tables.write_prompts(directory, list(texts))
    return {
        "num_episodes": episodes,
        "num_steps": steps,
        "pictures": {path.stem: [path.stat().st_size, path.stat().st_mtime_ns] for path in directory.glob("*/*.bin")},
        "fingerprint": tables.content_fingerprint(directory, list(texts), [*map(column_name, layout.cameras)]),
        "files": tables.list_files(directory),
    }


def _all(pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Sequence[Item], root: Path) -> list[Result]:
    """`work` of every item, in order, saying every few seconds how far it is."""
    started = last_report = time.monotonic()
    results = []
    try:
        for result in pool.map(work, items):
            results.append(result)
            now = time.monotonic()
            if now - last_report > _REPORT_S:
                last_report = now
                left_s = (now - started) / len(results) * (len(items) - len(results))
                logger.info("%s: %d of %d files, about %.0f s left", root.name, len(results), len(items), left_s)
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    return results


def _report(layout: Layout, manifest: dict[str, Any], seconds: float) -> None:
    logger.info(
        "%s: index done in %.1f s: %d episodes, %d steps, cameras %s, %d episodes dropped",
        *(layout.root.name, seconds, manifest["num_episodes"], manifest["num_steps"]),
        *(list(manifest["cameras"]), len(manifest["dropped"])),
    )
    for name, why in layout.skipped.items():
        logger.info("%s: %s is not in the index: %s", layout.root.name, name, why)
