"""The section `data` of a YAML config as datasets of `TextData`. Read next: `data/text/text_data.py`."""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.data.text.examples import COLUMNS
from openpi_train.data.text.text_data import TextDataset
from openpi_train.data.text.text_files import find_files, names_a_path, parsed
from openpi_train.doors import guide_files
from openpi_train.doors.config_file import contradiction
from openpi_train.doors.posttraining.yaml_config import Algorithm, YamlConfig
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

# The datasets that each algorithm reads, the first that the file has.
_KINDS: Mapping[Algorithm, tuple[str, ...]] = {
    "sft": ("sft",),
    "rm": ("reward", "rm"),
    "dpo": ("dpo", "reward", "rlhf"),
    "ppo": ("ppo", "rlhf"),
    "grpo": ("grpo", "rlhf"),
}
_SINGLE = ("data.train_file", "data.dataset_path")
_LISTS = ("data.datasets", "data.train_files")
# Columns of the tool's own files, and what they are called here.
_OTHER_NAMES = {"response": "completion"}
_FIELDS = ("path", "weight", "name")
_OF_A_KIND = (
    *("train_files", "validation_files", "merge_datasets", "merged_cache_path"),
    "merged_validation_cache_path",
)
_BY_SIZE = "concat"
_MIXING = (_BY_SIZE, "weighted_sampling", "balanced")


class NoSourcesError(UsageError):
    """The config names no training files for the algorithm."""

    def __init__(self, algorithm: Algorithm):
        super().__init__(
            f"no training data for {algorithm}: give data.datasets.{_KINDS[algorithm][0]}.train_files, a list of "
            "files, or data.train_file"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource:
    """A file of training texts. `weight` None: as many rows as it has records. `validation` is a file, or None."""

    path: str
    weight: float | None = 1.0
    validation: str | None = None

    def dataset(self, columns: tuple[str, ...] | None = None) -> TextDataset:
        """The dataset with these columns, or those that its first record has; counts records if `weight` is None.

        Raises FileNotFoundError if there is no such file, DataError if the hub does not give it.
        """
        if columns is None:
            columns = _columns(self.first((*COLUMNS, *_OTHER_NAMES)))
        weight = self.weight
        if weight is None:
            weight = float(sum(1 for file in find_files(self.path, "train") for _ in file.records(COLUMNS)))
        return TextDataset(path=self.path, weight=weight, validation=self.validation, columns=columns)

    def first(self, columns: Sequence[str]) -> Mapping[str, Any]:
        """The first record, of parquet files these columns; empty if there is none that can be read.

        Raises as `dataset`.
        """
        raw = next((raw for file in find_files(self.path, "train") for _, raw in file.records(columns)), None)
        try:
            return parsed(raw)
        except (ValueError, TypeError):
            return {}  # it is reported where it is read, with its place


def text_sources(file: YamlConfig) -> tuple[TextSource, ...]:
    """The training files of the algorithm, with their held-out files; empty if the config names none."""
    key = _training_key(file)
    section = (key or "").rpartition(".")[0]
    _leave_other_kinds(file, section)
    if key is None:
        return ()
    entries = _read_entries(file, key)
    held_out = _held_out_files(file, section)
    if len(held_out) > len(entries):
        raise UsageError(
            f"{len(held_out)} validation files for {len(entries)} training files: at most one for each; join some"
        )
    _check_merging(file, section, len(entries))
    weights = _weights(file, entries)
    file.note(f"--data.datasets: {len(entries)} for {file.algorithm}", key)
    validations = [*map(_as_path, held_out), *[None] * (len(entries) - len(held_out))]
    return tuple(
        TextSource(path=entry["path"], weight=weight, validation=validation)
        for entry, weight, validation in zip(entries, weights, validations, strict=True)
    )


def _weights(file: YamlConfig, entries: Sequence[JsonObject]) -> Sequence[float | None]:
    """Shares of the rows by the strategy of merging; None: by the number of records."""
    key = "data.merge_config.strategy"
    mixing = file.word(key, _MIXING) or _BY_SIZE
    if len(entries) == 1:
        file.note("there is one file", key)
        return [1.0]
    given = [float(entry.get("weight", 1.0)) for entry in entries]
    if mixing == "weighted_sampling":
        file.note("--data.datasets.N.weight: shares of the rows", key)
        return given
    if len(set(given)) > 1:
        raise contradiction(f"the files have weights {given} and {key} is {mixing}, which ignores them")
    file.note("--data.datasets.N.weight: " + ("records" if mixing == _BY_SIZE else "equal"), key)
    return [None if mixing == _BY_SIZE else 1.0 for _ in entries]


def _training_key(file: YamlConfig) -> str | None:
    """The key that names the algorithm's training files. Raises UsageError if there are two."""
    by_kind = [f"{section}.train_files" for section in _sections(_KINDS[file.algorithm])]
    file.expect(*_SINGLE, *_LISTS, *by_kind)
    given = [key for key in by_kind if key in file.values]
    general = [key for key in (*_SINGLE, *_LISTS) if key in file.values]
    if len(general) > 1 or (general and given):
        raise contradiction(f"{' and '.join([*general, *given[:1]])} name the training files")
    return next(iter([*general, *given]), None)


def _leave_other_kinds(file: YamlConfig, section: str) -> None:
    """Note the datasets of other kinds than that of the section."""
    kinds = dict.fromkeys(kind for kinds in _KINDS.values() for kind in kinds)
    for other in _sections(tuple(kinds)):
        if other != section:
            file.note(f"not read by {file.algorithm}", *(f"{other}.{name}" for name in _OF_A_KIND))


def _sections(kinds: Sequence[str]) -> list[str]:
    return [f"{above}.{kind}" for kind in kinds for above in ("data.datasets", "data")]


def _held_out_files(file: YamlConfig, section: str) -> list[str]:
    known = (f"{section}.validation_files", "data.validation_file")
    file.expect(*known)
    keys = [key for key in known if key in file.values]
    if len(keys) > 1:
        raise contradiction(f"{' and '.join(keys)} name the validation files")
    for key in keys:
        entries = _read_entries(file, key)
        file.note("--data.datasets.N.validation" + (", mixed as the training files" if len(entries) > 1 else ""), key)
        return [entry["path"] for entry in entries]
    return []


def _as_path(path: str) -> str:
    """The path in a form that `TextDataset.validation` takes for a path, not for the name of a split."""
    if names_a_path(path):
        return path
    if not Path(path).expanduser().exists():
        raise UsageError(
            f"the validation file {path} (data.validation_file, or validation_files) does not exist: give the path of "
            "a file or folder with held-out texts"
        )
    return f"./{path}"


def _read_entries(file: YamlConfig, key: str) -> list[dict[str, Any]]:
    """The files of a key: a path, or a list of paths and of mappings with a path."""
    value = file.text(key) if key in (*_SINGLE, "data.validation_file") else file.entries(key)
    found = []
    for number, entry in enumerate([value] if isinstance(value, str) else value):
        where = f"{key}[{number}]"
        if isinstance(entry, str):
            entry = {"path": entry}
        if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
            raise UsageError(f"{where} is {json.dumps(entry)}; needed is a path, or a mapping with a path")
        for name in entry:
            if name not in _FIELDS:
                close = difflib.get_close_matches(str(name), _FIELDS, n=1, cutoff=0.0)[0]
                raise UsageError(f"unknown key {name} in {where}; did you mean {close}?")
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or weight <= 0:
            raise UsageError(f"weight of {where} is {json.dumps(weight)}; it must be a number above 0")
        found.append({**entry, "path": guide_files.found(entry["path"])})
    if not found:
        raise UsageError(f"{key} is empty: name a file")
    return found


def _check_merging(file: YamlConfig, section: str, num_files: int) -> None:
    """Note the keys that say how files are merged. Raises UsageError if only the first of several would be read."""
    key = f"{section}.merge_datasets"
    merges = file.boolean(key)
    file.note("several files are mixed while they are read", key)
    caches = (f"{section}.merged_cache_path", f"{section}.merged_validation_cache_path")
    file.note("no merged file is written", *caches)
    if num_files > 1 and not merges and section != "data":
        raise UsageError(
            f"{section} has {num_files} training files and no merge_datasets: true, so that the older tool reads the "
            "first one only: set merge_datasets: true to read all, or keep one file"
        )


def _columns(record: JsonObject) -> tuple[str, ...]:
    """The columns to read of a file with this first record; none if they have the names of their types."""
    given = [name for name in (*COLUMNS, *_OTHER_NAMES) if record.get(name) is not None]
    renamed = [name for name in given if name in _OTHER_NAMES and _OTHER_NAMES[name] not in given]
    if not renamed:
        return ()
    return tuple(f"{_OTHER_NAMES.get(name, name)}={name}" for name in given if name in COLUMNS or name in renamed)


def shares(datasets: Sequence[TextDataset]) -> str:
    """The datasets and their shares of the rows, for the log."""
    total = sum(dataset.weight for dataset in datasets)
    return "\n".join(f"dataset {one.path}: {100 * one.weight / total:.1f} % of the rows" for one in datasets)
