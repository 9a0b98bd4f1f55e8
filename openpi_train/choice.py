"""The dataset that a command line names: an experiment on it, and which one, where a name stands for several.

Read next: `registry.py`, which loads them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from openpi_train.data.formats import source_at
from openpi_train.data.source import SourceConfig
from openpi_train.experiment import Experiment
from openpi_train.runtime.exits import DataError, reported_as


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByActionDim:
    """One of `experiments`, by how many dims the dataset's action `column` has.

    The dataset is that of the first experiment, or the one that the command line names in its place.
    """

    experiments: Mapping[int, Experiment]
    column: str = "action"

    def choose(self, name: str, on: Callable[[SourceConfig], SourceConfig] | None = None) -> tuple[int, Experiment]:
        """The dims of the dataset, or of what `on` makes of it, and the experiment for them; `name` is the choice's.

        Raises DataError where the dataset cannot be opened, has no such column, or dims that no experiment is for.
        """
        source = next(iter(self.experiments.values())).demonstrations.datasets[0].source
        source = source if on is None else on(source)
        with reported_as(DataError):
            shapes = source.column_shapes()
        place = source.location or type(source).__name__
        found = ", ".join(f"{column} {list(shape)}" for column, shape in sorted(shapes.items()))
        shape = shapes.get(self.column)
        if shape is None or len(shape) != 1 or shape[0] not in self.experiments:
            what = f"{list(shape)} per step there" if shape else "no such column"
            known = ", ".join(map(str, sorted(self.experiments)))
            raise DataError(
                f"{name} is chosen by the dims of the column {self.column!r}, and {place} has {what} "
                f"(it has {found or 'no columns'}). Known: {known} dims. Give another dataset with --dataset PATH, "
                "or write an experiment for this one"
            )
        return shape[0], self.experiments[shape[0]]


def source_of(path: str) -> SourceConfig:
    """The dataset at `path`, its format detected. Raises DataError where there is none."""
    with reported_as(DataError):
        return source_at(path)


def moved(source: SourceConfig, argv: Sequence[str]) -> SourceConfig:
    """The source at the path that the flags give the first dataset, where they do."""
    words = [part for word in argv for part in word.split("=", 1)]
    path = dict(itertools.pairwise(words)).get("--data.datasets.0.source.path")
    return source if path is None else dataclasses.replace(source, path=path)  # pyright: ignore[reportCallIssue]


def on_dataset(experiment: Experiment, source: SourceConfig) -> Experiment:
    """The experiment on this dataset alone, with its first dataset's robot and norm stats of its own."""
    first = dataclasses.replace(experiment.demonstrations.datasets[0], source=source, asset_id=None, norm_stats=None)
    return dataclasses.replace(experiment, data=dataclasses.replace(experiment.demonstrations, datasets=(first,)))
