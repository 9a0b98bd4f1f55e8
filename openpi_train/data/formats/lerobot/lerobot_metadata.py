"""Reads the tables of a LeRobot dataset's `meta/`: tasks and episodes, each row once, and says where it stands.

Read next: `lerobot_layout.py`, which joins them with `info.json`. Versions 2 have JSON lines, 3.0 has parquet files.
A row that repeats another is left out and told; one that contradicts another is refused, because either may be right.
"""

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.data.core import files
from openpi_train.data.core.damage import raise_if_system
from openpi_train.data.core.findings import Finding

Row = Mapping[str, Any]
# Rows, each with its place for messages, such as "meta/tasks.jsonl, line 3"; what is wrong with it, if it is no row.
Placed = Sequence[tuple[str, Row | ValueError]]

# The number of an episode whose line of the metadata is damaged.
UNKNOWN = -1


@dataclasses.dataclass(frozen=True)
class Clip:
    """An episode's part of a video file: the file, and the episode's start time in it."""

    file: str
    start_s: float


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode: its number and length, its parquet file, and its clip of every video camera.

    `problem` says why its metadata cannot be used; `data` is then the place of the metadata, and there are no clips.
    """

    number: int
    length: int
    data: str
    clips: Mapping[str, Clip]
    problem: str = ""


def require(module: str) -> Any:
    """Import `pyarrow.parquet` or `av`. Raises ValueError naming the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"such datasets need {module}: pip install 'openpi_train[lerobot]' ({error})") from error


def metadata_files(root: Path, version: str) -> list[str]:
    """The file of the tasks, then the files of the episodes."""
    if version != "v3.0":
        return ["meta/tasks.jsonl", "meta/episodes.jsonl"]
    episodes = episode_files(root)
    if not episodes:
        raise ValueError("meta/episodes holds no parquet file")
    return ["meta/tasks.parquet", *episodes]


def episode_files(root: Path) -> list[str]:
    """The parquet files of the episodes' metadata, sorted; none in datasets of versions 2."""
    found = sorted(path.relative_to(root) for path in root.glob("meta/episodes/*/*.parquet"))
    # macOS leaves a file `._file-000.parquet` beside each on disks of other systems.
    return [str(path) for path in found if not any(part.startswith(".") for part in path.parts)]


def read_rows(root: Path, names: Sequence[str]) -> Placed:
    """The rows of JSON lines or parquet files, without the episodes' statistics.

    Raises FileNotFoundError, OSError, or ValueError naming a damaged parquet file.
    """
    return [placed for name in names for placed in _rows_of(root, name)]


def _rows_of(root: Path, name: str) -> Iterator[tuple[str, Row | ValueError]]:
    if not (root / name).exists():
        raise FileNotFoundError(f"{root / name} is missing: download it")
    if name.endswith(".jsonl"):
        for number, line in files.lines_of(root / name):
            try:
                row = json.loads(line)
                if not isinstance(row, Mapping):
                    row = ValueError(f"{json.dumps(row)[:60]} is no object; mend or remove the line")
            except ValueError as error:
                row = ValueError(f"the line is not JSON ({error}); mend or remove it")
            yield f"{name}, line {number}", row
        return
    try:
        with require("pyarrow.parquet").ParquetFile(root / name) as file:
            schema = file.schema_arrow
            table = file.read(columns=[column for column in schema.names if not column.startswith("stats/")])
    except (OSError, ValueError) as error:
        raise_if_system(error, root / name)
        raise ValueError(f"{name}: {error}") from error
    index = _index_columns(schema)
    for number, row in enumerate(table.to_pylist()):
        # A frame's index, which lerobot makes of the texts, has no name of its own.
        yield f"{name}, row {number}", {index.get(str(column), str(column)): value for column, value in row.items()}


def _index_columns(schema: Any) -> dict[str, str]:
    """The column that is the index of the frame that pandas wrote; it is called `task` unless another column is."""
    described = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    index = [column for column in described.get("index_columns", ()) if column in schema.names]
    return {index[0]: "task"} if len(index) == 1 and "task" not in schema.names else {}


def tasks_of(rows: Placed) -> tuple[dict[int, str], list[Finding]]:
    """The instruction texts by number, and what is suspicious. Raises ValueError naming the place."""
    tasks: dict[int, str] = {}
    places: dict[int, str] = {}
    repeated: list[str] = []
    for place, row in rows:
        if isinstance(row, ValueError):
            raise ValueError(f"{place}: {row}")
        number = _number(row, "task_index", place)
        text = _text(row, place)
        if number not in tasks:
            tasks[number], places[number] = text, place
        elif tasks[number] == text:
            repeated.append(place)
        else:
            raise ValueError(
                f"{place}: task {number} is {text!r}, but {places[number]} says that it is {tasks[number]!r}; give "
                "each text a number of its own, or remove the line that is wrong"
            )
    return tasks, _repeated("a task listed twice", repeated, len(rows), "tasks")


def episodes_of(rows: Placed, episode: Callable[[int, Row], Episode]) -> tuple[list[Episode], list[Finding]]:
    """The episodes in the order of their numbers, and what is suspicious.

    Args: `episode` makes one of a number and a row; a ValueError of it is the episode's problem. So is a damaged line,
    whose episode has the number `UNKNOWN`.

    Raises ValueError naming the place.
    """
    episodes: dict[int, Episode] = {}
    places: dict[int, str] = {}
    repeated: list[str] = []
    damaged: list[Episode] = []
    for place, row in rows:
        if isinstance(row, ValueError):
            damaged.append(Episode(UNKNOWN, 0, place, {}, problem=str(row)))
            continue
        number = _number(row, "episode_index", place)
        try:
            found = episode(number, row)
        except ValueError as error:
            found = Episode(number, 0, place, {}, problem=str(error))
        if number not in episodes:
            episodes[number], places[number] = found, place
        elif episodes[number] == found or (found.problem and found.problem == episodes[number].problem):
            repeated.append(place)
        else:
            raise ValueError(
                f"{place}: episode {number} is listed by {places[number]}, too, with another length or file; remove "
                "the line or the file that is left over"
            )
    found = [*damaged, *(episodes[number] for number in sorted(episodes))]
    return found, _repeated("an episode listed twice", repeated, len(rows), "entries")


def _repeated(kind: str, places: Sequence[str], total: int, unit: str) -> list[Finding]:
    """The finding about entries that say the same again."""
    if not places:
        return []
    return [
        Finding(
            kind=kind,
            count=len(places),
            total=total,
            unit=unit,
            where=places[0],
            training="each is used once",
            remedy="Remove the repeated lines, or the file that is left over",
        )
    ]


def whole_number(value: Any, what: str) -> int:
    """The value as an integer; pandas makes floats of a column in which one is missing. Raises ValueError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value != int(value) or value < 0:
        shown = "null" if value is None or value != value else repr(value)
        raise ValueError(f"its {what} is {shown}; needed is a whole number of 0 or more")
    return int(value)


def _number(row: Row, name: str, place: str) -> int:
    """The number that a row is about."""
    if name not in row:
        raise ValueError(f"{place}: there is no {name}")
    try:
        return whole_number(row[name], name)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _text(row: Row, place: str) -> str:
    """The instruction in a row of the tasks: its `task`, or else its only text."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    if "task" in row:
        texts = {"task": row["task"] or ""}
    if len(texts) != 1 or not isinstance(text := next(iter(texts.values())), str):
        raise ValueError(f"{place}: the instruction should be a text called task; there are {', '.join(row)}")
    return text.strip()
