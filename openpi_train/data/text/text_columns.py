"""Which columns of a record of no known type are probably which of a type. Read next: `examples.py`, which asks."""

import difflib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from openpi_train.json_object import JsonObject

# Names in public datasets, the likeliest first.
_PROMPTS = ("prompt", "question", "instruction", "query", "problem", "input", "source", "user")
_ANSWERS = ("completion", "answer", "output", "response", "solution", "target", "assistant")
_CHOSEN, _REJECTED = ("chosen", "preferred", "response_chosen"), ("rejected", "dispreferred", "response_rejected")
_TALKS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_TEXTS = ("text", "document", "article", "body", "content")
_TYPES = ("text", "messages", "prompt", "completion", "chosen", "rejected")
FLAG = "--data.datasets.N.columns"
# Of a misspelt name; "context" is no "content".
_NEAR = 0.8
_MISSPELT = 3  # how many of the names are looked for where they are misspelt
# Keys of a message, as chat templates and ShareGPT have them.
_MESSAGES = ({"role", "content"}, {"from", "value"})


def columns_meant(record: JsonObject) -> list[str]:
    """TYPE=COLUMN for each column of a type that the record has under another name, or misspelt; none if unknown."""
    if not record.keys().isdisjoint(_TYPES):
        return []  # a part of a type, which only a whole one can be made of
    strings = [name for name, value in record.items() if isinstance(value, str)]
    talks = [name for name, value in record.items() if _first_message(value) is not None]

    def of(wanted: Sequence[str], among: Sequence[str]) -> str | None:
        lower = {name.lower(): name for name in among}
        known = next((lower[name] for name in wanted if name in lower), None)
        if known is not None:
            return known
        near = [difflib.get_close_matches(name, lower, n=1, cutoff=_NEAR) for name in wanted[:_MISSPELT]]
        return next((lower[names[0]] for names in near if names), None)

    prompt, answer, chosen, rejected = (
        of(names, [*strings, *talks]) for names in (_PROMPTS, _ANSWERS, _CHOSEN, _REJECTED)
    )
    if chosen is not None and rejected is not None:
        return [*([f"prompt={prompt}"] if prompt else []), f"chosen={chosen}", f"rejected={rejected}"]
    if prompt is not None and answer is not None and prompt != answer:
        return [f"prompt={prompt}", f"completion={answer}"]
    talk = of(_TALKS, talks) or (talks[0] if len(talks) == 1 else None)
    if talk is not None:
        return [f"messages={talk}"]
    text = of(_TEXTS, strings) or (strings[0] if len(strings) == 1 == len(record) else None)
    return [] if text is None else [f"text={text}"]


def columns_in_words(record: JsonObject) -> str:
    """What to do with a record of no known type: the flag that names its columns, as it is to be typed."""
    pairs = columns_meant(record)
    if not pairs:
        return f"name the columns: {FLAG} prompt=COLUMN completion=COLUMN, messages=COLUMN or text=COLUMN"
    names = [pair.split("=", 1) for pair in pairs]
    near = [name for name, column in names if name != column and difflib.get_close_matches(name, [column], 1, _NEAR)]
    told = f"did you mean {' and '.join(near)}? Rename it, or name the column" if near else "name the column"
    told += f"{'s' if len(pairs) > 1 else ''}: {FLAG} {shlex.join(pairs)}"
    used = [column for _, column in names]
    if names[0][0] == "messages" and not any(keys <= _first_message(record[used[0]], {}).keys() for keys in _MESSAGES):
        told += ". Its messages need role (user, assistant) and content: rename these keys in the file"
    if beside := next((name for name in record if name.lower() == "input" and name not in used), None):
        told += f". This leaves out {beside}: where that is part of the question, join both first"  # Alpaca's
    return told


def _first_message(value: object, default: JsonObject | None = None) -> Any:
    """The first entry of a list of objects, else the default."""
    first = value[0] if isinstance(value, list) and value else None
    return first if isinstance(first, Mapping) else default
