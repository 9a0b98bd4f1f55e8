"""Measures of every record of some texts, made in one pass; those of a finished file are kept.

Read next: `text_kinds.py`, which judges by them; `text/examples.py`, the types of records.
"""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.check.episode_table import finished_parts
from openpi_train.data.check.record_flags import SPECIAL, SpecialTokens, asked_in, flags_of, flat, said
from openpi_train.data.check.scripts import main_script
from openpi_train.data.core import files
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.progress import Progress
from openpi_train.data.core.source import BadRecord
from openpi_train.data.text.encoded_parts import renamed
from openpi_train.data.text.examples import COLUMNS, Example, UnknownTypeError, example_of
from openpi_train.data.text.text_files import TextFile, parsed
from openpi_train.json_object import JsonObject

# Increase it when a measure changes.
_VERSION = 4
_REPORT_RECORDS = 1_000
_ARRAYS = {
    "texts": np.uint64,
    "prompts": np.uint64,
    "verdicts": np.uint64,
    "opposites": np.uint64,
    "characters": np.int64,
    "files": np.int32,
    "lines": np.int64,
    "prompt_scripts": np.int16,
    "answer_scripts": np.int16,
    "flags": np.uint16,
}


@dataclasses.dataclass(frozen=True, eq=False)
class RecordMeasures:
    """Arrays with an entry per readable record, and what was seen besides.

    `texts`, `prompts` uint64: digests without case and white space, of the whole and of what comes before the answer
    (the whole, if nothing does). `verdicts` uint64: digests of which answer is better, or whether one is good, 0 for
    other texts; `opposites`: those of records that say the opposite. `prompt_scripts`, `answer_scripts`: numbers of
    `scripts`, -1 for none. `flags`: bits of `record_flags.py`. `types`: the place of the first record of each type.
    `tokens`: records that have each special token in their texts. `bad`: how many records cannot be read, and the first
    with its place and what to do; `equal`: those whose `chosen` is their `rejected`, and the place of the first.
    """

    arrays: Mapping[str, np.ndarray]
    scripts: Sequence[str]
    types: Mapping[str, str]
    counts: Mapping[str, int]
    tokens: Mapping[str, int]
    bad: int
    first_bad: str
    bad_remedy: str
    equal: int
    first_equal: str
    file_names: Sequence[str]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __len__(self) -> int:
        return len(self.arrays["texts"])

    def place(self, record: int) -> str:
        """The file and line of a record."""
        name = self.file_names[int(self.arrays["files"][record])]
        return TextFile(Path(name), name).place(int(self.arrays["lines"][record]))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExaminedTexts:
    """Texts under examination.

    Attributes:
        name: What messages call them.
        files: Those that are trained on; `held_out`: those that are not.
        columns: The files' column for each column of the type, or none (`TextDataset.columns_by_type`).
        columns_flag: The flag that names them.
        special: The special tokens that no text should have.
        findings: What opening them told.
        kept: Folder for the measures of finished files; None: none.
    """

    name: str
    files: Sequence[TextFile]
    held_out: Sequence[TextFile] = ()
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    columns_flag: str = "--data.datasets.N.columns"
    special: SpecialTokens = dataclasses.field(default_factory=SpecialTokens)
    findings: Sequence[Finding] = ()
    kept: Path | None = None

    @functools.cached_property
    def measures(self) -> RecordMeasures:
        """Of the records that are trained on."""
        return measured(self.files, self.columns, self.special, name=self.name, kept=self.kept)

    @functools.cached_property
    def held_out_measures(self) -> RecordMeasures:
        """Of the records that are held out."""
        return measured(self.held_out, self.columns, self.special, name=f"{self.name}, held out", kept=self.kept)


def measured(
    text_files: Sequence[TextFile],
    columns: Mapping[str, str],
    special: SpecialTokens,
    *,
    name: str,
    kept: Path | None,
) -> RecordMeasures:
    """The measures of all records of some files; those that an earlier pass has kept are not made again."""
    progress = Progress(f"check of {name}", sum(file.path.stat().st_size for file in text_files) / 1e6, "MB")
    parts, told = [], []
    paths = [None if kept is None else kept / f"{_key(file, columns, special)}.npz" for file in text_files]
    finished = finished_parts(paths, name)
    for file, path in zip(text_files, paths, strict=True):
        if path in finished:
            with np.load(path) as part:
                parts.append({key: part[key] for key in _ARRAYS})
                told.append(json.loads(str(part["told"])))
            progress.add(file.path.stat().st_size / 1e6)
            continue
        arrays, seen = _of_file(file, columns, special, progress)
        if path is not None:
            files.write_npz(path, {**arrays, "told": np.array(json.dumps(seen))})
        parts.append(arrays)
        told.append(seen)
    return _joined(parts, told, [file.name for file in text_files])


def _of_file(
    file: TextFile, columns: Mapping[str, str], special: SpecialTokens, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    rows: dict[str, list[int]] = {name: [] for name in _ARRAYS}
    scripts: dict[str, int] = {}
    seen: dict[str, Any] = {"types": {}, "counts": collections.Counter(), "tokens": collections.Counter()}
    seen |= {"bad": 0, "first_bad": "", "bad_remedy": "", "equal": 0, "first_equal": ""}
    size, done = file.path.stat().st_size / 1e6, 0

    def bad(message: str, remedy: str = "") -> None:
        if not seen["bad"]:
            seen["first_bad"], seen["bad_remedy"] = message, remedy
        seen["bad"] += 1

    try:
        for line, raw in file.records([*columns.values()] or COLUMNS):
            done += 1
            if done % _REPORT_RECORDS == 0:
                progress.add(0)
            try:
                record = parsed(raw)
                given = renamed(record, columns)
                if given.get("chosen") is not None and given["chosen"] == given.get("rejected"):
                    seen["first_equal"] = seen["first_equal"] or file.place(line)
                    seen["equal"] += 1
                    continue
                example = example_of(given)
            except UnknownTypeError as error:
                bad(f"{file.place(line)}: {error.told}", "" if columns else error.remedy)
                continue
            except ValueError as error:
                bad(f"{file.place(line)}: {error}")
                continue
            seen["types"].setdefault(str(example.type), file.place(line))
            seen["counts"][str(example.type)] += 1
            tokens = special.written_in(example)
            seen["tokens"].update(tokens)
            for name, value in _of_example(example, scripts).items():
                rows[name].append(value | SPECIAL if name == "flags" and tokens else value)
            rows["files"].append(0)
            rows["lines"].append(line)
    except BadRecord as error:
        bad(str(error))
    progress.add(size)
    seen["scripts"] = list(scripts)
    return {name: np.array(rows[name], dtype) for name, dtype in _ARRAYS.items()}, seen


def _of_example(example: Example, scripts: dict[str, int]) -> dict[str, int]:
    prompt = "" if example.prompt is None else flat(example.prompt)
    answers = [flat(text) for text in example.completions]
    whole = "\n".join([prompt, *answers])

    def script(text: str) -> int:
        found = main_script(text)
        return -1 if found is None else scripts.setdefault(found, len(scripts))

    judged = {"verdicts": 0, "opposites": 0}
    if example.label is not None:
        verdicts = [_digest(prompt, *answers, str(label)) for label in (example.label, not example.label)]
        judged = dict(zip(judged, verdicts, strict=True))
    elif len(answers) > 1:
        judged = {"verdicts": _digest(prompt, *answers), "opposites": _digest(prompt, *reversed(answers))}
    return judged | {
        "texts": _digest(prompt, *answers, str(example.label)),
        "prompts": _digest(prompt or whole),
        "characters": len(whole),
        "prompt_scripts": script(asked_in(example) or ""),
        # Of a preference that of the chosen completion: both together would be those of the longer one.
        "answer_scripts": script(said(example.completions[0], "assistant") if example.completions else ""),
        "flags": flags_of(example),
    }


def _digest(*texts: str) -> int:
    """Of texts, without case and white space between words."""
    plain = "\0".join(" ".join(text.casefold().split()) for text in texts)
    return int.from_bytes(hashlib.sha256(plain.encode(errors="replace")).digest()[:8])


def _key(file: TextFile, columns: Mapping[str, str], special: SpecialTokens) -> str:
    """What the measures of a file depend on, as a name."""
    stat = file.path.stat()
    read = (dict(columns), special.own)
    key = json.dumps([_VERSION, str(file.path.resolve()), stat.st_size, stat.st_mtime_ns, *read])
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _joined(parts: Sequence[dict[str, Any]], told: Sequence[JsonObject], names: Sequence[str]) -> RecordMeasures:
    scripts: dict[str, int] = {}
    types: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    for number, (part, seen) in enumerate(zip(parts, told, strict=True)):
        part["files"] = np.full(len(part["files"]), number, np.int32)
        of = np.array([*(scripts.setdefault(name, len(scripts)) for name in seen["scripts"]), -1], np.int16)
        for name in ("prompt_scripts", "answer_scripts"):
            part[name] = of[part[name]]
        types = seen["types"] | types
        counts.update(seen["counts"])
        tokens.update(seen["tokens"])
    joined = {
        name: np.concatenate([np.empty(0, dtype), *(part[name] for part in parts)]).astype(dtype)
        for name, dtype in _ARRAYS.items()
    }
    first_bad = next((seen for seen in told if seen["bad"]), {"first_bad": "", "bad_remedy": ""})
    return RecordMeasures(
        arrays=joined,
        scripts=list(scripts),
        types=types,
        counts=counts,
        tokens=tokens,
        bad=sum(seen["bad"] for seen in told),
        first_bad=first_bad["first_bad"],
        bad_remedy=first_bad["bad_remedy"],
        equal=sum(seen["equal"] for seen in told),
        first_equal=next((seen["first_equal"] for seen in told if seen["equal"]), ""),
        file_names=names,
    )
