"""The entries of a file that is one JSON array, which some datasets have in place of JSON lines."""

import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")


def entries_of_array(text: str) -> Iterator[Any]:
    """The entries of the array that the text is, one after the other.

    An entry with an integer of more digits than Python reads is given as its source, bytes.

    Raises json.JSONDecodeError, with line and column, if it is not one, RecursionError if it is nested too deeply.
    """
    decoder = json.JSONDecoder()
    at = _after_space(text, 0)
    if text[at : at + 1] != "[":
        raise json.JSONDecodeError("Expecting '['", text, at)
    at = _after_space(text, at + 1)
    while text[at : at + 1] != "]":
        entry, at = _decoded(decoder, text, at)
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


def _decoded(decoder: json.JSONDecoder, text: str, start: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except ValueError:
        _, end = json.JSONDecoder(parse_int=len).raw_decode(text, start)
        return text[start:end].encode(), end


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
