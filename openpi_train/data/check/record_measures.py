"""Measures of every record of some texts, made in one pass; those of a finished file are kept.

Read next: `text_kinds.py`, which judges by them; `data/text/examples.py`, the types of records.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data import files
from openpi_train.data.check.scripts import main_script
from openpi_train.data.findings import Finding
from openpi_train.data.progress import Progress
from openpi_train.data.source import BadRecord
from openpi_train.data.text.encoded_parts import renamed
from openpi_train.data.text.examples import COLUMNS, Example, Text, example_of
from openpi_train.data.text.text_files import TextFile, parsed

# Increase it when a measure changes.
_VERSION = 2
_REPORT_RECORDS = 1_000
# UTF-8 that was read as Latin-1 or Windows-1252, what stands where a character could not be read, and NUL.
_DAMAGED = re.compile("[ÃÂ][\u0080-\u00bf]|â€|ï»¿|\ufffd|\x00")
_ARRAYS = {
    "texts": np.uint64,
    "prompts": np.uint64,
    "characters": np.int64,
    "files": np.int32,
    "lines": np.int64,
    "prompt_scripts": np.int16,
    "answer_scripts": np.int16,
    "flags": np.uint8,
}
# Bits of `flags`.
BLANK, NO_ASSISTANT, NO_LAST_ANSWER, DAMAGED, BLANK_PROMPT = 1, 2, 4, 8, 16


@dataclasses.dataclass(frozen=True, eq=False)
class RecordMeasures:
    """Arrays with an entry per readable record, and what was seen besides.

    `texts`, `prompts` uint64: digests without case and white space, of the whole and of what comes before the answer
    (the whole, if nothing does). `prompt_scripts`, `answer_scripts`: numbers of `scripts`, -1 for none. `types`: the
    place of the first record of each type. `bad`: how many records cannot be read, and the first with its place.
    """

    arrays: Mapping[str, np.ndarray]
    scripts: Sequence[str]
    types: Mapping[str, str]
    counts: Mapping[str, int]
    bad: int
    first_bad: str
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
        findings: What opening them told.
        kept: Folder for the measures of finished files; None: none.
    """

    name: str
    files: Sequence[TextFile]
    held_out: Sequence[TextFile] = ()
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    findings: Sequence[Finding] = ()
    kept: Path | None = None

    @functools.cached_property
    def measures(self) -> RecordMeasures:
        """Of the records that are trained on."""
        return measured(self.files, self.columns, name=self.name, kept=self.kept)

    @functools.cached_property
    def held_out_measures(self) -> RecordMeasures:
        """Of the records that are held out."""
        return measured(self.held_out, self.columns, name=f"{self.name}, held out", kept=self.kept)


def measured(
    text_files: Sequence[TextFile], columns: Mapping[str, str], *, name: str, kept: Path | None
) -> RecordMeasures:
    """The measures of all records of some files; those that an earlier pass has kept are not made again."""
    progress = Progress(f"check of {name}", sum(file.path.stat().st_size for file in text_files) / 1e6, "MB")
    parts, told = [], []
    for file in text_files:
        stat = file.path.stat()
        key = json.dumps([_VERSION, str(file.path.resolve()), stat.st_size, stat.st_mtime_ns, dict(columns)])
        path = None if kept is None else kept / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"
        if path is not None and files.is_whole_npz(path):
            with np.load(path) as part:
                parts.append({key: part[key] for key in _ARRAYS})
                told.append(json.loads(str(part["told"])))
            progress.add(stat.st_size / 1e6)
            continue
        arrays, seen = _of_file(file, columns, progress)
        if path is not None:
            files.write_npz(path, {**arrays, "told": np.array(json.dumps(seen))})
        parts.append(arrays)
        told.append(seen)
    return _joined(parts, told, [file.name for file in text_files])


def _of_file(file: TextFile, columns: Mapping[str, str], progress: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
    rows: dict[str, list[int]] = {name: [] for name in _ARRAYS}
    scripts: dict[str, int] = {}
    seen: dict[str, Any] = {"types": {}, "counts": collections.Counter(), "bad": 0, "first_bad": ""}
    size, done = file.path.stat().st_size / 1e6, 0

    def bad(message: str) -> None:
        seen["first_bad"] = seen["first_bad"] or message
        seen["bad"] += 1

    try:
        for line, raw in file.records([*columns.values()] or COLUMNS):
            done += 1
            if done % _REPORT_RECORDS == 0:
                progress.add(0)
            try:
                example = example_of(renamed(parsed(raw), columns))
            except ValueError as error:
                bad(f"{file.place(line)}: {error}")
                continue
            seen["types"].setdefault(str(example.type), file.place(line))
            seen["counts"][str(example.type)] += 1
            for name, value in _of_example(example, scripts).items():
                rows[name].append(value)
            rows["files"].append(0)
            rows["lines"].append(line)
    except BadRecord as error:
        bad(str(error))
    progress.add(size)
    seen["scripts"] = list(scripts)
    return {name: np.array(rows[name], dtype) for name, dtype in _ARRAYS.items()}, seen


def _of_example(example: Example, scripts: dict[str, int]) -> dict[str, int]:
    prompt = "" if example.prompt is None else _flat(example.prompt)
    answers = [_flat(text) for text in example.completions]
    whole = "\n".join([prompt, *answers])
    asked = [
        _said(text, "user") for text in (example.prompt, *example.completions[:1]) if not isinstance(text, str | None)
    ]
    asked = [prompt] if isinstance(example.prompt, str) else asked
    blank_prompt = BLANK_PROMPT if asked and not "".join(asked).strip() else 0

    def script(text: str) -> int:
        found = main_script(text)
        return -1 if found is None else scripts.setdefault(found, len(scripts))

    return {
        "texts": _digest(prompt, *answers, str(example.label)),
        "prompts": _digest(prompt or whole),
        "characters": len(whole),
        "prompt_scripts": script("\n".join(asked)),
        # Of a preference that of the chosen completion: both together would be those of the longer one.
        "answer_scripts": script(_said(example.completions[0], "assistant") if example.completions else ""),
        "flags": _flags(example, answers) | (DAMAGED if _DAMAGED.search(whole) else 0) | blank_prompt,
    }


def _flags(example: Example, answers: Sequence[str]) -> int:
    found = 0
    for text, answer in zip(example.completions, answers, strict=True):
        if isinstance(text, str):
            found |= 0 if answer.strip() else BLANK
            continue
        spoken = [message for message in text if message.get("role") == "assistant"]
        if any(not (_content(message).strip() or message.get("tool_calls")) for message in spoken):
            found |= BLANK
        if not spoken:
            found |= NO_ASSISTANT
        elif text[-1].get("role") not in ("assistant", "tool"):
            found |= NO_LAST_ANSWER
    return found


def _said(text: Text, role: str) -> str:
    """A text, or of a conversation what this role says in it."""
    return text if isinstance(text, str) else _flat([message for message in text if message.get("role") == role])


def _flat(text: Text) -> str:
    """The contents of a text, one after the other."""
    return text if isinstance(text, str) else "\n".join(_content(message) for message in text)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _digest(*texts: str) -> int:
    """Of texts, without case and white space between words."""
    plain = "\0".join(" ".join(text.casefold().split()) for text in texts)
    return int.from_bytes(hashlib.sha256(plain.encode(errors="replace")).digest()[:8])


def _joined(parts: Sequence[dict[str, Any]], told: Sequence[dict[str, Any]], names: Sequence[str]) -> RecordMeasures:
    scripts: dict[str, int] = {}
    types: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    for number, (part, seen) in enumerate(zip(parts, told, strict=True)):
        part["files"] = np.full(len(part["files"]), number, np.int32)
        of = np.array([*(scripts.setdefault(name, len(scripts)) for name in seen["scripts"]), -1], np.int16)
        for name in ("prompt_scripts", "answer_scripts"):
            part[name] = of[part[name]]
        types = seen["types"] | types
        counts.update(seen["counts"])
    joined = {
        name: np.concatenate([np.empty(0, dtype), *(part[name] for part in parts)]).astype(dtype)
        for name, dtype in _ARRAYS.items()
    }
    first_bad = next((seen["first_bad"] for seen in told if seen["bad"]), "")
    return RecordMeasures(joined, list(scripts), types, counts, sum(seen["bad"] for seen in told), first_bad, names)
