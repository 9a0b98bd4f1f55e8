"""Config of robot data: datasets with their robots and weights, and how rows are made from them.

Read next: `opened.py`, which turns a `DataConfig` into rows.
"""

import dataclasses
import math
import re
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import tyro

from openpi_train.data.core import hub
from openpi_train.data.core.dataset_flags import numbered
from openpi_train.data.core.interface import Data, OpenedData, OpeningRequest
from openpi_train.data.core.mixture import shares_in_words
from openpi_train.data.core.source import SourceConfig
from openpi_train.data.robot.mixed_robots import Difference, differences
from openpi_train.data.robot.normalize import Form
from openpi_train.data.robot.row_format import RowModel
from openpi_train.fields import at_least
from openpi_train.robots.robot import Robot
from openpi_train.runtime.exits import DataError, ErrorCollector, reported_as


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset of the mixture."""

    # Where the data are and how they are read.
    source: SourceConfig
    # The robot that recorded the data.
    robot: Robot
    # Share of the batch rows, relative to the other datasets' weights.
    weight: float = 1.0
    # Name of the norm stats; datasets with the same name share them. None: taken from the source's path.
    asset_id: str | None = None
    # An openpi norm_stats.json (or its folder) to use unchanged; None: computed from this dataset's training split.
    norm_stats: str | None = None
    # One instruction for all episodes, instead of the recorded ones.
    prompt: str | None = None
    # Leave out episodes without an instruction, and give blank steps of others that of a step beside them. None: for
    # Bridge, Droid and OpenX. With a `prompt` no episode is without.
    skip_unlabeled: bool | None = None
    # Learn only steps where this boolean feature of the dataset is true, such as is_intervention: action chunks begin
    # there, and end where it becomes false, as they do at an episode's end.
    only: str | None = None
    # The boolean feature that is true at a step of each episode that succeeds, for --data.label return; None:
    # next.success, or a next.reward above 0 at the end. `all`: all episodes succeed, as demonstrations do.
    success: str | None = None
    # The file of `data advantages` that says which steps were better than expected, for --data.label indicator; None:
    # all were, as in demonstrations.
    advantages: str | None = None
    # Held-out episodes are those of this dataset, with the same robot, instead of a fraction of this one's.
    validation: Annotated[SourceConfig | None, tyro.conf.AvoidSubcommands] = None

    @property
    def asset(self) -> str:
        """The name of the norm stats: `asset_id`, or the last part of the source's path that is no version number."""
        if self.asset_id is not None:
            return self.asset_id
        parts = [part for part in PurePath(self.source.location).parts if part.strip("/.")]
        named = [part for part in parts if not re.fullmatch(r"\d+(\.\d+)*", part)]
        return named[-1] if named else type(self.source).__name__


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Data):
    """Robot demonstrations: the datasets of a run and how their rows are processed."""

    datasets: tuple[Dataset, ...]
    # Fraction of the distinct episodes that is held out, chosen by a hash of each episode's content.
    validation_fraction: float = 0.05
    # Normalisation method; None: the one the model was designed for.
    normalization: Form | None = None
    # What to do with an unreadable record: end the run, or replace its row by another one of the same dataset.
    on_bad_record: Literal["error", "skip"] = "error"
    # A SentencePiece model file, or a hub repository that holds one as `tokenizer.model`. For SmolVLA a folder with a
    # tokenizer.json, or hub:USER/NAME.
    tokenizer: str = "google/paligemma-3b-pt-224"
    # Maximum number of text lengths of batches, chosen from the instructions; each is compiled separately.
    text_lengths: int = at_least(1, 3)
    # What robots of a mixture may differ in: the dims of actions, or of states, by name and order; the control rate.
    may_differ: tuple[Difference, ...] = ()
    # What else is learned of each step: the return of its episode from there on, by a value function
    # (ReturnDistribution); or whether it was better than expected, by a policy (AdvantageConditionedFlow).
    label: Literal["return", "indicator"] | None = None
    # What a failed episode costs in its return, in lengths of the task's longest episode.
    failure_cost: float = at_least(0, 1.0)
    # Never access the hub (HF_HUB_OFFLINE=1 does the same).
    offline: bool = False
    # Norm stats of datasets with more samples than this are computed from this many, evenly spread.
    max_norm_stats_samples: int = at_least(1, 1_000_000)

    @property
    def cameras(self) -> tuple[str, ...]:
        """The camera slots that at least one robot fills, sorted."""
        return tuple(sorted({slot for dataset in self.datasets for slot in dataset.robot.cameras}))

    @property
    def mixture_in_words(self) -> str:
        return shares_in_words([one.asset for one in self.datasets], [one.weight for one in self.datasets])

    def check(self) -> list[str]:
        problems = [
            f"--data.datasets.{number}.weight {dataset.weight} must be above 0; leave the dataset out instead"
            for number, dataset in enumerate(self.datasets)
            if not 0 < dataset.weight < math.inf
        ]
        if not 0 <= self.validation_fraction < 1:
            problems.append(
                f"--data.validation-fraction {self.validation_fraction} must lie in [0, 1); 0 holds nothing out"
            )
        for number, dataset in enumerate(self.datasets):
            if dataset.advantages is not None and self.label != "indicator":
                problems.append(f"--data.datasets.{number}.advantages is read with --data.label indicator only")
            if dataset.advantages is not None and dataset.validation is not None:
                problems.append(
                    f"--data.datasets.{number}.advantages says nothing of --data.datasets.{number}.validation: leave "
                    "that out, and a fraction of this dataset is held out"
                )
            try:
                _ = dataset.robot.delta_mask
            except ValueError as error:
                problems.append(numbered(f"--data.datasets.{number}: {error}", number))
        if not self.datasets:
            problems.append("there is no dataset to train on: give --dataset FOLDER, a LeRobot dataset or a zarr store")
        problems += differences([(one.asset, one.robot) for one in self.datasets], self.may_differ)
        return problems

    def check_dims(self, model: RowModel) -> None:
        """Raise ValueError, with the flag to give, if the model does not take the dims of each dataset's robot."""
        for dataset in self.datasets:
            model.rows.check_dims(len(dataset.robot.state_names), len(dataset.robot.action_names))

    def examine(self, model: RowModel) -> list[str]:
        from openpi_train.data.robot.examination import examine, examine_files  # which imports this module

        together, notes = ErrorCollector(), []
        for looked_at in (lambda: examine(self, model.rows.window), lambda: examine_files(self, model)):
            with together:
                notes += looked_at()
        with together, reported_as(DataError):
            self.check_dims(model)
        together.raise_all()
        return notes

    def on_hub(self) -> dict[str, Literal["model", "dataset"]]:
        name = self.tokenizer
        if self.offline or name.endswith(".model") or Path(name).expanduser().exists():
            return {}
        if hub.may_be_repository(name):
            name = f"{hub.SCHEME}{name}"
        return {name: "model"} if name.startswith(hub.SCHEME) else {}

    def is_ready(self, request: OpeningRequest) -> bool:
        from openpi_train.data.robot.examination import is_ready  # which imports this module

        return is_ready(self, request)

    def batch_spec(self, model: RowModel, batch_size: int) -> Any:
        from openpi_train.data.robot.opened import labelled  # which imports this module

        return labelled(model.rows.batch_spec(batch_size, self.cameras), self.label)

    def open(self, request: OpeningRequest) -> OpenedData:
        from openpi_train.data.robot.opened import open_run_data  # which imports this module

        return open_run_data(self, request)
