"""Files of prompts for ppo and grpo: which columns are prompts, and which their references.

Read next: `text_sources.py`.
"""

import contextlib
from collections.abc import Sequence
from typing import Literal

from openpi_train.data.text.text_data import TextDataset
from openpi_train.data.text.text_files import entry_of
from openpi_train.doors.posttraining.text_sources import TextSource
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

# Columns of prompts, and of what completions may be compared with.
PROMPTS = ("prompt", "query", "question")
_REFERENCES = ("completion", "response", "answer", "solution", "ground_truth", "reference", "reward_model.ground_truth")


def prompt_datasets(sources: Sequence[TextSource]) -> tuple[Literal["texts", "prompts"], tuple[TextDataset, ...]]:
    """The datasets, and their kind: `texts` if every file has references, else prompts alone.

    Reads the first record of each file, of which a preference is only the prompt. Raises as `TextSource.dataset`, and
    UsageError for a file without prompts.
    """
    records = [source.first((*PROMPTS, *_REFERENCES)) for source in sources]
    prompts = [_prompt(source.path, record) for source, record in zip(sources, records, strict=True)]
    references = [_reference(record, prompt) for record, prompt in zip(records, prompts, strict=True)]
    has_references = all(name is not None for name in references)
    datasets = []
    for source, prompt, reference in zip(sources, prompts, references, strict=True):
        columns = [f"prompt={prompt}", *([f"completion={reference}"] if has_references else [])]
        datasets.append(source.dataset(tuple(columns)))
    return "texts" if has_references else "prompts", tuple(datasets)


def _prompt(path: str, record: JsonObject) -> str:
    for name in PROMPTS:
        if record.get(name) is not None:
            return name
    raise UsageError(
        f"{path} has no prompts to complete: needed is a column {', '.join(PROMPTS)}; its first record has "
        f"{', '.join(record) or 'none that can be read'}"
    )


def _reference(record: JsonObject, prompt: str) -> str | None:
    """The first column that could be one: a text, or a conversation beside a conversation."""
    for name in _REFERENCES:
        with contextlib.suppress(ValueError):
            found = entry_of(record, name)
            if isinstance(found, str) or (found is not None and isinstance(found, type(record[prompt]))):
                return name
    return None
