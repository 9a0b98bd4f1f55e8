"""The entries of a file that is one JSON array, which some datasets have in place of JSON lines."""

import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")


def entries_of_array(text: str) -> Iterator[Any]:
    """The entries of the array that the text is, one after the other.

    Raises json.JSONDecodeError, with line and column, if it is not one, RecursionError if it is nested too deeply.
    """
    decoder = json.JSONDecoder()
    at = _after_space(text, 0)
    if text[at : at + 1] != "[":
        raise json.JSONDecodeError("Expecting '['", text, at)
    at = _after_space(text, at + 1)
    while text[at : at + 1] != "]":
        entry, at = decoder.raw_decode(text, at)
        yield entry
        at = _after_space(text, at)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
            if text[at : at + 1] == "]":
                raise json.JSONDecodeError("Expecting an entry after ','", text, at)
        elif text[at : at + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    end = _after_space(text, at + 1)
    if end < len(text):
        raise json.JSONDecodeError("Extra data after the array", text, end)


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
