"""Evaluation during training: the interface of measures, and the config that all runs share.

Read next: `action_error.py`, a `Measure` to copy, and `eval_config.py`, which lists those of robots.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flax import nnx

from openpi_train.data.core.interface import Data, OpenedData
from openpi_train.fields import at_least
from openpi_train.generation.generation_size import GenerationSize
from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.objective import Objective
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.params import Params
from openpi_train.parallel.strategy import Plan


@runtime_checkable
class TrainerView(Protocol):
    """The part of `training.step.Trainer` that measures use; `devices` is a `training.devices.Devices`."""

    @property
    def graphdef(self) -> nnx.GraphDef: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def seed(self) -> int: ...
    @property
    def devices(self) -> Devices: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationContext:
    """A started run. `held_out` are its held-out batches, on the devices for the whole run.

    All processes must call `stop_requested` the same number of times. Files of an evaluation go to `folder(step)`,
    which is `results` if given.
    """

    trainer: TrainerView
    data: OpenedData
    held_out: Sequence[Any]
    batch_size: int
    num_train_steps: int
    directory: Path
    stop_requested: Callable[[], bool] = lambda: False
    results: Path | None = None

    def folder(self, step: int) -> Path:
        """The folder for the files of the evaluation at this step; it may not exist yet."""
        return self.directory / "eval" / str(step) if self.results is None else self.results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The weights to measure, by suffix of the metrics' names: "" for the trained weights, "_ema" for their average."""

    step: int
    weights: Mapping[str, Params]
    frozen: Params

    @property
    def averaged(self) -> Params:
        """The weights to deploy: the average, or without one the trained weights."""
        return self.weights.get("_ema", self.weights[""])


class Measure(abc.ABC):
    """A measure. All processes call it together, at the same steps."""

    # Name in the log.
    name: str

    def is_due(self, step: int) -> bool:
        """Whether it is measured at this step, at which there is an evaluation."""
        del step
        return True

    @abc.abstractmethod
    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        """Values by their names in `metrics.jsonl`. Raises StoppedError if it was stopped."""

    def line(self, values: Mapping[str, float]) -> str:
        """A line for the log with these values."""
        return ", ".join(f"{name.removeprefix('val/')} {value:.4f}" for name, value in values.items())

    def change(self, first: Mapping[str, float], last: Mapping[str, float]) -> str | None:
        """A line for the end of the log that compares a run's first and last evaluation. Default: none."""
        del first, last
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Config of a run's evaluations. The loss on held-out rows is always measured; subclasses add more.

    Rows, noise and times are the same at every evaluation.
    """

    # Steps between evaluations; 0 evaluates only before the first and after the last step.
    interval: int = at_least(0, 1_000)
    # Number of held-out rows per evaluation (rounded up to whole batches; all rows if there are fewer).
    num_rows: int = at_least(1, 256)

    def check(self) -> list[str]:
        """Invalid settings, as sentences that name the flag to change; limits of single fields are already checked."""
        return []

    def require(self) -> None:
        """Raise UsageError for a package that a measure needs and that is not installed (default: none is)."""

    def generation_size(self, model: ModelConfig, data: Data) -> GenerationSize | None:
        """The most texts that a device generates at a time for the measures. Default: none."""
        del model, data
        return None

    def prompts(self) -> list[tuple[str, int]]:
        """Instructions that measures use in addition to the data's, each with the number of state dims of its robot."""
        return []

    def measures(self, running: EvaluationContext) -> list[Measure]:
        """The measures besides the held-out loss. Default: none. Raises UsageError for invalid settings."""
        del running
        return []
