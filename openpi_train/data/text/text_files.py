"""Records of text files (JSON lines, JSON arrays, parquet, arrow): of a file, a folder, or a dataset on the hub.

The files of a split are those with its name as a word of their own name, such as `train-00000-of-00002.parquet`, or as
the name of a folder, such as `data/validation/part1.jsonl` (`split_files.py`). Arrow files are those of `save_to_disk`
of the `datasets` library. Read next: `examples.py`.
"""

import dataclasses
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.data.core.close_names import guess
from openpi_train.data.core.damage import raise_if_system
from openpi_train.data.core.files import naming
from openpi_train.data.core.hub import SCHEME, hub_folder
from openpi_train.data.core.source import BadRecord
from openpi_train.data.text.json_array import entries_of_array
from openpi_train.data.text.split_files import data_files, of_split, read_once
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_PARQUET, _ARROW = ".parquet", ".arrow"
_TABLES = (_PARQUET, _ARROW)
ENDINGS = (*_LINES, *_TABLES)
# Those that may be one array of records.
_ARRAYS = (".json", ".json.gz")
_MARK = b"\xef\xbb\xbf"
_BLOCK_ROWS = 1024
# How Arrow's file format begins; what `datasets` writes is the other one, the stream.
_ARROW_FILE = b"ARROW1"
_READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file of records; `name` is its path below the dataset's folder."""

    path: Path
    name: str

    @property
    def is_array(self) -> bool:
        """Whether it may be one array of records, which is read at once."""
        return self.path.name.endswith(_ARRAYS)

    def sha256(self) -> str:
        """Digest of its content."""
        with self.path.open("rb") as file, naming(self.path):
            return hashlib.file_digest(file, "sha256").hexdigest()

    def records(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """The number of each record, from 1, and what `parsed` takes; of tables `columns` only.

        Raises BadRecord if the file is damaged.
        """
        return self._rows(columns) if self.path.name.endswith(_TABLES) else self._lines()

    def place(self, number: int) -> str:
        """The place of a record for messages: `file:line`, or the number of the record where it has no own line."""
        if self.path.name.endswith(_TABLES):
            return f"{self.name}: row {number}"
        return f"{self.name}: record {number}" if self.is_array else f"{self.name}:{number}"

    def _lines(self) -> Iterator[tuple[int, Any]]:
        number, counts_records = 0, self.is_array
        try:
            with (
                naming(self.path),
                gzip.open(self.path) if self.path.name.endswith(".gz") else self.path.open("rb") as file,
            ):
                for line_number, line in enumerate(file, 1):
                    line = line.removeprefix(_MARK) if line_number == 1 else line
                    if counts_records and number == 0 and line.lstrip().startswith(b"["):
                        yield from self._entries(line + file.read())
                        return
                    if not counts_records:
                        number = line_number
                    if line.strip():
                        number += counts_records
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadRecord(
                f"{self.place(number + 1)}: the file is damaged ({error}); put a whole copy here"
            ) from error

    def _entries(self, content: bytes) -> Iterator[tuple[int, Any]]:
        number = 0
        try:
            for number, entry in enumerate(entries_of_array(content.decode()), 1):
                # `parsed` says what is wrong with an entry that is no object, or has an integer that is too long.
                yield number, entry if isinstance(entry, Mapping | bytes) else json.dumps(entry)
        except UnicodeDecodeError as error:
            raise BadRecord(f"{self.name} is not UTF-8 ({error})") from error
        except json.JSONDecodeError as error:
            told = f"not JSON ({error.msg} in line {error.lineno}, character {error.colno})"
            raise BadRecord(f"{self.place(number + 1)}: {told}; needed is an array of objects") from error
        except RecursionError as error:
            raise BadRecord(f"{self.place(number + 1)}: nested too deeply") from error

    def _rows(self, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            import pyarrow  # pyright: ignore[reportMissingImports] (an extra)
        except ImportError as error:
            raise UsageError(f"{self.path} needs pyarrow: pip install 'openpi_train[text]'") from error
        number = 0
        try:
            for batch in self._batches(columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: _without_nulls(value) for name, value in row.items()}
        except (pyarrow.ArrowException, OSError) as error:
            raise_if_system(error, self.path)
            raise BadRecord(
                f"{self.place(number + 1)}: the file is damaged ({error}); put a whole copy here"
            ) from error

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Batches of rows of a table. With none of the columns, they have all, which the message names."""
        from pyarrow import ipc, parquet  # pyright: ignore[reportMissingImports] (an extra)

        if self.path.name.endswith(_PARQUET):
            with parquet.ParquetFile(self.path) as file:
                yield from file.iter_batches(_BLOCK_ROWS, columns=self._present(columns, file.schema_arrow.names))
            return
        with self.path.open("rb") as raw:
            is_file, _ = raw.read(len(_ARROW_FILE)) == _ARROW_FILE, raw.seek(0)
            reader = ipc.open_file(raw) if is_file else ipc.open_stream(raw)
            present = self._present(columns, reader.schema.names)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for start in range(0, batch.num_rows, _BLOCK_ROWS):
                    yield batch.select(present).slice(start, _BLOCK_ROWS)

    def _present(self, columns: Sequence[str], names: Sequence[str]) -> list[str]:
        """The columns of a table that are read: of an entry of an object (`a.b`), the whole object."""
        wanted = {column if column in names else column.partition(".")[0] for column in columns}
        present = [name for name in names if name in wanted] or list(names)
        if twice := sorted({name for name in present if list(names).count(name) > 1}):
            raise BadRecord(f"{self.name}: several columns are called {', '.join(twice)}; rename all but one")
        return present


def parsed(raw: Any) -> Mapping[str, Any]:
    """The record that `TextFile.records` gave. Raises ValueError if it is not a JSON object."""
    if isinstance(raw, Mapping):
        return raw
    try:
        record = json.loads(raw)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error.msg} at character {error.pos + 1}); needed is one object per line"
        ) from error
    except ValueError as error:  # Python's limit
        longest = sys.get_int_max_str_digits()
        raise ValueError(f"an integer has more than {longest} digits; write it as a string, or leave it out") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, Mapping):
        raise ValueError(f"{json.dumps(record)[:60]} is no object; needed is one object per line or entry")
    return record


def entry_of(record: JsonObject, column: str) -> Any:
    """A column of a record, or an entry of an object in one: `reward_model.ground_truth`.

    Raises ValueError, naming what there is, if there is none.
    """
    found: Any = record
    for name in [column] if column in record else column.split("."):
        if isinstance(found, str) and found.lstrip().startswith("{"):  # tables may hold an object as JSON
            try:
                found = json.loads(found)
            except ValueError as error:
                raise ValueError(f"{column}: the text {found!r:.60} is no JSON ({error})") from error
        if not isinstance(found, Mapping) or name not in found:
            inside = f"; {column.rpartition('.' + name)[0]} has {sorted(found)}" if isinstance(found, Mapping) else ""
            raise ValueError(
                f"it has no {column}, which --data.datasets.N.columns names; it has {sorted(record)}"
                + (inside if found is not record else "")
            )
        found = found[name]
    return found


def find_files(where: str, split: str | None = None, *, offline: bool = False) -> list[TextFile]:
    """The files of a split, in the order of their names: `where` is a file, a folder, or `hub:USER/NAME`.

    The split of a single file is not looked at. A folder without any split in its names is taken to be `train`.

    Raises FileNotFoundError if there are none, DataError if the hub does not give them, BadRecord as `data_files`.
    """
    if where.startswith(SCHEME):
        patterns = [f"{start}*{ending}" for ending in ENDINGS for start in ("", "**/")]
        root = hub_folder(where, repo_type="dataset", patterns=patterns, offline=offline)
    else:
        root = Path(where).expanduser()
        if not root.exists():
            raise FileNotFoundError(f"there is no file or folder {where}{guess(root)}: check the path")
    if root.is_file():
        if not root.name.endswith(ENDINGS):
            raise FileNotFoundError(f"{where} is none of {', '.join(ENDINGS)}, which are the files that are read")
        return [TextFile(root, root.name)]
    names = data_files(root, ENDINGS)
    if not names:
        raise FileNotFoundError(f"no texts in {where}: it needs files of {', '.join(ENDINGS)}")
    mine = list(names) if split is None else of_split(names, split)
    if not mine:
        shown = ", ".join(list(names)[:5]) + (", ..." if len(names) > 5 else "")
        raise FileNotFoundError(f"no file of the split {split} in {where}, which has {shown}; name a split or a file")
    return [TextFile(root / name, name) for name in read_once(root, {name: names[name] for name in mine})]


def names_a_path(text: str) -> bool:
    """Whether the text is a path or an address, rather than the name of a split."""
    return "/" in text or text.endswith(ENDINGS)


def _without_nulls(value: object) -> Any:
    """A column's value without null entries of objects in it.

    All objects of a column of a table have the entries that one of them has, such as the arguments of all tools.
    As in TRL's `data_utils.py: remove_none_values`.
    """
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
