"""What every kind of data promises to a run. Robots' demonstrations are one kind (`config.py`, `opened.py`).

    Data          the config: a field of the experiment
    OpenedData    what opening it gives: feeds of batches, and the shapes that they come in
    Feed          the batches of a run, one after the other; they may follow from the present parameters
    RowSource     rows by position, for the feed that reads ahead (`feed.py`)

A batch is any tree of arrays with the rows on the first axis and `row`, the rows' numbers in the global batch: with
seed and step they fix all randomness. Data workers import this module, so it imports neither jax nor a dataset library.
"""

import abc
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from jax.sharding import Sharding

# Shape and dtype of every entry of a row.
RowSpec = Mapping[str, tuple[tuple[int, ...], str]]


class RowSource(abc.ABC):
    """The rows at every position of an endless pass. Workers get a pickled copy.

    Attributes: `spec`, what a row is; `num_samples`, the distinct ones; `identity`, what they depend on, as JSON: a run
    continues with equal ones only.
    """

    spec: RowSpec
    num_samples: int
    identity: Mapping[str, Any]

    @abc.abstractmethod
    def batch(self, positions: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
        """The stacked rows at `positions` [n] by name, and a message for every bad record that had its row replaced.

        Raises BadRecord or ValueError with what to do where a row cannot be had.
        """

    def cut(self, columns: Mapping[str, np.ndarray], positions: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows of the batch at `positions`, as `batch` made them, less what none in that batch needs: padding."""
        del positions
        return dict(columns)

    def describe(self, positions: np.ndarray) -> list[str]:
        """Which sample stands at each position, for people."""
        return [f"row {position}" for position in positions.tolist()]

    def proportions(self, num_positions: int) -> dict[str, float]:
        """Each dataset's realised share of the first `num_positions` rows; empty where there is one."""
        del num_positions
        return {}

    @property
    def fingerprint(self) -> str:
        """A digest of `identity`: equal rows at equal positions have equal fingerprints."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()


class Feed(abc.ABC):
    """The batches of a run, global arrays on the devices. Call it from the main thread; `close` when done.

    Counters: `wait_s`, the time that `next` has waited for data; `bad_records`, rows of this process replaced.
    """

    wait_s: float = 0.0
    bad_records: int = 0

    @abc.abstractmethod
    def next(self, state: Any = None) -> Any:
        """The batch of the next step, for the training state that the step begins with.

        All processes call it equally often. It may compute with `state.params`, and take long (under a `phase` of its
        own, for the watchdog). It must not keep `state`: the step takes its memory over.

        Raises DataError where there is none.
        """

    @abc.abstractmethod
    def position(self) -> dict[str, Any]:
        """Where the feed stands, as JSON: with it in a checkpoint, the same batches follow after `seek`."""

    @abc.abstractmethod
    def seek(self, position: dict[str, Any]) -> None:
        """Go to a `position`. Raises ValueError naming what differs where it was taken from other data."""

    @property
    def can_be_saved(self) -> bool:
        """Whether `position` says all: a feed whose batches follow from old parameters waits until it makes new ones.

        A save that is due meanwhile is made at the next step at which it can be.
        """
        return True

    def start(self) -> None:  # noqa: B027, nothing is what a feed may do
        """Begin with the next batch in the background, where it does not follow from parameters."""

    def tune(self, *, step_s: float, wait_s: float) -> None:  # noqa: B027
        """Hear what the steps since the last call took, and what of it was spent waiting here."""

    def rows(self, step: int) -> list[str]:
        """Which sample each row of the batch at `step` is, for people; empty where that is not known."""
        del step
        return []

    def proportions(self) -> dict[str, float]:
        """Each dataset's share of the rows so far; empty where there is one."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Let go of threads, processes and files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpeningRequest:
    """What opening the data of a run depends on beside their own config.

    `model` is the run's `ModelConfig`, `draws_per_row` its objective's; files that belong to the data (norm stats) lie
    below `assets_dir`. `prompts` are instructions that the run gives beside the data's own, each with the number of
    state dims of the robot that it is given to.
    """

    model: Any
    seed: int
    batch_size: int
    draws_per_row: int = 1
    assets_dir: Path = Path()
    prompts: Sequence[tuple[str, int]] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedData(abc.ABC):
    """A run's data, open. Every process has its own, and all have the same."""

    # Distinct training samples: those of an epoch.
    num_samples: int
    # The text tokens of the longest rows, padding included; every checkpoint keeps it. None: the model's own limit.
    text_length: int | None = None
    # `tokens_fingerprint` of the run's tokenizer; None where there is none.
    tokenizer: str | None = None
    # Its files, by path in a checkpoint's directory.
    token_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @abc.abstractmethod
    def feed(
        self, *, batch_size: int, sharding: "Sharding", num_workers: int | Literal["auto"], cores: int | None
    ) -> Feed:
        """The training batches, cut over the devices by `sharding`; `cores` are those that this process may use."""

    @property
    def row_shapes(self) -> dict[str, list[int]]:
        """The shape of every entry of a row, as JSON; all processes must find the same."""
        return {}

    def batch_specs(self, batch_size: int) -> list[Any] | None:
        """Every shape that batches come in, as trees of `jax.ShapeDtypeStruct`; None: the one of `Data.batch_spec`."""
        del batch_size
        return None

    def held_out(self, num_rows: int, batch_size: int, sharding: "Sharding") -> list[Any]:
        """The first `num_rows` held-out rows (fewer where there are fewer), always the same, as batches on the devices.

        Rows that only fill the last batch must count nowhere, in no norm of the objective. Default: none.
        """
        del num_rows, batch_size, sharding
        return []

    def norm_stats_json(self) -> dict[str, Any]:
        """What every checkpoint keeps of the norm stats, by asset id. Default: nothing."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(abc.ABC):
    """What a run is trained on, as a value."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """The camera slots of a row, for what a row costs. Default: none."""
        return ()

    def check(self) -> list[str]:
        """What cannot be, as sentences with the flag to change; limits that stand at the fields are checked already."""
        return []

    @abc.abstractmethod
    def batch_spec(self, model: Any, batch_size: int) -> Any:
        """The batch that `model` (a `ModelConfig`) gets, as a tree of `jax.ShapeDtypeStruct`. Opens nothing."""

    @abc.abstractmethod
    def open(self, request: OpeningRequest) -> OpenedData:
        """Open it. Needs no communication: every process calls it, process 0 first, and gets the same.

        Raises FileNotFoundError or ValueError with what to do.
        """
