"""What configs have in common: a field says its least value, and all have a JSON form. Read next: `experiment.py`.

num_rows: int = at_least(1, 256)
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

_LEAST = "least"


def at_least(least: float, default: Any) -> Any:
    """A dataclass field with a least value. None and strings, where the type has them, are not compared."""
    return dataclasses.field(default=default, metadata={_LEAST: least})


def too_small(config: Any, path: str = "") -> list[str]:
    """A sentence for every number in `config`, and in the configs that it holds, that is below its field's least value.

    `path` is the flag of `config` itself, without dashes; its fields' are behind it.
    """
    return [
        f"--{flag.replace('_', '-')} {value} must be at least {least}"
        for flag, value, least in _limited(config, path)
        if value < least
    ]


def _limited(config: Any, path: str) -> Iterator[tuple[str, Any, float]]:
    """Every number of a field with a least value: its flag, itself, and that value."""
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), f"{path}.{field.name}".lstrip(".")
        if _LEAST in field.metadata and isinstance(value, int | float):
            yield flag, value, field.metadata[_LEAST]
        for number, item in enumerate(value if isinstance(value, tuple) else ()):
            if dataclasses.is_dataclass(item):
                yield from _limited(item, f"{flag}.{number}")
        if dataclasses.is_dataclass(value):
            yield from _limited(value, flag)


def as_json(value: Any) -> Any:
    """A config as plain JSON values, every dataclass with its class name, for `experiment.json`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"__class__": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value
