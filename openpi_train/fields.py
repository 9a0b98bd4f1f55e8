"""Metadata of config fields: least value and rule on resume; and the JSON form of configs.

    num_rows: int = at_least(1, 256)
    log_interval: int = at_least(1, 100, on_resume="accept")

Read next: `experiment.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

# What a resume does if the field's value differs from the saved run's:
#   refuse         the network or the optimizer state would differ: the resume fails
#   warn           the run continues, and from then on differs from an uninterrupted one
#   accept         the run continues, and its result does not change
#   refuse_class   refuse another class of config, and warn of any other change
#   refuse_switch  refuse a change from None to a value or back, and warn of any other change
# A rule also applies to nested fields, unless they have their own.
OnResume = Literal["refuse", "refuse_class", "refuse_switch", "warn", "accept"]
Verdict = Literal["refuse", "warn", "accept", "retired"]
_LEAST, _ON_RESUME = "least", "on_resume"


def setting(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    least: float | None = None,
    on_resume: OnResume | None = None,
) -> Any:
    """A dataclass field with a least value and a rule on resume.

    None and strings, if the type allows them, are not compared with `least`. Without `on_resume`, a nested field has
    the rule of the field that holds its config, and a field of `Experiment` has `warn`.
    """
    known = {name: value for name, value in ((_LEAST, least), (_ON_RESUME, on_resume)) if value is not None}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=known)


def at_least(least: float, default: object, on_resume: OnResume | None = None) -> Any:
    """A `setting` with a least value."""
    return setting(default, least=least, on_resume=on_resume)


def resume_verdict(config: object, path: str, saved: object, given: object) -> Verdict:
    """The rule for resuming with `given` instead of `saved` (JSON values) in the field of this path.

    `retired` is a field that the saved run's version had and this one has not (`RETIRED`): nothing depends on it. So is
    a switch that is off or a number that is 0, as by default, or a tuple or a choice of its default, which the saved
    run's version had not.
    """
    rule: OnResume = "warn"
    default: Any = None
    kind: Any = None
    names = path.split(".")
    for name in names[:-1] if names[-1] == "__class__" else names:
        if dataclasses.is_dataclass(config):
            fields = {field.name: field for field in dataclasses.fields(config)}
            if name in retired(type(config)):
                return "retired"
            rule = fields[name].metadata.get(_ON_RESUME, rule) if name in fields else rule
            default, kind = (fields[name].default, fields[name].type) if name in fields else (None, None)
            config = getattr(config, name, None)
        elif isinstance(config, Sequence) and name.isdecimal() and int(name) < len(config):
            config = config[int(name)]
        else:
            config = None
    # A choice, a switch or a number without None is never saved as None: there was no such field.
    is_choice = get_origin(kind) is Literal and None not in get_args(kind)
    is_off = default is False or (kind in (int, float) and not default)
    is_new = saved is None and (is_off or is_choice or (isinstance(default, tuple) and bool(default)))
    if is_new and given == as_json(default):
        return "retired"
    if rule == "refuse_class":
        return "refuse" if names[-1] == "__class__" else "warn"
    if rule == "refuse_switch":
        return "refuse" if (saved is None) != (given is None) else "warn"
    return rule


def retired(config: type) -> frozenset[str]:
    """The fields that older versions of this config class had, as its `RETIRED` says: what they held is ignored."""
    return getattr(config, "RETIRED", frozenset())


def too_small(config: object, path: str = "") -> list[str]:
    """One sentence for every number in `config` and its nested configs that is below its field's least value.

    `path` is the flag of `config` itself, without dashes; it is the prefix of its fields' flags.
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


def as_json(value: object) -> Any:
    """A config as plain JSON values, every dataclass with its class name, for `experiment.json`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"__class__": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def changed_fields(saved: object, given: object, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Every field that differs between two nested JSON values, by dotted path, as (saved, given)."""
    if isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        saved, given = (dict(zip(map(str, range(len(one))), one, strict=True)) for one in (saved, given))
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        changes: dict[str, tuple[Any, Any]] = {}
        for name in [*saved, *(name for name in given if name not in saved)]:
            changes |= changed_fields(saved.get(name), given.get(name), f"{prefix}{name}.")
        return changes
    return {} if saved == given else {prefix.removesuffix("."): (saved, given)}
