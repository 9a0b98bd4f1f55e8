"""`distributed_training_results.json`: what a run that learns from its own rollouts achieved, iteration by iteration.

The names are those of the RIPT trainers for pi0, for programs that read them. All numbers come from `metrics.jsonl` and
`results.json`, so a run that goes on has its earlier iterations, too. Read next: `results.py`, `run.py`, the caller.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from openpi_train.data.core.files import read_json, write_json
from openpi_train.former_names import present_metrics
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import CheckpointError, reported_as

FILE = "distributed_training_results.json"
_ITERATION, _ROLLOUTS = "rl/iteration", "rl/rollouts"
# The names there, and ours.
_NAMES = {
    "mean_reward": "rl/reward",
    "success_rate": "rl/success",
    "mean_loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "clip_fraction": "clip_fraction",
    "acting_s": "time/acting_s",
    "interval_s": "time/interval_s",
}
_TASKS = "rl/success/"


def write_iterations(directory: Path) -> None:
    """Write the file of the run in `directory`, which has its results already. For process 0 only.

    Raises CheckpointError if the disk has no space for it.
    """
    results = read_json(directory / "results.json")
    lines = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    found = iterations_of(map(present_metrics, lines))
    last: Mapping[str, Any] = found[-1] if found else {}
    values = {
        "config": results["config"],
        "training_metrics": found,
        "distributed_info": results["distributed_info"],
        "experiment_summary": {
            "total_iterations": len(found),
            "total_episodes": sum(one.get("total_episodes") or 0 for one in found),
            "total_training_steps": results["summary"]["step"],
            "final_success_rate": last.get("success_rate"),
            "final_loss": last.get("mean_loss"),
        },
    }
    with reported_as(CheckpointError):
        write_json(directory / FILE, values)


def iterations_of(lines: Iterable[JsonObject]) -> list[dict[str, Any]]:
    """An entry per iteration of these lines of a log; None for a number that is not finite.

    The numbers of an iteration with several lines are means over them; of several iterations between two lines only the
    last is known.
    """
    by_iteration: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        if _ITERATION in line:
            by_iteration.setdefault(int(line[_ITERATION]), []).append(line)
    return [_entry(number, own) for number, own in by_iteration.items()]


def _entry(number: int, lines: list[JsonObject]) -> dict[str, Any]:
    tasks = [name for name in lines[-1] if name.startswith(_TASKS)]
    # Lines of older versions have no number of rollouts.
    rollouts = lines[-1].get(_ROLLOUTS)
    return {
        "iteration": number,
        "step": lines[-1]["step"],
        "total_episodes": None if rollouts is None else int(rollouts),
        **{theirs: _mean(lines, ours) for theirs, ours in _NAMES.items() if ours in lines[-1]},
        "success_rates": {name.removeprefix(_TASKS): _mean(lines, name) for name in tasks},
    }


def _mean(lines: list[JsonObject], name: str) -> float | None:
    """The mean of a number over the lines; None if it is not finite in one of them, or unknown."""
    values = [float("nan" if line.get(name) is None else line[name]) for line in lines]
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None
