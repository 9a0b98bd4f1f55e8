"""Index of an RLDS split: the location of every encoded image, and all low-dimensional data, as arrays.

Read next: `formats/sidecar.py` (how an index is kept), `shard_scan.py` (reads one shard), `rlds_source.py` (the
source).

    manifest.json             in addition to every index's entries: the shards with size and mtime
    parts/<shard>-<key>.npz   one per shard, kept: a killed build continues, and only changed shards are read again
    tables-<key>/
      records.npy int64 [episodes]           shard_ends.npy int64 [shards], steps up to and including each shard
      spans/<camera>.npy int64 [steps, 2]    byte offset and length
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import files, tables
from openpi_train.data.core.progress import Progress
from openpi_train.data.core.source import Source
from openpi_train.data.formats.repack import StepArray, is_repacked
from openpi_train.data.formats.rlds.rlds_source import RldsSource
from openpi_train.data.formats.rlds.schema import (
    FEATURES_FILE,
    INFO_FILE,
    Schema,
    ShardFile,
    find_version,
    list_shards,
    load_builder,
    read_schema,
)
from openpi_train.data.formats.rlds.shard_scan import scan_shard
from openpi_train.data.formats.sidecar import (
    FORMAT,
    IndexedConfig,
    Sidecar,
    digest,
    first_changed,
    missing_files,
    stat_files,
)
from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rlds(IndexedConfig):
    """An RLDS dataset on a local or mounted disk. Its index takes about 16 bytes per image, and the columns."""

    # <data_dir>/<name>/<version>, or <data_dir>/<name> for its newest version; or a directory that `repack` wrote.
    path: str
    # A split named in dataset_info.json, or several joined, as "train+val".
    split: str = "train"
    # Number of threads that build the index; 0: one per CPU.
    build_workers: int = 0
    # Verify the records' checksums while indexing, and the index's when it is opened.
    check_crc: bool = True
    # The text feature with the instruction ("language_instruction", "episode_metadata/task"), "auto" or "none".
    prompt_feature: str = "auto"
    # Numeric features to keep although they have more than 256 dims, e.g. "language_embedding".
    wide_columns: tuple[str, ...] = ()

    def sidecar(self) -> "RldsIndex":
        return RldsIndex(self, find_version(self.path))

    def open(self) -> Source:
        """See `IndexedConfig.open`; a repacked copy needs no index."""
        if is_repacked(self.path):
            return StepArray(path=self.path, split=self.split, check_crc=self.check_crc).open()
        return super().open()

    def is_ready(self) -> bool:
        return is_repacked(self.path) or super().is_ready()


@dataclasses.dataclass(frozen=True)
class RldsIndex(Sidecar):
    """The index of a split."""

    config: Rlds

    dropped_line = "{file}, record {record} (episode {record} of that file): {why}"

    @property
    def label(self) -> str:
        return f"{self.root.parent.name}-{self.root.name}-{self.config.split.replace(' ', '')}"

    @property
    def dataset(self) -> str:
        return f"{self.root} split {self.config.split!r}"

    @property
    def identity(self) -> str:
        config = self.config
        settings = (config.split, config.prompt_feature, config.wide_columns, config.check_crc)
        return json.dumps([str(self.root.resolve()), *settings])

    def changed(self, manifest: JsonObject) -> str | None:
        if manifest["metadata_sha256"] != self._metadata_digest():
            return f"{self.root / INFO_FILE}"
        shards = ((one["name"], one["size"], one["mtime_ns"]) for one in manifest["shards"])
        came = set(manifest["missing"]) - set(missing_files(self.root, manifest["missing"]))
        return first_changed(self.root, shards) or min(came, default=None)

    def survey(self) -> tuple[Any, list[ShardFile], list[tuple[int, int]], list[ShardFile]]:
        """tensorflow-datasets' builder; the shards; size and mtime_ns of each; missing ones that may be left out."""
        builder = load_builder(self.root)
        shards = list_shards(builder, self.config.split)
        names = [one.name for one in shards] if self.config.on_bad_record == "skip" else []
        lost = set(missing_files(self.root, names))
        missing, shards = [one for one in shards if one.name in lost], [one for one in shards if one.name not in lost]
        what = f"shards that {INFO_FILE} names are missing in {self.root}"
        stats = stat_files(
            self.root,
            [one.name for one in shards],
            what=what,
            how="Download them, choose another split, or leave their episodes out with on_bad_record skip.",
        )
        return builder, shards, [(size, mtime_ns) for _, size, mtime_ns in stats], missing

    def write(self, directory: Path) -> dict[str, Any]:
        """Read the shards that have no part yet, then join all parts."""
        builder, shards, stats, missing = self.survey()
        schema = read_schema(builder, self.config.prompt_feature, self.config.wide_columns)
        parts = self._read_shards(shards, stats, schema)
        gone = [
            {"file": one.name, "record": 0, "episodes": one.num_episodes, "why": "the file is missing: download it"}
            for one in missing
        ]
        written = self._join(directory, parts, shards, stats, schema, gone)
        for path in self.place.glob("parts/*"):
            if path not in parts:
                path.unlink()
        return {
            "metadata_sha256": self._metadata_digest(),
            "prompt_feature": schema.prompt,
            "cameras": schema.cameras,
            "skipped": schema.skipped,
            "missing": [one.name for one in missing],
            **written,
        }

    def source(self, index: tables.Tables) -> Source:
        return RldsSource(self.root, index)

    def _metadata_digest(self) -> str:
        paths = [self.root / name for name in (INFO_FILE, FEATURES_FILE)]
        return hashlib.sha256(b"".join(p.read_bytes() if p.is_file() else b"missing" for p in paths)).hexdigest()

    def _read_shards(self, shards: list[ShardFile], stats: list[tuple[int, int]], schema: Schema) -> list[Path]:
        """The part of every shard; parts of an earlier build are reused."""
        content = [FORMAT, dataclasses.asdict(schema), self.config.check_crc]
        parts = []
        for shard, stat in zip(shards, stats, strict=True):
            key = digest(json.dumps([*content, shard.num_episodes, stat], sort_keys=True))
            parts.append(self.place / "parts" / f"{shard.name}-{key}.npz")
        missing = [index for index, part in enumerate(parts) if not files.is_whole_npz(part)]
        total_mb = sum(stats[index][0] for index in missing) / 1e6
        logger.info("%s: indexing %d of %d shards, %.1f MB", self.label, len(missing), len(shards), total_mb)
        progress = Progress(self.label, total_mb, "MB")

        def scan(index: int) -> None:
            arrays = scan_shard(
                self.root, shards[index], schema, self.config.check_crc, lambda size: progress.add(size / 1e6)
            )
            files.write_npz(parts[index], arrays)

        # The threads spend their time on reads, checksums and hashes, which release the GIL.
        progress.in_threads(scan, missing, self.config.build_workers or os.cpu_count() or 1)
        return parts

    def _join(
        self,
        directory: Path,
        parts: list[Path],
        shards: list[ShardFile],
        stats: list[tuple[int, int]],
        schema: Schema,
        gone: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Write the tables from all parts; returns their entries of the manifest. `gone`: entries of missing files."""
        texts: dict[str, int] = {}
        heads, dropped = [], []
        for path in parts:
            with np.load(path) as part:
                part_texts, part_dropped = json.loads(part["texts"].tobytes())
                renumbered = np.array([texts.setdefault(text, len(texts)) for text in part_texts], np.int32)
                prompts = renumbered[part["prompt_index"]] if len(renumbered) else part["prompt_index"]
                heads.append({**{key: part[key] for key in ("lengths", "ids", "records")}, "prompt_index": prompts})
                dropped += part_dropped
        shard_steps = [int(head["lengths"].sum()) for head in heads]
        num_steps, num_episodes = sum(shard_steps), sum(len(head["ids"]) for head in heads)
        dropped += gone
        self.require_episodes(num_episodes, dropped)

        def pieces(key: str) -> Iterator[np.ndarray]:
            for path in parts:
                with np.load(path) as part:
                    yield part[key]

        write = functools.partial(tables.write_array, directory)
        write("episode_ends", np.int64, (num_episodes,), [np.cumsum(np.concatenate([h["lengths"] for h in heads]))])
        write("shard_ends", np.int64, (len(parts),), [np.cumsum(shard_steps)])
        write("episode_ids", "<U32", (num_episodes,), (head["ids"] for head in heads))
        write("records", np.int64, (num_episodes,), (head["records"] for head in heads))
        write("prompt_index", np.int32, (num_steps,), (head["prompt_index"] for head in heads))
        for camera in schema.cameras:
            write(f"spans/{camera}", np.int64, (num_steps, 2), pieces(f"spans/{camera}"))
        for column, (dtype, shape) in schema.columns.items():
            write(f"columns/{column}", dtype, (num_steps, *shape), pieces(f"columns/{column}"))
        tables.write_prompts(directory, list(texts))
        return {
            "dropped": dropped,
            "shards": [
                {"name": shard.name, "size": size, "mtime_ns": mtime_ns, "episodes": len(head["ids"]), "steps": steps}
                for shard, (size, mtime_ns), head, steps in zip(shards, stats, heads, shard_steps, strict=True)
            ],
        }
