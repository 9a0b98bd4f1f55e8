"""What is measured of a run's weights while it trains: the interface, and what every run has.

Read next: `action_error.py`, a `Measure` to copy, and `robot.py`, which lists those of robots.

Evaluations    the config: when, on how many held-out rows, and what beside the held-out loss
Measure        one thing that is measured, made when the run starts
Running        what a measure knows of the run
Evaluated      the weights at hand
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flax import nnx

from openpi_train.data.base import OpenedData
from openpi_train.fields import at_least
from openpi_train.models.base import ModelConfig
from openpi_train.nn.params import Params
from openpi_train.objectives.base import Objective
from openpi_train.sharding.strategy import Plan


class StoppedError(Exception):
    """All processes were asked to stop in the middle of an evaluation. A resumed run makes up for it."""


@runtime_checkable
class TrainerView(Protocol):
    """What measures use of a `training.step.Trainer`; `devices` is a `training.devices.Devices`."""

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
    def devices(self) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """A started run. `held_out` are its held-out batches, on the devices for the whole run.

    `stop_requested` is asked equally often by all processes. Files go below `directory`.
    """

    trainer: TrainerView
    data: OpenedData
    held_out: Sequence[Any]
    batch_size: int
    num_train_steps: int
    directory: Path
    stop_requested: Callable[[], bool] = lambda: False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The weights to measure, by the suffix of their metrics' names: "" those that train, "_ema" their average."""

    step: int
    weights: Mapping[str, Params]
    frozen: Params

    @property
    def averaged(self) -> Params:
        """The average, or without one the weights that train: what is deployed."""
        return self.weights.get("_ema", self.weights[""])


class Measure(abc.ABC):
    """One thing that is measured. All processes call it together, at the same steps."""

    # For the log.
    name: str

    def is_due(self, step: int) -> bool:
        """Whether it is measured at this step, which is one of an evaluation."""
        del step
        return True

    @abc.abstractmethod
    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        """Values by the names of `metrics.jsonl`. Raises StoppedError if it was to stop before the end."""

    def line(self, values: Mapping[str, float]) -> str:
        """These values, for the log."""
        return ", ".join(f"{name.removeprefix('val/')} {value:.4f}" for name, value in values.items())

    def change(self, first: Mapping[str, float], last: Mapping[str, float]) -> str | None:
        """What became of it from a run's first evaluation to its last, for the end of the log. Default: nothing."""
        del first, last
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluations:
    """When a run is evaluated. The loss on held-out rows is measured in every run; a subclass adds what it wants.

    Rows, noise and times are the same at every evaluation.
    """

    # Optimizer steps between evaluations; 0 evaluates only before the first and after the last step.
    interval: int = at_least(0, 1_000)
    # Held-out rows per evaluation (rounded up to whole batches; fewer where there are fewer).
    num_rows: int = at_least(1, 256)

    def check(self) -> list[str]:
        """What cannot be, as sentences with the flag to change; limits that stand at the fields are checked already."""
        return []

    def prompts(self) -> list[tuple[str, int]]:
        """Instructions that measures give beside the data's own, each with the state dims of the robot that gets it."""
        return []

    def measures(self, running: Running) -> list[Measure]:
        """What is measured beside the held-out loss. Default: nothing. Raises UsageError for what cannot be."""
        del running
        return []
