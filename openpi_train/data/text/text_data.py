"""Config of text data: datasets with their weights, the tokenizer, and how rows are made of texts.

The dataset types are those of TRL (`examples.py`). Read next: `opened_texts.py`, which opens them.
"""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from openpi_train.data.core.hub import SCHEME
from openpi_train.data.core.interface import Data, OpenedData, OpeningRequest
from openpi_train.data.core.mixture import shares_in_words
from openpi_train.data.text.examples import COLUMNS
from openpi_train.data.text.text_encoder import Targets
from openpi_train.data.text.text_rows import Truncation, row_spec_of
from openpi_train.fields import at_least

# What the rows of a run are: texts to predict; preferences between two completions; completions, each with a label;
# prompts to answer.
RowKind = Literal["texts", "preferences", "unpaired", "prompts"]
# What each is made of, in the columns of a file.
_FILES: Mapping[RowKind, str] = {
    "texts": "with a column messages, prompt and completion, or text",
    "preferences": "with columns prompt, chosen and rejected",
    "unpaired": "with columns prompt, completion and label",
    "prompts": "with a column prompt",
}
# What chat templates write as today's date.
TODAY = "2024-07-26"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDataset:
    """One dataset of the mixture."""

    # A file (JSON lines or parquet), a folder of files, or hub:USER/NAME for a dataset on the Hugging Face hub.
    path: str
    # Share of the batch rows, relative to the other datasets' weights.
    weight: float = 1.0
    # Only files whose path has this word; none: all files. Not looked at if the path is a file.
    split: str | None = "train"
    # What is held out: a split of the folder `path`, or another path (with a slash or an ending). None: a fraction of
    # the split.
    validation: str | None = None
    # The columns to read, as TYPE=COLUMN (`prompt=question completion=answer`); empty: those with the types' names.
    columns: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the path, without its ending."""
        return Path(self.path.rpartition("@")[0] or self.path).name.partition(".")[0] or "texts"

    @property
    def columns_by_type(self) -> dict[str, str]:
        """The dataset's column for each column of its type; empty if `columns` is."""
        return {first: second for first, _, second in (pair.partition("=") for pair in self.columns)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(Data):
    """Texts: the datasets of a run and how rows are made of them."""

    datasets: tuple[TextDataset, ...]
    # A folder with a tokenizer.json, or hub:USER/NAME.
    tokenizer: str
    # What rows are: texts; preferences (prompt, chosen, rejected); labelled completions (prompt, completion, label);
    # prompts without a completion.
    kind: RowKind = "texts"
    # A jinja file; None: the tokenizer's own template. Only conversations need one.
    chat_template: str | None = None
    # Which tokens are targets. auto: the completion's if there is a prompt, else all; assistant: those that the
    # assistant wrote, which the template marks by {% generation %}, or which are found by comparing prefixes.
    targets: Targets = "auto"
    # Longest text in tokens; with packing, the length of rows. A preference has two such texts in its row.
    max_length: int = at_least(2, 1024)
    # What is kept of a longer text.
    truncation: Truncation = "keep_start"
    # What to do with a text all of whose targets are cut off: end the run, or leave it out.
    on_no_targets: Literal["error", "drop"] = "error"
    # Put several texts into one row. The loss is the same, and less of it is padding.
    packing: bool = False
    # Maximum number of lengths of batches without packing, chosen from the texts; each is compiled separately.
    text_lengths: int = at_least(1, 3)
    # Fraction of the texts that is held out, chosen by a hash of each prompt, or of each text without a prompt.
    validation_fraction: float = 0.05
    # Read the completions' log-probabilities under the reference model from the columns ref_chosen_logps and
    # ref_rejected_logps, or reference_logps for labelled completions.
    reference_log_probs: bool = False
    # What to do with a record that cannot be read or encoded: end the run, or leave it out.
    on_bad_record: Literal["error", "skip"] = "error"
    # The date that templates write as today's. It is fixed, so that a text has the same tokens every day.
    today: str = TODAY
    # Folder for the cache of tokens; None: $OPENPI_TRAIN_HOME/index.
    cache_dir: str | None = None
    # Never access the hub (HF_HUB_OFFLINE=1 does the same).
    offline: bool = False

    @property
    def judged(self) -> bool:
        """Whether rows are preferences or labelled completions."""
        return self.kind in ("preferences", "unpaired")

    @property
    def longest_row(self) -> int:
        """The tokens of the longest row that is allowed."""
        return self.max_length * (2 if self.kind == "preferences" else 1)

    @property
    def row_in_words(self) -> str:
        return f"rows of {self.longest_row} tokens"

    @property
    def mixture_in_words(self) -> str:
        return shares_in_words([one.name for one in self.datasets], [one.weight for one in self.datasets])

    def check(self) -> list[str]:
        problems = [problem for number, dataset in enumerate(self.datasets) for problem in _check(number, dataset)]
        if not self.datasets:
            problems.append(f"there is no dataset to train on: give --dataset FILE, {_FILES[self.kind]}")
        if not 0 <= self.validation_fraction < 1:
            problems.append(
                f"--data.validation-fraction {self.validation_fraction} must lie in [0, 1); 0 holds nothing out"
            )
        if self.kind != "texts" and self.packing:
            problems.append(f"--data.packing is for texts: a row of {self.kind} is one sample")
        if self.judged and self.targets not in ("auto", "completion"):
            problems.append(f"--data.targets {self.targets} is for texts: the targets of {self.kind} are completions")
        if self.kind == "prompts" and self.targets != "auto":
            problems.append(f"--data.targets {self.targets} is for texts: prompts have no targets")
        if self.reference_log_probs and not self.judged:
            problems.append("--data.reference-log-probs is for --data.kind preferences or unpaired")
        try:
            datetime.date.fromisoformat(self.today)
        except ValueError:
            problems.append(f"--data.today {self.today} is no date; needed is YYYY-MM-DD")
        return problems

    def check_objective(self, name: str, text_kinds: Sequence[str]) -> list[str]:
        if not text_kinds or self.kind in text_kinds:
            return []
        return [f"objective {name} is trained on --data.kind {' or '.join(text_kinds)}, not on {self.kind}"]

    def examine(self, model: object) -> list[str]:
        from openpi_train.data.text.opened_texts import examine_texts  # which imports this module

        return examine_texts(self, model)

    def on_hub(self) -> dict[str, Literal["model", "dataset"]]:
        given: dict[str, Literal["model", "dataset"]] = {one.path: "dataset" for one in self.datasets}
        given[self.tokenizer] = "model"
        return {text: kind for text, kind in given.items() if text.startswith(SCHEME)}

    def is_ready(self, request: OpeningRequest) -> bool:
        from openpi_train.data.text.opened_texts import is_ready  # which imports this module

        del request
        return is_ready(self)

    def batch_spec(self, model: object, batch_size: int) -> Any:
        del model
        from openpi_train.data.text.text_batches import batch_shapes  # jax: only the main process comes here

        return batch_shapes(
            row_spec_of(self.longest_row, judged=self.judged, references=self.reference_log_probs), batch_size
        )

    def open(self, request: OpeningRequest) -> OpenedData:
        from openpi_train.data.text.opened_texts import open_texts  # which imports this module

        return open_texts(self, request)


def _check(number: int, dataset: TextDataset) -> list[str]:
    flag = f"--data.datasets.{number}"
    problems = []
    if not 0 < dataset.weight < math.inf:
        problems.append(f"{flag}.weight {dataset.weight} must be above 0; leave the dataset out instead")
    for pair in dataset.columns:
        name, _, column = pair.partition("=")
        if name not in COLUMNS or not column:
            problems.append(f"{flag}.columns {pair}: needed is TYPE=COLUMN, with TYPE one of {', '.join(COLUMNS)}")
    return problems
