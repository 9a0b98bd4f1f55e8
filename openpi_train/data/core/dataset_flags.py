"""Flags in messages: `--data.datasets.N` becomes that of the dataset which is meant. Read next: `source.py`."""

import contextlib
from collections.abc import Iterator

from openpi_train.runtime.exits import RunError


def numbered(text: str, number: int) -> str:
    """The text with the flags of the dataset of this number."""
    return text.replace("--data.datasets.N.", f"--data.datasets.{number}.")


@contextlib.contextmanager
def of_dataset(number: int) -> Iterator[None]:
    """In this block, messages of errors name the flags of the dataset of this number."""
    try:
        yield
    except (ValueError, RunError) as error:
        error.args = tuple(numbered(told, number) if isinstance(told, str) else told for told in error.args)
        raise
