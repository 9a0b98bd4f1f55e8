"""The first records of files of texts, which are looked at before a run starts. Read next: `opened_texts.py`."""

import contextlib
import itertools
from collections.abc import Iterable, Mapping

from openpi_train.data.core.dataset_flags import of_dataset
from openpi_train.data.core.source import BadRecord
from openpi_train.data.text.encoded_parts import bad_record, renamed
from openpi_train.data.text.examples import COLUMNS, example_of
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.data.text.text_files import TextFile, find_files, parsed
from openpi_train.data.text.token_cache import require_kind

# The kinds of records (`examples.Kind`) that a run takes, by `TextData.kind`.
KINDS = {
    "texts": ("language modelling", "prompt/completion"),
    "preferences": ("preference",),
    "unpaired": ("unpaired preference",),
    "prompts": ("prompt only",),
}
# Records after a bad one in which a good one is looked for.
_LOOKED_AT = 100


def first_kind(dataset: TextDataset) -> str:
    """The kind of the first record of the run's first dataset (`examples.Kind`).

    Raises FileNotFoundError if there is no file, ValueError if the record is none.
    """
    with of_dataset(0):
        for file in find_files(dataset.path, dataset.split):
            if (kind := _kind_in(dataset, file)) is not None:
                return kind
    raise ValueError(f"no text in {dataset.path}: it is empty")


def require_first(config: TextData, dataset: TextDataset, file: TextFile) -> None:
    """Raise ValueError if the run does not take the first record of a file. Of an array all must be read: none is."""
    if file.is_array:
        return
    try:
        kind = _kind_in(dataset, file)
    except BadRecord:
        if config.on_bad_record == "skip":
            return
        raise
    if kind is not None:
        require_kind(dataset.name, kind, KINDS[config.kind])


def _kind_in(dataset: TextDataset, file: TextFile) -> str | None:
    """The kind of the first record of a file; None if the file has none. Raises BadRecord."""
    columns = dataset.columns_by_type
    records = file.records(tuple(columns.values()) or COLUMNS)
    for number, raw in records:
        try:
            return example_of(renamed(parsed(raw), columns)).type.kind
        except ValueError as error:
            raise bad_record(dataset.name, file.place(number), error, has_good=_has_good(records, columns)) from error
    return None


def _has_good(records: Iterable[tuple[int, object]], columns: Mapping[str, str]) -> bool:
    """Whether one of the first records can be read."""
    for _, raw in itertools.islice(records, _LOOKED_AT):
        with contextlib.suppress(ValueError):
            example_of(renamed(parsed(raw), columns))
            return True
    return False
