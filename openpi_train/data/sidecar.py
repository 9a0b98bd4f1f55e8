"""The index of a dataset, beside it: made at the first opening, and again where the dataset changed or it is damaged.

Read next: `data/tables.py` (how the arrays lie on disk), then `rlds/rlds_index.py`, `lerobot/lerobot_index.py` or
`zarr/zarr_index.py`, which say what a format's index holds.

    <cache_dir>/<label>-<key>/
      lock                   whoever builds holds it; all others wait
      manifest.json          what it was built from, dropped episodes, fingerprint, tables with checksums: written last
      tables-<key>/
        episode_ends.npy int64 [episodes]      episode_ids.npy <U32 [episodes]
        columns/<name>.npy [steps, ...]        prompt_index.npy int32 [steps]    prompts.json
"""

import abc
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from openpi_train.data import places, tables
from openpi_train.data.source import BadRecord, Source, SourceConfig, report_dropped
from openpi_train.runtime import locks

logger = logging.getLogger(__name__)

# Raise it when what the tables say changes: all indexes are then built anew.
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Sidecar(abc.ABC):
    """The index of a dataset, for one opening: `root` is where `config.path` leads."""

    config: "IndexedConfig"
    root: Path

    # How an entry of the manifest's `dropped` reads.
    dropped_line: ClassVar[str]

    @property
    def label(self) -> str:
        """What it is called in the log and in its folder's name."""
        return self.root.name

    @property
    def dataset(self) -> str:
        """What the dataset is called in messages."""
        return str(self.root)

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """The dataset and the settings that decide the content, as a text; another text, another place."""

    @abc.abstractmethod
    def changed(self, manifest: Mapping[str, Any]) -> str | None:
        """What is no longer as the manifest says; None where all is. Raises FileNotFoundError for missing files."""

    @abc.abstractmethod
    def survey(self) -> Any:
        """The dataset's metadata. Raises FileNotFoundError for missing files, ValueError for what does not fit."""

    @abc.abstractmethod
    def write(self, directory: Path) -> dict[str, Any]:
        """Read the dataset and write its tables; returns what the manifest says of it.

        That is `cameras`, `dropped` and `skipped` (by name, why) at least. Raises as `survey`, and BadRecord.
        """

    @abc.abstractmethod
    def source(self, index: tables.Tables) -> Source:
        """The dataset by its index."""

    @property
    def place(self) -> Path:
        """The index's folder."""
        return places.indexes(self.config.cache_dir) / f"{self.label}-{digest(self.identity)}"

    def tables_of(self, manifest: Mapping[str, Any]) -> Path:
        """The folder of a manifest's tables."""
        return self.place / manifest["tables"]

    def open(self) -> tables.Tables:
        """The index: the one that is there where it is fresh and whole, else built first.

        Raises FileNotFoundError for missing files, ValueError for metadata that do not fit, BadRecord where no episode
        is readable, OSError for a cache that cannot be written.
        """
        found = self._find(check_crc=self.config.check_crc)
        if found is None:
            with (
                tables.explain_cache_errors(self.place, "the source's cache_dir (--...cache-dir)"),
                locks.held(self.place / tables.LOCK, f"index of {self.label}"),
            ):
                found = self._find(check_crc=self.config.check_crc) or self._build()
        return found

    def is_fresh(self) -> bool:
        """Whether `open` has nothing to build. Raises as `survey` where it has."""
        if self._find(check_crc=False):
            return True
        self.survey()
        return False

    def dropped(self, manifest: Mapping[str, Any]) -> list[tuple[int, str]]:
        """The episodes that were left out: how many, where and why."""
        return [(entry.get("episodes", 1), self.dropped_line.format_map(entry)) for entry in manifest["dropped"]]

    def require_episodes(self, number: int, dropped: Sequence[Mapping[str, Any]]) -> None:
        """Raise BadRecord where none of the dataset's episodes is readable."""
        if not number:
            why = f"the first: {self.dropped_line.format_map(dropped[0])}" if dropped else "it is empty"
            raise BadRecord(f"no readable episode in {self.dataset}; {why}")

    def _find(self, *, check_crc: bool) -> tables.Tables | None:
        """The index that is there, where it is whole and the dataset still what it was built from."""
        manifest = tables.read_manifest(self.place)
        if manifest is None or manifest.get("format") != FORMAT:
            return None
        try:
            changed = self.changed(manifest)
            if not changed:
                return tables.open_tables(self.place, manifest, check_crc=check_crc)
            logger.info("%s changed since its index was built: reading it again", changed)
        except FileNotFoundError:
            pass  # building says which are missing
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("the index %s is damaged (%r): building it anew", self.place, error)
        return None

    def _build(self) -> tables.Tables:
        started = time.monotonic()
        draft = self.place / f".tables.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        manifest = {"format": FORMAT, "dataset": self.dataset, **self.write(draft)}
        prompts = json.loads((draft / tables.PROMPTS).read_text(encoding="utf-8"))
        ends = np.load(draft / "episode_ends.npy")
        manifest |= {
            "num_episodes": len(ends),
            "num_steps": int(ends[-1]),
            "fingerprint": tables.content_fingerprint(draft, prompts, list(manifest["cameras"])),
            "files": tables.list_files(draft),
        }
        manifest["tables"] = f"tables-{manifest['fingerprint'][:12]}"
        # As a later open will read it, so that both see the same.
        manifest = tables.publish(self.place, draft, manifest)
        logger.info(
            "%s: index done in %.1f s: %d episodes, %d steps, cameras %s, %d episodes dropped",
            *(self.label, time.monotonic() - started, manifest["num_episodes"], manifest["num_steps"]),
            *(list(manifest["cameras"]), sum(episodes for episodes, _ in self.dropped(manifest))),
        )
        for name, why in manifest["skipped"].items():
            logger.info("%s: %s is not in the index: %s", self.label, name, why)
        return tables.open_tables(self.place, manifest, check_crc=self.config.check_crc)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedConfig(SourceConfig):
    """A dataset on a local or mounted disk that has an index."""

    # Where the dataset lies.
    path: str
    # Where the index is kept; None: $OPENPI_TRAIN_HOME/index.
    cache_dir: str | None = None
    # Verify the index's checksums when it is opened.
    check_crc: bool = True
    # An episode that is damaged: stop, or leave it out.
    on_bad_record: Literal["error", "skip"] = "error"

    @abc.abstractmethod
    def sidecar(self) -> Sidecar:
        """The dataset's index, which need not be there yet. Raises FileNotFoundError where there is no dataset."""

    def open(self) -> Source:
        """Open the dataset, building or refreshing its index first.

        Raises FileNotFoundError (no dataset, missing files), ValueError (metadata or settings that do not fit),
        BadRecord (damaged episodes and `on_bad_record="error"`), OSError (a cache that cannot be written).
        """
        sidecar = self.sidecar()
        index = sidecar.open()
        report_dropped(sidecar.dataset, sidecar.dropped(index.manifest), self.on_bad_record)
        return sidecar.source(index)

    def is_ready(self) -> bool:
        """See `SourceConfig.is_ready`; reads metadata alone."""
        return self.sidecar().is_fresh()

    def skipping_bad_records(self) -> "IndexedConfig":
        return dataclasses.replace(self, on_bad_record="skip")


def digest(text: str) -> str:
    """Twelve letters for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def stat_files(root: Path, names: Sequence[str], *, what: str, how: str) -> list[tuple[str, int, int]]:
    """Name, size and mtime_ns of every file. Raises FileNotFoundError naming those that are missing.

    Args: for the message, `what` files are missing where ("files of ... are missing"), and `how` to come by them.
    """
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(names)} {what}: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. {how}"
        )
    stats = [(root / name).stat() for name in names]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(names, stats, strict=True)]


def first_changed(root: Path, files: Iterable[Sequence[Any]]) -> str | None:
    """The first of the files (name, size, mtime_ns) that changed. Raises FileNotFoundError for a missing one."""
    for name, size, mtime_ns in files:
        found = (root / name).stat()
        if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
            return name
    return None
