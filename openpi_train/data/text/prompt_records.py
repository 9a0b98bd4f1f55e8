"""The records of prompts as their files have them, with all columns: what rewards of TRL's form are given.

Read next: `token_store.py`, which says where a prompt stands; `rl/prompt_source.py`, the caller.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openpi_train.data.core.hub import SCHEME
from openpi_train.data.text.encoded_parts import renamed
from openpi_train.data.text.examples import Text, example_of
from openpi_train.data.text.text_data import TextDataset
from openpi_train.data.text.text_files import find_files, parsed
from openpi_train.data.text.token_store import TokenStore
from openpi_train.json_object import JsonObject

# Records whose columns are looked at before a run starts.
_LOOKED_AT = 100


@dataclasses.dataclass(frozen=True)
class PromptRecord:
    """A prompt, a string or messages, and all columns of its record that JSON can hold, by their own names."""

    prompt: Text
    columns: Mapping[str, Any]


def trl_arguments(
    record: PromptRecord, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    """What functions of TRL's form may take of the completions of a prompt (`reward_form.py`), each a list of them."""
    is_talk, count = not isinstance(record.prompt, str), len(completions)
    return {
        **{name: [value] * count for name, value in record.columns.items()},
        "prompts": [record.prompt] * count,
        "completions": [[{"role": "assistant", "content": text}] if is_talk else text for text in completions],
        "completion_ids": [list(ids) for ids in completion_ids],
    }


def with_all_columns(records: Sequence[PromptRecord]) -> list[PromptRecord]:
    """The records, each with the columns of all: what one of JSON lines lacks is null, as in tables."""
    columns = {name: None for one in records for name in one.columns}
    return [PromptRecord(one.prompt, {**columns, **one.columns}) for one in records]


def prompt_records(
    dataset: TextDataset, store: TokenStore, samples: np.ndarray, *, offline: bool = False
) -> list[PromptRecord]:
    """The records of these samples of a dataset, which `store` has encoded. Reads its files once.

    Raises FileNotFoundError, BadRecord or DataError as opening it does, ValueError for a text without a prompt.
    """
    wanted = {store.origin(int(sample)): number for number, sample in enumerate(samples)}
    found: dict[int, PromptRecord] = {}
    for file_number, file in enumerate(find_files(dataset.path, dataset.split, offline=offline)):
        for line, raw in file.records(()):
            if (number := wanted.get((file_number, line))) is not None:
                record = parsed(raw)
                prompt = example_of(renamed(record, dataset.columns_by_type)).prompt
                if prompt is None:
                    raise ValueError(f"{dataset.name}, {file.place(line)}: it has no prompt, which rewards are given")
                found[number] = PromptRecord(prompt, _plain(record))
    return [found[number] for number in range(len(samples))]


def first_columns(dataset: TextDataset) -> frozenset[str] | None:
    """The columns of the first records, of files that are here; None if there are none, or they cannot be read."""
    if dataset.path.startswith(SCHEME):
        return None
    with contextlib.suppress(OSError, ValueError):
        file = find_files(dataset.path, dataset.split)[0]
        if not file.is_array:  # of which all would be read
            records = [parsed(raw) for _, raw in itertools.islice(file.records(()), _LOOKED_AT)]
            return frozenset(name for record in records for name in record)
    return None


def _plain(record: JsonObject) -> dict[str, Any]:
    found = {}
    for name, value in record.items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value)
            found[name] = value
    return found
