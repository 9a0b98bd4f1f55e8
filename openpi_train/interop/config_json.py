"""Restores a config from its JSON (`fields.as_json`).

Classes are looked up by name: first among those that the caller knows, then among this package's subclasses of the
field's type. A stored config never determines where code is loaded from. Read next: `policy/experiment_json.py`.
"""

import dataclasses
import enum
import functools
import importlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.fields import retired
from openpi_train.runtime.exits import CheckpointError

_CLASS, _PACKAGE = "__class__", "openpi_train"
# What environments were called in runs up to commit 50365da, and are now. Robots keep these names.
_OLD_NAMES = {"MetaWorld": "MetaWorldEnv", "Tabletop": "TabletopEnv"}


def classes_of(config: object) -> dict[str, type]:
    """The classes of a config and of everything in it, by name."""
    if isinstance(config, Mapping | list | tuple):
        parts = list(config.values() if isinstance(config, Mapping) else config)
        return {name: cls for part in parts for name, cls in classes_of(part).items()}
    if not dataclasses.is_dataclass(config):
        return {}
    parts = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return {**classes_of(parts), type(config).__name__: type(config)}


def config_from_json(
    value: object, hint: object, where: str, known: Mapping[str, type], left_out: list[str] | None = None
) -> Any:
    """The config that `fields.as_json` stored as `value`, of the type `hint`; `where` names it in messages.

    Its classes are those of `known` by name, and this package's subclasses of `hint`. Raises CheckpointError if a class
    or a field is unknown; with `left_out`, fields that are unknown are left out and noted there, with their values.
    """
    if isinstance(value, Mapping) and _CLASS in value:
        cls = _find(value[_CLASS], hint, known)
        if cls is None:
            raise CheckpointError(
                f"{where} is a {value[_CLASS]}, which openpi_train does not have. If it is your own, give the run's "
                "experiment: --experiment my_runs.py:NAME, or load_policy(..., experiment='my_runs.py:NAME')"
            )
        return _dataclass(value, cls, where, known, left_out)
    if isinstance(value, Mapping):
        items = next((typing.get_args(one)[1] for one in _parts(hint) if len(typing.get_args(one)) == 2), Any)
        return {key: config_from_json(item, items, f"{where}.{key}", known, left_out) for key, item in value.items()}
    if isinstance(value, list):
        hints = next((args for one in _parts(hint) if (args := typing.get_args(one))), (Any, ...))
        each = [hints[0]] * len(value) if hints[-1] is Ellipsis or len(hints) == 1 else hints
        return tuple(
            config_from_json(*pair, f"{where}.{n}", known, left_out)
            for n, pair in enumerate(zip(value, each, strict=True))
        )
    named = [one for one in _parts(hint) if isinstance(one, type) and issubclass(one, enum.Enum)]
    return named[0](value) if named and value is not None else value


def _dataclass(
    value: Mapping[str, object], cls: type, where: str, known: Mapping[str, type], left_out: list[str] | None
) -> Any:
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    unknown = sorted(value.keys() - fields - retired(cls) - {_CLASS})
    if left_out is not None:
        left_out += [f"{where.partition('.')[2]}.{name}".lstrip(".") + f" {value[name]!r}" for name in unknown]
    elif unknown:
        raise CheckpointError(
            f"{where}: {cls.__name__} has no {', '.join(unknown)} here. The run was made by another version of "
            "openpi_train; use that one (its environment.json names the commit)"
        )
    hints = _hints(cls)
    given = {
        name: config_from_json(value[name], hints[name], f"{where}.{name}", known, left_out)
        for name in fields & value.keys()
    }
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


_hints = functools.cache(typing.get_type_hints)


def _parts(hint: object) -> list[Any]:
    """The alternatives of a type hint."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [part for one in typing.get_args(hint) for part in _parts(one)]
    return [hint]


def _find(name: str, hint: object, known: Mapping[str, type]) -> type | None:
    """The class `name`, or its present name, that is allowed for the type `hint`; imports its module if needed."""
    bases = [part for part in _parts(hint) if isinstance(part, type)]
    if name in known and issubclass(known[name], tuple(bases)):
        return known[name]
    if found := _among(bases, name):
        return found
    for base in bases:
        for module in _modules_with(name, base.__module__):
            importlib.import_module(module)
    found = _among(bases, name)
    return _find(_OLD_NAMES[name], hint, known) if found is None and name in _OLD_NAMES else found


def _among(bases: Sequence[type], name: str) -> type | None:
    """The package's class of this name among `bases` and their subclasses."""
    for base in bases:
        if base.__name__ == name and base.__module__.startswith(f"{_PACKAGE}."):
            return base
        if found := _among(base.__subclasses__(), name):
            return found
    return None


def _modules_with(name: str, beside: str) -> list[str]:
    """The modules that define the class in the part of this package in which the module `beside` is, found by their
    text."""
    package = ".".join(beside.split(".")[:2])
    if not package.startswith(f"{_PACKAGE}.") or package == beside:
        return []
    root = Path(importlib.import_module(package).__file__ or "").parent
    is_defined = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    files = sorted(file for file in root.rglob("*.py") if is_defined.search(file.read_text(encoding="utf-8")))
    return [f"{package}.{'.'.join(file.relative_to(root).with_suffix('').parts)}" for file in files]
