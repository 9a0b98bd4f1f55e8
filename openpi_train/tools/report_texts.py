"""The parts of a report about a language model: what `eval` measured, and samples. Read next: `report.py`."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.data.files import read_json
from openpi_train.evaluation.text_evaluations import SAMPLES
from openpi_train.tools.evaluate_text import RESULTS
from openpi_train.tools.page import folded, note, table, text
from openpi_train.tools.run_files import Missing, RunFiles

# Prompts and completions of each that are shown at once; further prompts are folded.
_SHOWN, _COMPLETIONS = 4, 4
_MOST_CHARACTERS = 4000


def is_of_texts(run: RunFiles) -> bool:
    """Whether the run trains on texts."""
    return run.experiment.get("data", {}).get("__class__") == "TextData"


def evaluations(run: RunFiles) -> str:
    """What `eval` measured, by step; then samples of the first and the last evaluation that has some."""
    parts = [_measured(run)]
    folders = [folder for folder in run.evaluations if (folder / SAMPLES).is_file()]
    for folder in dict.fromkeys(folders[:1] + folders[-1:]):
        parts.append(f"<h3>Samples, step {text(int(folder.name))}</h3>{_samples(folder / SAMPLES)}")
    if not any(parts):
        raise Missing(
            "no samples and no evaluation: a run writes samples with --eval.num-prompts N, and "
            f"`python -m openpi_train eval {run.path}` evaluates it afterwards."
        )
    return "".join(parts)


def _measured(run: RunFiles) -> str:
    found = {folder.name: read_json(folder / RESULTS) for folder in run.evaluations if (folder / RESULTS).is_file()}
    names = list(dict.fromkeys(name for one in found.values() for name in one["values"]))
    if not found:
        return ""
    rows = [[int(step), *(one["values"].get(name) for name in names)] for step, one in found.items()]
    return "<h3>Measured by `eval`</h3>" + table(["step", *names], rows)


def _samples(path: Path) -> str:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    shown = "".join(map(_prompt, lines[:_SHOWN]))
    more = lines[_SHOWN:]
    return shown + (folded(f"{len(more)} more prompts", "".join(map(_prompt, more))) if more else "")


def _prompt(line: Mapping[str, Any]) -> str:
    """A prompt with its reference and completions."""
    completions: Sequence[Mapping[str, Any]] = line["completions"]
    parts = [note(line["place"]), _block("prompt", line["prompt"]), _block("reference", line["reference"])]
    for one in completions[:_COMPLETIONS]:
        scores = ", ".join(f"{name} {value:.3g}" for name, value in one["scores"].items())
        ended = "ended" if one["finish_reason"] == "stop" else "cut off"
        parts.append(_block(f"completion: {scores or 'not scored'}; {one['tokens']} tokens, {ended}", one["text"]))
    if len(completions) > _COMPLETIONS:
        parts.append(note(f"{len(completions) - _COMPLETIONS} more completions are in {SAMPLES}."))
    return "".join(parts)


def _block(title: str, content: str) -> str:
    cut = content if len(content) <= _MOST_CHARACTERS else f"{content[:_MOST_CHARACTERS]} …"
    return f"{note(title)}<pre>{html.escape(cut)}</pre>"
