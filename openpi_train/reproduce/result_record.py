"""The record of a result, `record.json`: what was run, what came out, and digests that another machine can compare.

    name, made, commands     the entry, when, and every command line
    data                     digest of the content of each dataset, by asset id
    losses                   digest of every loss of metrics.jsonl: step, name and the bits of the number
    parameters               digest of the last checkpoint's parameters
    success                  of each evaluation: successes, episodes, Wilson interval, digest of the single outcomes
    published                the published figure and its source, if there is one
    minutes                  wall time by stage
    environment              versions, git commit, processes, devices

Read next: `reproduce_run.py`, which makes it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.data.core.files import lines_of, read_json
from openpi_train.envs.score import wilson
from openpi_train.experiment import Experiment
from openpi_train.interop.stored_leaves import bytes_in_order
from openpi_train.json_object import JsonObject
from openpi_train.reproduce.reproduction import PublishedFigure
from openpi_train.runtime.exits import DataError, UsageError

# What the same entry gives on every machine with the same versions, and the facts that say why it may not.
_RESULTS = ("commands", "data", "losses", "parameters", "success")
_FACTS = ("versions", "git", "process_count", "devices")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedValue:
    """A value of two records. `must`: whether records of one entry have to agree on it."""

    name: str
    then: str
    now: str
    must: bool

    @property
    def verdict(self) -> str:
        """A word or two for the table."""
        return "equal" if self.then == self.now else "DIFFERS" if self.must else "differs, and may"


def data_digests(experiment: Experiment) -> dict[str, str]:
    """The fingerprint of each dataset's content, which does not depend on where or how it is stored."""
    return {one.asset: one.source.open().fingerprint for one in experiment.demonstrations.datasets}


def losses_digest(metrics: Path) -> dict[str, Any]:
    """Digest, number, first and last of all losses of a `metrics.jsonl`, training and held out.

    Raises DataError if there is none.
    """
    found = [
        (line["step"], name, float(line[name]))
        for line in (json.loads(text) for _, text in lines_of(metrics))
        for name in sorted(line)
        if name.rpartition("/")[2].partition("_")[0] == "loss" and line[name] is not None
    ]
    if not found:
        raise DataError(f"{metrics} has no losses")
    text = "".join(f"{step} {name} {value.hex()}\n" for step, name, value in found)
    trained = [value for _, name, value in found if name == "loss"] or [value for *_, value in found]
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"sha256": digest, "count": len(found), "first": trained[0], "last": trained[-1]}


def parameters_digest(run: Path) -> dict[str, Any]:
    """Digest and number of the parameters of a run's newest checkpoint: names, types, shapes and values."""
    digest, count = hashlib.sha256(), 0
    for name, leaf in sorted(checkpoint_formats.open_checkpoint(str(run)).params.items()):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        for piece in bytes_in_order(leaf):
            digest.update(piece)
            count += len(piece) // leaf.dtype.itemsize
    return {"sha256": digest.hexdigest(), "count": count}


def success_of(results: Path) -> dict[str, Any]:
    """Successes of an evaluation's folder, with the interval and a digest of every episode's outcome."""
    found = read_json(results / "closed_loop.json")
    outcomes = json.dumps(found["episodes"], sort_keys=True)
    overall = {name: found["overall"][name] for name in ("successes", "trials", "rate", "low", "high")}
    return {**overall, "sha256": hashlib.sha256(outcomes.encode()).hexdigest()}


def overall(success: Mapping[str, JsonObject]) -> tuple[int, int]:
    """Successes and episodes over all evaluations."""
    return sum(one["successes"] for one in success.values()), sum(one["trials"] for one in success.values())


def in_words(record: JsonObject) -> str:
    """The result in some lines: each evaluation, all together, and the published figure beside it."""
    lines = [f"{name}: {_rate(one['successes'], one['trials'])}" for name, one in record["success"].items()]
    successes, trials = overall(record["success"])
    if len(lines) > 1:
        lines.append(f"all: {_rate(successes, trials)}")
    if record["published"] is None:
        return "\n".join([*lines, "published: none"])
    published = PublishedFigure(**record["published"])
    low, high = wilson(successes, trials)
    verdict = "it lies within our interval"
    if not low <= published.success <= high:
        verdict = f"ours is {'below' if high < published.success else 'above'} it by the interval"
    return "\n".join([*lines, f"published: {published.success:.2%}; {verdict} ({published.source})"])


def _rate(successes: int, trials: int) -> str:
    low, high = wilson(successes, trials)
    return f"{successes} of {trials} episodes, {successes / trials:.1%} (95 % interval {low:.1%} to {high:.1%})"


def read_record(path: Path) -> JsonObject:
    """A record. Raises UsageError if the file is none."""
    try:
        found = read_json(path)
        if {"name", "environment", *_RESULTS} - {*found}:
            raise ValueError("some of its parts are missing")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is no record of `reproduce` ({error})") from error
    return found


def compare(then: JsonObject, now: JsonObject) -> list[ComparedValue]:
    """Every value of two records of one entry: results, which must agree, and facts of the machines."""
    results = _compared(then, now, _RESULTS, must=True)
    return [*results, *_compared(then["environment"], now["environment"], _FACTS, must=False)]


def _compared(then: JsonObject, now: JsonObject, names: Iterable[str], *, must: bool) -> Iterable[ComparedValue]:
    for name in names:
        before, after = _flat(name, then.get(name)), _flat(name, now.get(name))
        for one in dict.fromkeys([*before, *after]):
            yield ComparedValue(name=one, then=before.get(one, "none"), now=after.get(one, "none"), must=must)


def _flat(name: str, value: object) -> dict[str, str]:
    """Values by dotted name."""
    if not isinstance(value, Mapping):
        return {name: json.dumps(value)}
    return {key: text for part, inner in value.items() for key, text in _flat(f"{name}.{part}", inner).items()}


def comparison(found: Sequence[ComparedValue]) -> str:
    """A table of the compared values."""
    rows = [("what", "in the record", "here", ""), *((one.name, one.then, one.now, one.verdict) for one in found)]
    rows = [tuple(_short(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _short(cell: str, most: int = 44) -> str:
    return cell if len(cell) <= most else f"{cell[: most - 3]}..."
