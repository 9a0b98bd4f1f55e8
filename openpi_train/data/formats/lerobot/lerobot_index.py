"""Index of a LeRobot dataset: the location of every frame, and all low-dimensional data, as arrays.

Read next: `formats/sidecar.py` (how an index is kept), `episodes.py` (reads one file), `lerobot_source.py` (the
source).

    manifest.json            in addition to every index's entries: files with size and mtime, encodings of videos
    tables-<key>/
      records.npy int64 [episodes]           number of each episode in the dataset
      data_files.npy int32 [episodes]        the file of the manifest that holds its columns
      files/<camera>.npy int32 [episodes]    the file that holds its frames
      packets.npy int64 [packets, 3]         byte offset, size and presentation time of every packet of all videos
      spans/<camera>.npy int64 [steps, 2]    first and own packet; for pictures byte offset and length
      pictures/<file>.bin                    the pictures of a parquet file, byte for byte
"""

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import tables
from openpi_train.data.core.files import read_json
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.progress import Progress
from openpi_train.data.core.source import Source, column_name, report_dropped
from openpi_train.data.formats.lerobot import language_rows, lerobot_video
from openpi_train.data.formats.lerobot.contradictions import other_rates, without_deep_cameras
from openpi_train.data.formats.lerobot.episodes import ParquetScan, Scanned
from openpi_train.data.formats.lerobot.lerobot_layout import INFO_FILE, LeRobotLayout, read_layout
from openpi_train.data.formats.lerobot.lerobot_metadata import UNKNOWN, Episode, episode_files
from openpi_train.data.formats.lerobot.lerobot_source import LeRobotSource
from openpi_train.data.formats.sidecar import IndexedConfig, Sidecar, first_changed, missing_files, stat_files
from openpi_train.json_object import JsonObject

# The problem of an episode that needs a file that is not there.
_MISSING = "the file is missing: download it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeRobot(IndexedConfig):
    """A LeRobot dataset on a local or mounted disk. Dots in feature names become slashes, as in RLDS.

    Its index takes 40 bytes per video frame, or a copy of each picture, plus the columns.
    """

    # The folder that holds meta/, data/ and videos/.
    path: str
    # Maximum difference between a video frame's time and its step's timestamp.
    tolerance_s: float = 1e-4
    # What a step's instruction is: its task, a rephrasing of it, or the subtask that is under way. The last two are
    # those of the column `language_persistent`; where it has none, the task is the instruction.
    prompt_from: language_rows.PromptFrom = "task"
    # Number of threads that build the index; 0: one per CPU.
    build_workers: int = 0

    def sidecar(self) -> "LeRobotIndex":
        return LeRobotIndex(self, Path(self.path).expanduser())

    def num_steps_in_metadata(self) -> int | None:
        found = read_json(Path(self.path).expanduser() / INFO_FILE).get("total_frames")
        return found if isinstance(found, int) else None


@dataclasses.dataclass(frozen=True)
class LeRobotIndex(Sidecar):
    """The index of a dataset."""

    config: LeRobot

    dropped_line = "{file}, episode {episode}: {why}"

    @property
    def identity(self) -> str:
        prompts = "" if self.config.prompt_from == "task" else f" {self.config.prompt_from}"
        return f"{self.root.resolve()} {self.config.tolerance_s}{prompts}"

    def changed(self, manifest: JsonObject) -> str | None:
        listed = [name for name, _, _ in manifest["sources"] if name.startswith("meta/episodes/")]
        if further := set(episode_files(self.root)) - set(listed):
            return min(further)
        missing = manifest["missing"]
        if len(missing) > len(still := missing_files(self.root, missing)):
            return next(name for name in missing if name not in still)
        pictures = ((f"pictures/{name}.bin", *found) for name, found in manifest["pictures"].items())
        return first_changed(self.root, manifest["sources"]) or first_changed(self.tables_of(manifest), pictures)

    def survey(self) -> tuple[LeRobotLayout, list[tuple[str, int, int]], list[str]]:
        """The layout; name, size and mtime_ns of every file; files that are missing, if episodes may be left out."""
        layout = read_layout(self.root)
        if self.config.prompt_from != "task" and language_rows.PERSISTENT not in layout.language:
            raise ValueError(
                f"{self.root} has no column {language_rows.PERSISTENT}, from which prompt_from "
                f"{self.config.prompt_from!r} takes instructions: annotate it with lerobot-annotate, or give 'task'"
            )
        if self.config.on_bad_record == "error":  # now, and not after all files are read
            report_dropped(self.dataset, self.dropped({"dropped": _dropped(layout.episodes)}), "error")
        names = [*layout.data, *layout.videos]
        missing = missing_files(self.root, names) if self.config.on_bad_record == "skip" else []
        what = f"files of {self.root} are missing"
        how = "Download them, or leave their episodes out with on_bad_record skip."
        there = [*layout.metadata, *(name for name in names if name not in set(missing))]
        return layout, stat_files(self.root, there, what=what, how=how), missing

    def write(self, directory: Path) -> dict[str, Any]:
        layout, sources, missing = self.survey()
        number = {name: index for index, (name, _, _) in enumerate(sources)}
        (directory / "pictures").mkdir()
        progress = Progress(self.label, len(layout.videos) + len(layout.data), "files")
        videos = self._scan_videos(layout, missing, progress)
        sizes = _video_sizes(layout, videos)
        scanned = self._scan_files(layout, videos, sizes, directory / "pictures", number, progress)
        layout, good, bad, findings = _agreed(layout, sizes, scanned)
        dropped = _dropped([dataclasses.replace(entry.episode, problem=entry.problem) for entry in bad])
        self.require_episodes(len(good), dropped)
        if self.config.prompt_from != "task":
            findings += self._without_text(good)
        layout, deep = without_deep_cameras(layout, good, videos, directory / "pictures", number)
        findings += deep
        findings += other_rates(read_json(self.root / INFO_FILE).get("fps"), good)
        _write_tables(directory, layout, good, videos, number)
        encodings = list(dict.fromkeys(entry.encoding for entry in videos.values() if entry.encoding))
        pictures = {path.stem: path.stat() for path in directory.glob("pictures/*.bin")}
        return {
            "sources": sources,
            "missing": missing,
            "cameras": {column_name(name): list(camera.size) for name, camera in layout.cameras.items()},
            "encodings": [dataclasses.asdict(encoding) for encoding in encodings],
            "encoding_of": {
                str(number[name]): encodings.index(entry.encoding) for name, entry in videos.items() if entry.encoding
            },
            "pictures": {name: [found.st_size, found.st_mtime_ns] for name, found in pictures.items()},
            "dropped": dropped,
            "skipped": {**layout.skipped, **{name: self._unread(name) for name in layout.language}},
            "findings": [finding.as_json() for finding in findings],
        }

    def source(self, index: tables.Tables) -> Source:
        return LeRobotSource(self.root, index)

    def _scan_videos(
        self, layout: LeRobotLayout, missing: Sequence[str], progress: Progress
    ) -> dict[str, lerobot_video.Video]:
        """Scan all videos, by file."""
        absent = set(missing)

        def scan(file: str) -> lerobot_video.Video:
            progress.add()
            return lerobot_video.unreadable(_MISSING) if file in absent else lerobot_video.scan(self.root / file)

        return dict(zip(layout.videos, progress.in_threads(scan, layout.videos, self._threads), strict=True))

    def _scan_files(
        self,
        layout: LeRobotLayout,
        videos: Mapping[str, lerobot_video.Video],
        sizes: Mapping[str, tuple[int, int]],
        pictures: Path,
        number: Mapping[str, int],
        progress: Progress,
    ) -> list[Scanned]:
        """Scan all episodes, and copy the pictures in parquet files."""
        scan = ParquetScan(layout, videos, self.config.tolerance_s, sizes, self.config.prompt_from)

        def scan_file(file: str) -> list[Scanned]:
            progress.add()
            if file not in number:
                return [Scanned(episode, problem=_MISSING) for episode in layout.data[file]]
            return scan.read(file, pictures / f"{number[file]}.bin")

        parts = progress.in_threads(scan_file, list(layout.data), self._threads)
        unusable = [Scanned(episode, problem=episode.problem) for episode in layout.episodes if episode.problem]
        return [*unusable, *(entry for part in parts for entry in part)]

    @property
    def _threads(self) -> int:
        return self.config.build_workers or os.cpu_count() or 1

    def _without_text(self, good: Sequence[Scanned]) -> list[Finding]:
        """The finding that steps have no text of the kind that is wanted. Raises ValueError if none has one."""
        wanted, styles = self.config.prompt_from, sorted(set[str]().union(*(entry.styles for entry in good)))
        lacking = sum(text is None for entry in good for text in entry.texts)
        total = sum(len(entry.texts) for entry in good)
        if lacking == total:
            raise ValueError(
                f"{self.root}: {language_rows.PERSISTENT} has no text of style {wanted}, which prompt_from names; its "
                f"styles are {', '.join(styles) or 'none'}"
            )
        if not lacking:
            return []
        first = next(entry for entry in good if None in entry.texts)
        return [
            Finding(
                kind=f"no {wanted}",
                count=lacking,
                total=total,
                unit="steps",
                where=f"{first.episode.data}, episode {first.episode.number}, step {first.texts.index(None)}",
                training="their task is the prompt",
                remedy="Annotate them, or leave prompt_from at 'task'",
            )
        ]

    def _unread(self, name: str) -> str:
        """Why a column of language rows is not among the columns."""
        if name != language_rows.PERSISTENT:
            return "events of single steps, which are no instructions"
        if self.config.prompt_from == "task":
            return "read as instructions with --data.datasets.N.source.prompt-from subtask or task_aug"
        return f"its {self.config.prompt_from} is the instruction"


def _dropped(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """The entries of the manifest of those episodes that have a problem."""
    return [
        {"file": one.data, "episode": "unknown" if one.number == UNKNOWN else one.number, "why": one.problem}
        for one in sorted(episodes, key=lambda one: one.number)
        if one.problem
    ]


def _video_sizes(layout: LeRobotLayout, videos: Mapping[str, lerobot_video.Video]) -> dict[str, tuple[int, int]]:
    """Height and width of each camera's videos as their containers say; of most of them, where they differ."""
    sizes: dict[str, Counter[tuple[int, int]]] = {}
    for episode in layout.episodes:
        for name, clip in episode.clips.items():
            if not videos[clip.file].problem:
                sizes.setdefault(name, Counter())[videos[clip.file].size] += 1
    return {name: counts.most_common(1)[0][0] for name, counts in sizes.items()}


def _agreed(
    layout: LeRobotLayout, sizes: Mapping[str, tuple[int, int]], scanned: Sequence[Scanned]
) -> tuple[LeRobotLayout, list[Scanned], list[Scanned], list[Finding]]:
    """The layout as the files have it; the good and the bad episodes; and what is suspicious.

    A feature that no file has is left out. An episode without one that others have is bad.
    """
    good = sorted((entry for entry in scanned if not entry.problem), key=lambda entry: entry.episode.number)
    bad = [entry for entry in scanned if entry.problem]
    there = set[str]().union(*(entry.columns.keys() | entry.spans.keys() for entry in good))
    absent = [name for name in (*layout.columns, *layout.cameras) if good and name not in there]
    kept: list[Scanned] = []
    for entry in good:
        lacking = sorted(there - entry.columns.keys() - entry.spans.keys())
        if lacking:
            problem = f"the file lacks {', '.join(lacking)}, which other files of the dataset have"
            bad.append(Scanned(entry.episode, problem=problem))
        else:
            kept.append(entry)
    in_files = dict(sizes) | {name: size for entry in reversed(kept) for name, size in entry.sizes.items()}
    cameras = {
        name: dataclasses.replace(camera, size=in_files.get(name, camera.size))
        for name, camera in layout.cameras.items()
        if name not in absent
    }
    findings = [*layout.findings]
    for name, camera in cameras.items():
        if not _is_of_size(camera.shape, camera.size):
            findings.append(
                Finding(
                    kind="a camera of another size",
                    count=1,
                    unit="cameras",
                    where=name,
                    what=f"meta/info.json says {list(camera.shape)}, its files {camera.size[0]}x{camera.size[1]}",
                    training="its frames have the size of the files",
                    remedy="Correct the feature's shape, or fetch the files that belong to it",
                )
            )
    layout = dataclasses.replace(
        layout,
        columns={name: detail for name, detail in layout.columns.items() if name not in absent},
        cameras=cameras,
        skipped={**layout.skipped, **dict.fromkeys(absent, "listed in meta/info.json, but in no data file")},
    )
    return layout, kept, bad, findings


def _is_of_size(shape: Sequence[int], size: tuple[int, int]) -> bool:
    """Whether a feature's shape is this height and width and a channel dim, in any order."""
    rest = list(shape)
    for dim in size:
        if dim in rest:
            rest.remove(dim)
    return len(rest) == len(shape) - len(size)


def _write_tables(
    directory: Path,
    layout: LeRobotLayout,
    good: Sequence[Scanned],
    videos: Mapping[str, lerobot_video.Video],
    number: Mapping[str, int],
) -> None:
    """Write the tables of all readable episodes."""
    ends = np.cumsum([entry.episode.length for entry in good])
    episodes, steps = len(good), int(ends[-1])
    sizes = [len(entry.packets) for entry in videos.values()]
    first_packet = dict(zip(videos, np.cumsum([0, *sizes]).tolist(), strict=False))
    own = {text: None for entry in good for text in entry.texts if text is not None}
    texts = {text: index for index, text in enumerate(dict.fromkeys([*layout.tasks.values(), *own]))}
    numbers = sorted(layout.tasks)
    prompts = np.array([texts[layout.tasks[task]] for task in numbers], np.int32)

    def prompt_of(entry: Scanned) -> np.ndarray:
        """The prompt of each step of an episode, by its number in `texts`."""
        of_tasks = prompts[np.searchsorted(numbers, entry.tasks)]
        if not entry.texts:
            return of_tasks
        found = zip(entry.texts, of_tasks.tolist(), strict=True)
        return np.array([task if text is None else texts[text] for text, task in found], np.int32)

    write = functools.partial(tables.write_array, directory)
    write("episode_ends", np.int64, (episodes,), [ends])
    write("episode_ids", "<U32", (episodes,), [[entry.digest for entry in good]])
    write("records", np.int64, (episodes,), [[entry.episode.number for entry in good]])
    write("prompt_index", np.int32, (steps,), map(prompt_of, good))
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
