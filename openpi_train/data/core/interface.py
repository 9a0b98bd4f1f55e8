"""Interfaces that every kind of training data implements. Robot demonstrations are one kind (`robot/config.py`,
`robot/opened.py`).

    Data          the config: a field of the experiment
    OpenedData    the opened data: feeds of batches, and the shapes that they come in
    Feed          the batches of a run, in order; they may depend on the current parameters
    RowSource     rows by position, for the feed that reads ahead (`feed.py`)

A batch is any tree of arrays with rows on the first axis and an entry `row`, each row's number in the global batch:
seed, step and row determine all randomness. Data workers import this module, so it imports no jax or dataset library.
"""

import abc
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from openpi_train.json_object import JsonObject

if TYPE_CHECKING:
    from jax.sharding import Sharding

# Shape and dtype of every entry of a row.
RowSpec = Mapping[str, tuple[tuple[int, ...], str]]


class RowSource(abc.ABC):
    """The rows at every position of an endless pass. Workers get a pickled copy.

    Attributes: `spec`, shape and dtype of each entry; `num_samples`, the number of distinct rows; `identity`, what the
    rows depend on, as JSON: a run can only be continued with an equal one.
    """

    spec: RowSpec
    num_samples: int
    identity: Mapping[str, Any]

    @abc.abstractmethod
    def batch(self, positions: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
        """The stacked rows at `positions` [n] by name, and a message for each bad record whose row was replaced.

        Raises BadRecord or ValueError, saying what to do, if a row cannot be read.
        """

    def cut(self, columns: Mapping[str, np.ndarray], positions: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of the batch at `positions`, as made by `batch`, without the padding that no row of that batch needs."""
        del positions
        return dict(columns)

    def describe(self, positions: np.ndarray) -> list[str]:
        """A readable description of the sample at each position."""
        return [f"row {position}" for position in positions.tolist()]

    def proportions(self, num_positions: int) -> dict[str, float]:
        """Each dataset's actual share of the first `num_positions` rows; empty if there is only one dataset."""
        del num_positions
        return {}

    @property
    def sources(self) -> Mapping[str, str]:
        """A digest of each file that the rows are made of, by its name; empty if not known.

        Rows do not depend on it: messages name by it the files that changed since a run was saved.
        """
        return {}

    @property
    def fingerprint(self) -> str:
        """A digest of `identity`: equal rows at equal positions have equal fingerprints."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()


class Feed(abc.ABC):
    """The batches of a run, as global arrays on the devices. Call it from the main thread; `close` when done.

    Counters: `wait_s`, the time `next` has waited for data; `acting_s`, that in which it has made attempts and scored
    them; `bad_records`, the rows of this process that were replaced. `reads_ahead` is set to False for a run that looks
    for the batch that ends it: then a batch that does not depend on parameters is made when `next` asks for it.
    """

    wait_s: float = 0.0
    acting_s: float = 0.0
    bad_records: int = 0
    reads_ahead: bool = True

    @abc.abstractmethod
    def next(self, state: Any = None) -> Any:
        """The batch of the next step, for the training state that the step begins with.

        All processes must call it the same number of times. It may compute with `state.params`, and may take long (in
        its own `phase`, for the watchdog). It must not keep `state`: the step donates its buffers.

        Raises DataError if there is no batch; StoppedError (`runtime/preempt.py`), in all processes, if they agreed to
        stop before there was one: `position` is then as it was.
        """

    @abc.abstractmethod
    def position(self) -> dict[str, Any]:
        """The feed's position, as JSON: after `seek` to it, the same batches follow."""

    @abc.abstractmethod
    def seek(self, position: JsonObject) -> None:
        """Go to a `position`. Raises ValueError naming the differences if the position belongs to other data."""

    @property
    def can_be_saved(self) -> bool:
        """Whether `position` is the feed's whole state: not so while its batches depend on older parameters.

        A save that is due meanwhile is made at the next step at which this is True.
        """
        return True

    def start(self) -> None:  # noqa: B027, a feed may do nothing here
        """Start to load the next batch in the background, if it does not depend on parameters."""

    def tune(self, *, step_s: float, wait_s: float) -> None:  # noqa: B027
        """Adapt to the time that the steps since the last call took, and the part of it spent waiting for data."""

    def rows(self, step: int) -> list[str]:
        """A readable description of each row's sample in the batch at `step`; empty if not known."""
        del step
        return []

    def proportions(self) -> dict[str, float]:
        """Each dataset's share of the rows so far; empty if there is only one dataset."""
        return {}

    def metrics(self) -> Mapping[str, float]:
        """What else to log at this step, by the names in `metrics.jsonl`. It must depend on `position` and the steps
        since alone, but for times. Default: nothing.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """Release threads, processes and files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpeningRequest:
    """Arguments for opening the data of a run, in addition to the data's own config.

    `model` is the run's `ModelConfig`, `draws_per_row` and `uses_margins` the objective's; files that belong to the
    data (norm stats) are below `assets_dir`. `prompts` are instructions that the run uses in addition to the data's,
    each with the number of state dims of its robot.
    """

    model: Any
    seed: int
    batch_size: int
    draws_per_row: int = 1
    uses_margins: bool = True
    assets_dir: Path = Path()
    prompts: Sequence[tuple[str, int]] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedData(abc.ABC):
    """A run's opened data. Every process opens its own, with equal content."""

    # Distinct training samples: those of an epoch.
    num_samples: int
    # The text tokens of the longest rows, padding included; every checkpoint keeps it. None: the model's own limit.
    text_length: int | None = None
    # `tokens_fingerprint` of the run's tokenizer; None if there is none.
    tokenizer: str | None = None
    # Its files, by path in a checkpoint's directory.
    token_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @abc.abstractmethod
    def feed(
        self, *, batch_size: int, sharding: "Sharding", num_workers: int | Literal["auto"], cores: int | None
    ) -> Feed:
        """The training batches, distributed over the devices by `sharding`; this process may use `cores` CPU cores."""

    @property
    def row_shapes(self) -> dict[str, list[int]]:
        """The shape of every entry of a row, as JSON; all processes must find the same."""
        return {}

    def batch_specs(self, batch_size: int) -> list[Any] | None:
        """All shapes that batches can have, as trees of `jax.ShapeDtypeStruct`; None: only `Data.batch_spec`."""
        del batch_size
        return None

    def held_out(self, num_rows: int, batch_size: int, sharding: "Sharding") -> list[Any]:
        """The first `num_rows` held-out rows, or all if there are fewer, as batches on the devices; always the same.

        Rows that only fill up the last batch must be masked: no norm of the objective may count them. Default: none.
        """
        del num_rows, batch_size, sharding
        return []

    def norm_stats_json(self) -> dict[str, Any]:
        """The norm stats to save in every checkpoint, by asset id. Default: none."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(abc.ABC):
    """Config of the data that a run is trained on."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """The camera slots of a row, used to estimate the cost of a row. Default: none."""
        return ()

    @property
    def row_in_words(self) -> str:
        """What makes a row large, for the head of a plan."""
        return f"{len(self.cameras)} camera(s)"

    @property
    def mixture_in_words(self) -> str:
        """Each dataset's share of the rows, for the head of a plan; empty if there is only one (default)."""
        return ""

    def check(self) -> list[str]:
        """Invalid settings, as sentences that name the flag to change; limits of single fields are already checked."""
        return []

    def check_objective(self, name: str, text_kinds: Sequence[str]) -> list[str]:
        """Why the objective of this name cannot be trained on these data, as sentences (default: none).

        `text_kinds` are `Objective.text_kinds`.
        """
        del name, text_kinds
        return []

    def examine(self, model: Any) -> list[str]:
        """Raise what `open` would, as far as it is found within seconds and without writing; say what is not.

        Default: nothing is looked at.
        """
        del model
        return ["the data were not looked at; a start opens them"]

    def on_hub(self) -> dict[str, Literal["model", "dataset"]]:
        """The addresses on the Hugging Face hub that `open` reads, and what each is (default: none).

        A tokenizer counts, also where the model reads no text.
        """
        return {}

    def is_ready(self, request: OpeningRequest) -> bool:
        """Whether `open` would write nothing and read nothing at length. May raise what `open` does. Default: no."""
        del request
        return False

    @abc.abstractmethod
    def batch_spec(self, model: Any, batch_size: int) -> Any:
        """The batch that `model` (a `ModelConfig`) takes, as a tree of `jax.ShapeDtypeStruct`. Opens no files."""

    @abc.abstractmethod
    def open(self, request: OpeningRequest) -> OpenedData:
        """Open the data. Needs no communication: every process calls it, process 0 first, and gets the same.

        Raises FileNotFoundError or ValueError that says what to do.
        """
