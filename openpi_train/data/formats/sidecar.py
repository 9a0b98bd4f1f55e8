"""Index of a dataset: built at the first opening, and again if the dataset has changed or the index is damaged.

Read next: `core/tables.py` (the arrays on disk), then `rlds/rlds_index.py`, `lerobot/lerobot_index.py` or
`zarr/zarr_index.py`, which say what a format's index holds.

    <cache_dir>/<label>-<key>/
      lock                   held by the process that builds; all others wait
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
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from openpi_train.data.check import fault_kinds
from openpi_train.data.core import cache_folders, findings, tables
from openpi_train.data.core.image import says_depth
from openpi_train.data.core.instructions import unlabeled
from openpi_train.data.core.source import BadRecord, Source, SourceConfig, report_dropped
from openpi_train.json_object import JsonObject
from openpi_train.runtime import locks

logger = logging.getLogger(__name__)

# Increase it when the content of the tables changes: all indexes are then built again.
FORMAT = 3


@dataclasses.dataclass(frozen=True)
class Sidecar(abc.ABC):
    """The index of a dataset, for one opening: `root` is the resolved `config.path`."""

    config: "IndexedConfig"
    root: Path

    # Format string for an entry of the manifest's `dropped`.
    dropped_line: ClassVar[str]

    @property
    def label(self) -> str:
        """The index's name in the log and in its folder's name."""
        return self.root.name

    @property
    def dataset(self) -> str:
        """The dataset's name in messages."""
        return str(self.root)

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """The dataset and the settings that determine the content, as a text; each text has its own index folder."""

    @abc.abstractmethod
    def changed(self, manifest: JsonObject) -> str | None:
        """What has changed since the manifest was written; None if nothing. FileNotFoundError for missing files."""

    @abc.abstractmethod
    def survey(self) -> Any:
        """The dataset's metadata. Raises FileNotFoundError for missing files, ValueError for inconsistent metadata."""

    @abc.abstractmethod
    def write(self, directory: Path) -> dict[str, Any]:
        """Read the dataset and write its tables; returns the format's entries of the manifest.

        These are at least `cameras`, `dropped` and `skipped` (reasons by name), and `findings` (`Finding.as_json`) if
        there are any. Raises as `survey`, and BadRecord; OSError if the system failed (`core/damage.py`): then there
        is no index, as a file that could not be read may be sound.
        """

    @abc.abstractmethod
    def source(self, index: tables.Tables) -> Source:
        """The dataset, opened with its index."""

    @property
    def place(self) -> Path:
        """The index's folder."""
        return cache_folders.indexes(self.config.cache_dir) / f"{self.label}-{digest(self.identity)}"

    def tables_of(self, manifest: JsonObject) -> Path:
        """The folder of a manifest's tables."""
        return self.place / manifest["tables"]

    def open(self) -> tables.Tables:
        """Open the index, building it first if it is missing, stale or damaged.

        Raises FileNotFoundError for missing files, ValueError for inconsistent metadata, BadRecord if no episode is
        readable, OSError if the system fails to read the dataset or to write the cache.
        """
        found = self._find(check_crc=self.config.check_crc)
        if found is None:
            with (
                tables.explain_cache_errors(self.place, "its cache_dir (--data.datasets.N.source.cache-dir)"),
                locks.held(self.place / tables.LOCK, f"index of {self.label}"),
            ):
                found = self._find(check_crc=self.config.check_crc) or self._build()
        return found

    def is_fresh(self) -> bool:
        """Whether `open` has nothing to build. Raises as `survey` otherwise."""
        if self._find(check_crc=False):
            return True
        self.survey()
        return False

    def dropped(self, manifest: JsonObject) -> list[tuple[int, str]]:
        """The episodes that were left out: how many, where and why."""
        return [(entry.get("episodes", 1), self.dropped_line.format_map(entry)) for entry in manifest["dropped"]]

    def require_episodes(self, number: int, dropped: Sequence[JsonObject]) -> None:
        """Raise BadRecord if none of the dataset's episodes is readable."""
        if not number:
            why = f"the first: {self.dropped_line.format_map(dropped[0])}" if dropped else "it is empty"
            raise BadRecord(f"no readable episode in {self.dataset}; {why}")

    def _find(self, *, check_crc: bool) -> tables.Tables | None:
        """The existing index, if it is complete and the dataset has not changed since; else None."""
        manifest = tables.read_manifest(self.place)
        if manifest is None or manifest.get("format") != FORMAT:
            return None
        try:
            changed = self.changed(manifest)
            if not changed:
                return tables.open_tables(self.place, manifest, check_crc=check_crc)
            logger.info("%s changed since its index was built: reading it again", changed)
        except FileNotFoundError:
            pass  # building reports which are missing
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("the index %s is damaged (%r): building it again", self.place, error)
        return None

    def _build(self) -> tables.Tables:
        started = time.monotonic()
        with tables.drafted(self.place) as draft:
            manifest = self._written(draft)
        logger.info(
            "%s: index done in %.1f s: %d episodes, %d steps, cameras %s, %d episodes dropped",
            *(self.label, time.monotonic() - started, manifest["num_episodes"], manifest["num_steps"]),
            *(list(manifest["cameras"]), sum(episodes for episodes, _ in self.dropped(manifest))),
        )
        for name, why in manifest["skipped"].items():
            logger.info("%s: %s is not in the index: %s", self.label, name, why)
        return tables.open_tables(self.place, manifest, check_crc=self.config.check_crc)

    def _written(self, draft: Path) -> dict[str, Any]:
        """Write the tables and then the manifest; returns the manifest as a later open will read it."""
        manifest = {"format": FORMAT, "dataset": self.dataset, **self.write(draft)}
        prompts = json.loads((draft / tables.PROMPTS).read_text(encoding="utf-8"))
        ends = np.load(draft / "episode_ends.npy")
        told = _findings(prompts, np.load(draft / "prompt_index.npy"), ends, manifest["cameras"])
        manifest["findings"] = [*manifest.get("findings", ()), *(finding.as_json() for finding in told)]
        manifest |= {
            "num_episodes": len(ends),
            "num_steps": int(ends[-1]),
            "fingerprint": tables.content_fingerprint(draft, prompts, list(manifest["cameras"])),
            "files": tables.list_files(draft),
        }
        manifest["tables"] = f"tables-{manifest['fingerprint'][:12]}"
        manifest["findings"] = [*manifest.get("findings", ()), *self._suspicious(manifest, draft)]
        return tables.publish(self.place, draft, manifest)

    def _suspicious(self, manifest: JsonObject, draft: Path) -> list[dict[str, Any]]:
        """What the written columns show, found once and told at every opening."""
        # The manifest as a later open will read it.
        as_read = json.loads(json.dumps({**manifest, "tables": draft.name}))
        source = self.source(tables.open_tables(self.place, as_read, check_crc=False))
        return [finding.as_json() for finding in fault_kinds.at_opening(self.label, source)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedConfig(SourceConfig):
    """A dataset on a local or mounted disk that has an index."""

    # Folder of the dataset.
    path: str
    # Folder for the index; None: $OPENPI_TRAIN_HOME/index.
    cache_dir: str | None = None
    # Verify the index's checksums when it is opened.
    check_crc: bool = True
    # What to do with a damaged episode: stop, or leave it out.
    on_bad_record: Literal["error", "skip"] = "error"

    @abc.abstractmethod
    def sidecar(self) -> Sidecar:
        """The dataset's index, which need not exist yet. Raises FileNotFoundError if there is no dataset."""

    def open(self) -> Source:
        """Open the dataset, building or refreshing its index first.

        Raises FileNotFoundError (no dataset, missing files), ValueError (inconsistent metadata or settings), BadRecord
        (damaged episodes and `on_bad_record="error"`), OSError (the system fails to read them or to write the cache).
        """
        sidecar = self.sidecar()
        index = sidecar.open()
        report_dropped(sidecar.dataset, sidecar.dropped(index.manifest), self.on_bad_record)
        source = sidecar.source(index)
        findings.report(sidecar.label, source.findings)
        return source

    def is_ready(self) -> bool:
        """Whether the index is up to date; reads metadata alone."""
        return self.sidecar().is_fresh()

    def skipping_bad_records(self) -> "IndexedConfig":
        return dataclasses.replace(self, on_bad_record="skip")


def _findings(
    prompts: Sequence[str], prompt_index: np.ndarray, episode_ends: np.ndarray, cameras: Iterable[str]
) -> list[findings.Finding]:
    """What is suspicious in a dataset of any format."""
    lacking = unlabeled(prompts, prompt_index, episode_ends)
    found = [] if lacking is None else [lacking]
    if depth := [name for name in cameras if says_depth(name)]:
        found.append(
            findings.Finding(
                kind="named depth",
                count=len(depth),
                unit="cameras",
                where=", ".join(depth),
                training="they are pictures of colours where a robot names them, and no slot is theirs otherwise",
                remedy="If they are depth, give the robot's cameras without them",
            )
        )
    return found


def digest(text: str) -> str:
    """A digest of a text, 12 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def stat_files(root: Path, names: Sequence[str], *, what: str, how: str) -> list[tuple[str, int, int]]:
    """Name, size and mtime_ns of every file. Raises FileNotFoundError naming those that are missing.

    Args: for the message, `what` files are missing ("files of ... are missing") and `how` to get them.
    """
    found = {name: _stat(root / name) for name in names}
    missing = [name for name, status in found.items() if status is None]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(names)} {what}: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. {how}"
        )
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found.items() if status is not None]


def missing_files(root: Path, names: Sequence[str]) -> list[str]:
    """Those of the files that are not there."""
    return [name for name in names if _stat(root / name) is None]


def _stat(path: Path) -> os.stat_result | None:
    """A file's; None if there is no such file. Raises OSError if the system does not say."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def first_changed(root: Path, files: Iterable[Sequence[Any]]) -> str | None:
    """The first of the files (name, size, mtime_ns) that changed. Raises FileNotFoundError for a missing one."""
    for name, size, mtime_ns in files:
        found = (root / name).stat()
        if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
            return name
    return None
