"""Encodes the records of files part by part; finished parts are kept, so that an interrupted encoding is continued.

Read next: `token_cache.py`, which joins the parts.
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from openpi_train.data.core import files
from openpi_train.data.core.source import BadRecord
from openpi_train.data.text.examples import COLUMNS, Example, example_of
from openpi_train.data.text.message_content import text_of
from openpi_train.data.text.text_encoder import EncodedText, TextEncoder, UnfitSettingsError
from openpi_train.data.text.text_files import TextFile, entry_of, parsed
from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)

PART_RECORDS = 4096
# Arrays of a part by their axis.
OF_TOKENS = {"tokens": np.int32, "targets": np.bool_}
OF_TEXTS = {"text_lengths": np.int64, "first_target": np.int32, "last_target": np.int32}
OF_SAMPLES = {
    "digests": np.uint64,
    "files": np.int32,
    "lines": np.int64,
    "labels": np.int8,
    "margins": np.float32,
    "references": np.float32,
}
_MAX_THREADS = 8
_REPORT_S = 5.0


class MixedTypesError(ValueError):
    """Records of one dataset are of several types; such records are never skipped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedParts:
    """The encoded parts of a dataset in `folder`, each of `PART_RECORDS` records. The other arguments: `TokenCache`."""

    folder: Path
    name: str
    files: Sequence[TextFile]
    encoder: TextEncoder
    columns: Mapping[str, str]
    on_bad_record: Literal["error", "skip"]

    def encode(self) -> list[Path]:
        """The files of all parts, in order; those that are there and undamaged are not encoded again.

        Raises BadRecord naming file and line, MixedTypesError, UnfitSettingsError.
        """
        finished, records, known = [], self._records(), None
        kept, said, done = 0, time.monotonic(), 0
        while part := list(islice(records, PART_RECORDS)):
            path = self.folder / f"{len(finished):06}.npz"
            if files.is_whole_npz(path):
                kept += 1
            else:
                self._write(path, part, known)
            known = known or _first(path)
            finished.append(path)
            done += len(part)
            if time.monotonic() - said > _REPORT_S:
                said = time.monotonic()
                logger.info("%s: %d records are encoded", self.name, done)
        if kept:
            logger.info("%s: %d of %d parts were encoded before", self.name, kept, len(finished))
        return finished

    def _records(self) -> Iterator[tuple[int, int, Any]]:
        """The number of the file, the number of the record in it, and the record."""
        columns = tuple(self.columns.values()) or COLUMNS
        for file_number, file in enumerate(self.files):
            for line, raw in file.records(columns):
                yield file_number, line, raw

    def _write(self, path: Path, records: Sequence[tuple[int, int, object]], known: tuple[str, str] | None) -> None:
        columns: dict[str, list[Any]] = {name: [] for name in (*OF_TOKENS, *OF_TEXTS, *OF_SAMPLES)}
        bad: list[str] = []
        endless: list[str] = []
        unknown, first_unknown = 0, None
        kind, has_good = None, known is not None
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            # The tokenizer runs without Python's lock.
            found = list(pool.map(self._encoded, (raw for _, _, raw in records)))
        has_good = has_good or any(not isinstance(texts, ValueError) for _, texts in found)
        for (file_number, line, _), result in zip(records, found, strict=True):
            place = self.files[file_number].place(line)
            example, texts = result
            if example is not None:
                known = known or (str(example.type), place)
                self._check_type(example, place, known)
            if example is None or isinstance(texts, ValueError):
                told = f"{self.name}, {place}: {texts}"
                if isinstance(texts, UnfitSettingsError):
                    raise UnfitSettingsError(told)
                if self.on_bad_record == "error":
                    raise bad_record(self.name, place, texts, has_good=has_good)
                bad.append(told)
                continue
            kind = example.type.kind
            endless += [place for text in texts if self._is_endless(text)]
            found_unknown = sum(self._num_unknown(text) for text in texts)
            unknown += found_unknown
            first_unknown = first_unknown or (place if found_unknown else None)
            for text in texts:
                for name, value in _of_text(text).items():
                    columns[name].append(value)
            for name, value in _of_sample(example, file_number, line).items():
                columns[name].append(value)
        told = {"type": known[0] if known else None, "place": known[1] if known else None, "kind": kind, "bad": bad}
        told |= {"endless": {"number": len(endless), "first": endless[0] if endless else None}}
        told |= {"unknown": {"number": unknown, "first": first_unknown}}
        arrays = {name: joined(columns[name], dtype) for name, dtype in OF_TOKENS.items()}
        arrays |= {name: np.array(columns[name], dtype) for name, dtype in (OF_TEXTS | OF_SAMPLES).items()}
        arrays["references"] = arrays["references"].reshape(-1, 2)
        arrays["told"] = np.array(json.dumps(told))
        files.write_npz(path, arrays)

    def _encoded(self, raw: object) -> tuple[Example | None, list[EncodedText] | ValueError]:
        """The example in a record and its tokens, or what is wrong with either."""
        try:
            example = example_of(renamed(parsed(raw), self.columns))
        except ValueError as error:
            return None, error
        try:
            return example, self.encoder.encode(example)
        except ValueError as error:
            return example, error

    def _is_endless(self, text: EncodedText) -> bool:
        """Whether a text has targets, but none that ends a completion; the first token is never predicted."""
        targets = text.tokens[1:][text.targets[1:]]
        return bool(targets.size) and not np.isin(targets, self.encoder.ends).any()

    def _num_unknown(self, text: EncodedText) -> int:
        """How many tokens of a text stand for what the tokenizer does not know."""
        unknown = self.encoder.tokenizer.unknown
        return 0 if unknown is None else int(np.count_nonzero(text.tokens == unknown))

    def _check_type(self, example: Example, place: str, known: tuple[str, str]) -> None:
        if str(example.type) != known[0]:
            raise MixedTypesError(
                f"{self.name} mixes types: {known[1]} is {known[0]}, {place} is {example.type}. Split it into a "
                "dataset for each type, or name the columns to read (--data.datasets.N.columns)"
            )


def bad_record(name: str, place: str, problem: object, *, has_good: bool) -> BadRecord:
    """The error for a record that is wrong, of a dataset of this name; `has_good`: others can be read."""
    skip = " (--data.on-bad-record skip leaves such records out)" if has_good else ""
    return BadRecord(f"{name}, {place}: {problem}{skip}")


def _first(path: Path) -> tuple[str, str] | None:
    """The type of the first sample of a part, and its place."""
    told = told_of(path)
    return (told["type"], told["place"]) if told["type"] else None


def renamed(record: JsonObject, columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The record with the columns of the types; without `columns`, as it is."""
    if not columns:
        return record
    return {name: entry_of(record, column) for name, column in columns.items()}


def _of_text(text: EncodedText) -> dict[str, Any]:
    targets = np.flatnonzero(text.targets[1:]) + 1
    return {
        "tokens": text.tokens,
        "targets": text.targets,
        "text_lengths": len(text.tokens),
        "first_target": targets[0] if len(targets) else len(text.tokens),
        "last_target": targets[-1] if len(targets) else 0,
    }


def _of_sample(example: Example, file_number: int, line: int) -> dict[str, Any]:
    about = example.completions[0] if example.prompt is None else example.prompt
    if not isinstance(about, str):  # a text is the same prompt as its parts
        about = [{**one, "content": text_of(one["content"])} if "content" in one else one for one in about]
    name = json.dumps([about, dict(example.variables)], sort_keys=True, default=str)
    references = [float("nan")] * 2
    if example.reference is not None:
        # A single completion is segment 1 if it is desirable, 2 if not; so is its reference.
        first = 0 if example.label in (None, True) else 1
        references[first : first + len(example.reference)] = example.reference
    return {
        "digests": int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"),
        "files": file_number,
        "lines": line,
        "labels": -1 if example.label is None else int(example.label),
        "margins": example.margin,
        "references": references,
    }


def joined(pieces: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """The pieces, one after the other, as an array of this type."""
    return np.concatenate([np.empty(0, dtype), *pieces]).astype(dtype)


def told_of(path: Path) -> dict[str, Any]:
    """What a part says besides its arrays: `type` of its samples, `place` of the first, `kind`, `bad` records.

    `endless` is the number of texts that never end, and the place of the first; `unknown` that of tokens that stand for
    what the tokenizer does not know, and the place of the first text with one.
    """
    with np.load(path) as part:
        return json.loads(str(part["told"]))


def column_of(parts: Iterable[Path], name: str) -> Iterator[np.ndarray]:
    """An array of each part."""
    for path in parts:
        with np.load(path) as part:
            yield part[name]
