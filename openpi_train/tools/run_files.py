"""Reads the files of a run's directory for a report; a missing part raises `Missing` with the reason.

Read next: `report.py`.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.data.core.files import read_json
from openpi_train.former_names import present_metrics
from openpi_train.planning.gpu.run_account import RECORD
from openpi_train.runtime.exits import UsageError
from openpi_train.training.goodput import read_account, share
from openpi_train.training.run_record import recorded_json


class Missing(Exception):
    """A part of a report that cannot be made; the message says what is missing and why."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The directory of a finished or running run."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> "RunFiles":
        """The run at this path. Raises UsageError where there is none, CheckpointError if its record is damaged."""
        if not (path / "experiment.json").is_file():
            raise UsageError(
                f"{path} is not a run's directory (it has no experiment.json): name <base>/<experiment>/<name>"
            )
        recorded_json(path)
        return cls(path.resolve())

    @property
    def name(self) -> str:
        """Experiment and run."""
        return f"{self.path.parent.name}/{self.path.name}"

    def json(self, name: str, why: str = "the run has not written it yet") -> Any:
        """The content of a JSON file of the run."""
        try:
            return read_json(self.path / name)
        except FileNotFoundError:
            raise Missing(f"{name} is not there: {why}.") from None
        except (ValueError, OSError) as error:
            raise Missing(f"{name} cannot be read ({error}).") from error

    @property
    def has_gpu_step(self) -> bool:
        """Whether there is an account of the compiled step: the run is on GPUs of a described kind."""
        return (self.path / RECORD).is_file()

    @functools.cached_property
    def experiment(self) -> Mapping[str, Any]:
        """The experiment of the run."""
        return recorded_json(self.path) or {}

    @functools.cached_property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """The lines of metrics.jsonl; an incomplete last line is ignored."""
        try:
            lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return ()
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [present_metrics(line) for line in found if isinstance(line, dict) and "step" in line]

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric, where it is a finite number."""
        pairs = [(line["step"], line[name]) for line in self.metrics if isinstance(line.get(name), int | float)]
        return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        values = self.series(name)[1]
        return values[-1] if values else None

    def newest(self, name: str) -> float | None:
        """The value in the newest line that has the metric, NaN and the infinities included."""
        values = [line[name] for line in self.metrics if line.get(name) is not None]
        return float(values[-1]) if values else None

    @property
    def step(self) -> int:
        """The last recorded step."""
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def is_finished(self) -> bool:
        """Whether it reached its last step."""
        try:
            return self.json("results.json")["summary"]["step"] >= self.experiment["num_train_steps"]
        except (Missing, KeyError):
            return False

    @functools.cached_property
    def account(self) -> Mapping[str, float] | None:
        """Seconds of the run by part, over all its starts; None: a run of a version that did not count them."""
        return read_account(self.path)

    @property
    def goodput(self) -> float | None:
        """The share of the run's wall time that became steps that are kept."""
        return None if self.account is None else share(self.account)

    @property
    def learns_from_rollouts(self) -> bool:
        """Whether it learns from its own rollouts."""
        return self.experiment.get("rl") is not None

    @property
    def checkpoints(self) -> list[int]:
        """Steps with a complete checkpoint."""
        return sorted(int(file.parent.name) for file in self.path.glob("*/manifest.json") if file.parent.name.isdigit())

    @property
    def evaluations(self) -> list[Path]:
        """Folders of evaluations, by step."""
        folders = [path for path in self.path.glob("eval/*") if path.name.isdigit()]
        return sorted(folders, key=lambda path: int(path.name))

    def norm_stats(self) -> dict[str, Mapping[str, Any]]:
        """Norm stats of the newest checkpoint by asset, or of the assets directory."""
        found = {}
        steps = self.checkpoints
        base = Path(self.experiment.get("assets_base_dir", "assets")) / self.path.parent.name
        for folder in [self.path / str(steps[-1]) / "assets" if steps else base, base]:
            for file in sorted(folder.rglob("norm_stats.json")):
                asset = file.parent.relative_to(folder).as_posix()
                found.setdefault(asset, read_json(file)["norm_stats"])
        if not found and self.experiment.get("data", {}).get("__class__") == "TextData":
            raise Missing("no norm stats: texts have none.")
        if not found:
            raise Missing("no norm stats: there is no checkpoint yet, and none below --assets-base-dir.")
        return found
