"""Command-line options as fields of a dataclass, for argparse. Read next: `launchers.py`.

    processes: int = option("number of processes")

A nested dataclass adds its own options; those that several forms share are at the end.
"""

import argparse
import dataclasses
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar

from openpi_train import faults

Options = TypeVar("Options")


class LaunchParser(argparse.ArgumentParser):
    """Takes no abbreviations, and tells an error in a line or two instead of below all options."""

    def __init__(self, **settings: object):
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        self.exit(faults.USAGE, f"{self.prog}: {message}\n`{self.prog} --help` explains the options\n")


def option(help: str | None = None, default: object = dataclasses.MISSING, **settings: object) -> Any:
    """A field that is an option of the same name; without a default it must be given.

    Args:
        settings: further arguments of `add_argument`. Two are our own: `flags`, other names of the option, and
            `one_of`, the name of a group of options of which exactly one must be given.
    """
    return dataclasses.field(default=default, metadata={"help": help, **settings})


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the options of a dataclass to a parser."""
    alternatives: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            add_options(parser, typing.cast(type, field.type))
        elif field.metadata:
            settings = {**_settings(field), **field.metadata}
            flags = settings.pop("flags", (f"--{field.name.replace('_', '-')}",))
            word = settings.pop("one_of", None)
            if word and word not in alternatives:
                alternatives[word] = parser.add_mutually_exclusive_group(required=True)
            alternatives.get(word, parser).add_argument(*flags, dest=field.name, **settings)


def _settings(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The argparse settings that follow from the type and the default of a field."""
    needed = {"required": True} if field.default is dataclasses.MISSING else {"default": field.default}
    if field.type is bool:
        return {"action": "store_true", **needed}
    if typing.get_origin(field.type) is tuple:
        return {"action": "append", "default": argparse.SUPPRESS}
    (kind,) = {*(typing.get_args(field.type) or (field.type,))} - {NoneType}
    return {"type": kind, **needed}


def read_options(kind: type[Options], given: Mapping[str, object], **others: object) -> Options:
    """The dataclass with the options that argparse has read, and `others` for fields that are not options."""
    values = dict(others)
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if dataclasses.is_dataclass(field.type):
            values[field.name] = read_options(typing.cast(type, field.type), given)
        elif field.name in given and field.metadata:
            value = given[field.name]
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least `least`."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return count


def seconds(text: str) -> float:
    """Reads a number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch(ABC):
    """Command-line options of a launch.

    Each launcher is one subclass: its fields are its options, and the first line of its docstring is its help.
    """

    arguments: tuple[str, ...]
    """The arguments after `python -m openpi_train` in every process."""

    @abstractmethod
    def launch(self) -> int:
        """Start the run, and return the exit code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerNode:
    """How many processes each of several hosts has."""

    gpus_per_node: int | None = option(
        "GPUs per host, with one process each", None, type=at_least(1), one_of="processes per host"
    )
    processes_per_node: int | None = option(
        "processes per host; they share its GPUs equally", None, type=at_least(1), one_of="processes per host"
    )

    @property
    def processes(self) -> int:
        """Of each host."""
        count = self.gpus_per_node or self.processes_per_node
        assert count is not None, "argparse demands one of the two"
        return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here:
    """Options of launchers that start processes from this machine."""

    devices_per_process: int | None = option(
        "CPU devices to create in each process; no GPU is used", None, type=at_least(1)
    )
    dry_run: bool = option("print the processes' command lines, start nothing", False)
    log_dir: Path | None = option("folder for the processes' output (default: a temporary one)", None)
    grace_s: float = option("seconds to exit after another process failed (%(default)s s)", 15.0, type=seconds)
