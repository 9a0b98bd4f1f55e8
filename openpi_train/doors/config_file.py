"""Values of another tool's config by dotted key, and the flag that each becomes, or the reason why there is none.

Read next: `deepspeed/flags.py`, `posttraining/training_flags.py`.
"""

import dataclasses
import difflib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from openpi_train.json_object import JsonObject
from openpi_train.runtime import other_tools
from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)

Flag = tuple[str, ...]
# A bound that no norm reaches.
NO_CLIPPING = 1e9
# Steps of a trace by the profiler, where a key asks for one.
PROFILED_STEPS = 10
# Values of a key that ask for nothing.
_NOTHING = (None, False, 0, "", "none", "auto")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translated:
    """A translated file: flags of an experiment, a line per key, and what it asks that is not done, and what to give
    instead.
    """

    flags: tuple[Flag, ...]
    lines: tuple[str, ...]
    not_done: Mapping[str, str]

    def tell(self, path: str, keys: Mapping[str, str]) -> None:
        """Log the report, and remember for the start's warning what is not done, and for errors the `keys` by flag."""
        logger.info("%s, key by key:\n%s", path, self.report())
        other_tools.note_not_done(self.not_done)
        other_tools.note_keys(path, keys)

    def report(self) -> str:
        """A report of every key and its result."""
        return "\n".join([*self.lines, f"together: {' '.join(word for flag in self.flags for word in flag)}"])


class ConfigFile:
    """A config during its translation, which reads every key and records its result.

    `flags` are the flags so far, `missing` the reasons, by flag, for values that the file does not determine.

    Args:
        unmapped: why keys have no flag, by key; a key includes all keys below it.
        owner: the tool, for messages.
        open_word: a value that stands for the experiment's own; None: there is none.
    """

    def __init__(self, config: JsonObject, unmapped: Mapping[str, str], owner: str, open_word: str | None):
        self._unmapped, self._owner, self._open_word = unmapped, owner, open_word
        self._or_open = f', or "{open_word}"' if open_word else ""
        self.flags: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.values = dict(flatten(config))
        # The keys that gave each flag.
        self.origin: dict[str, tuple[str, ...]] = {}
        self._meaning: dict[str, list[str]] = {}
        self._asked: set[str] = set()

    def has(self, section: str) -> bool:
        """Whether the file has the key `section` or any key below it."""
        return any(key == section or key.startswith(section + ".") for key in self.values)

    def shown(self, key: str) -> str:
        """The key as messages and reports name it."""
        return key

    def number(self, key: str, default: float | None = None) -> Any:
        """A number; the default if the key is absent or null, None if it is the open word."""
        return self._get(key, default, (int, float), "a number")

    def count(self, key: str, default: int | None = None) -> int | None:
        """An integer of at least 1, as `number`."""
        value = self.number(key, default)
        if value is not None and (value < 1 or not float(value).is_integer()):
            raise UsageError(f"{self.shown(key)} is {value}; it must be a whole number of at least 1{self._or_open}")
        return None if value is None else int(value)

    def whole(self, key: str, default: int | None = None) -> int | None:
        """An integer of at least 0; the default if the key is absent."""
        value = self.number(key, default)
        if value is not None and (value < 0 or not float(value).is_integer()):
            raise UsageError(f"{self.shown(key)} is {value}; it must be a whole number of at least 0")
        return None if value is None else int(value)

    def boolean(self, key: str, default: bool | None = None) -> Any:
        """A boolean, as `number`."""
        return self._get(key, default, bool, "true or false")

    def text(self, key: str, default: str | None = None) -> Any:
        """A string, as `number`."""
        return self._get(key, default, str, "a word")

    def pair(self, key: str, default: tuple[float, float]) -> Any:
        """Two numbers, as `number`."""
        value = self._get(key, default, (list, tuple), "a list of two numbers")
        if value is not None and (len(value) != 2 or not all(isinstance(one, int | float) for one in value)):
            raise UsageError(f"{self.shown(key)} is {json.dumps(value)}; it must be a list of two numbers")
        return value

    def bound(self, key: str, default: float | None = None) -> float | None:
        """A bound of the gradients' norm, where 0 is none."""
        value = self.number(key, default)
        return NO_CLIPPING if value == 0 else value

    def recomputes(self, key: str) -> str | None:
        """Whether layers are computed again in the backward pass, as a value of `--model.remat`."""
        value = self.boolean(key)
        return None if value is None else "full" if value else "none"

    def _get(self, key: str, default: object, kind: type | tuple[type, ...], in_words: str) -> Any:
        self._asked.add(key)
        value = self.values.get(key)
        if value is None:
            self.note(f"null: {self._owner}'s default", key)
            return default
        if value == self._open_word:
            self.note(f"{value}: the experiment's own value", key)
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{self.shown(key)} is {json.dumps(value)}; it must be {in_words}{self._or_open}")
        return value

    def flag(self, name: str, value: object, *keys: str) -> None:
        """Record that `keys` give `--name value`; does nothing if the value is None."""
        if value is None:
            return
        self.flags[name] = value
        self.origin[name] = tuple(key for key in keys if key in self.values)
        for key in self.origin[name]:
            self._meaning.setdefault(key, []).append(" ".join(words(name, value)))

    def left_out(self, name: str, why: str) -> None:
        """Take back the flag `name`: the keys that gave it have the reason `why` instead."""
        flag = " ".join(words(name, self.flags.pop(name)))
        for key, meaning in self._meaning.items():
            self._meaning[key] = [why if one == flag else one for one in meaning]

    def becomes(
        self, key: str, name: str, read: Callable[["ConfigFile", str, Any], object], default: object = None
    ) -> None:
        """Record that `key` gives `--name`, with the value that `read`, one of the methods above, returns."""
        self.flag(name, read(self, key, default), key)

    def agreed(self, read: Callable[..., object], *keys: str, **how: object) -> Any:
        """The value of a thing with several spellings; None if it has none. Raises UsageError if two differ.

        Args: `read` is one of the methods that read a key, `how` its further arguments.
        """
        found = {key: value for key in keys if (value := read(self, key, **how)) is not None}
        for key, value in list(found.items())[1:]:
            first = next(iter(found))
            if value != found[first]:
                one, other = (f"{self.shown(name)} is {as_json(found[name])}" for name in (first, key))
                raise contradiction(f"{one} and {other}")
        return next(iter(found.values()), None)

    def spelled(self, name: str, read: Callable[..., object], *keys: str, **how: object) -> Any:
        """Record that any of `keys` gives `--name`; returns its value. Raises as `agreed`."""
        value = self.agreed(read, *keys, **how)
        self.flag(name, value, *keys)
        return value

    def plain(self, rows: Mapping[str, str]) -> None:
        """Record flags that are one value each, by name: a word for how it is read, and all spellings of its key.

        `{"seed": "whole seed", "batch-size": "count batch_size rows"}`. Raises as `agreed`.
        """
        for name, row in rows.items():
            kind, *keys = row.split()
            self.spelled(name, READERS[kind], *keys)

    def note(self, text: str, *keys: str) -> None:
        """Record a text for each of these keys that the file has, which then needs no flag."""
        self._asked.update(keys)
        for key in self.values.keys() & keys:
            self._meaning.setdefault(key, []).append(text)

    def only(self, key: str, value: object, why: str, note: str = "") -> None:
        """Note a key that can have this value alone, and `why`, or another text. Raises UsageError for other values."""
        given = self.values.get(key, value)
        if given != value:
            raise UsageError(f"{self.shown(key)} is {as_json(given)}; allowed: {as_json(value)} ({why})")
        self.note(note or why, key)

    def expect(self, *keys: str) -> None:
        """Name keys that the file may have, for the advice on unknown ones."""
        self._asked.update(keys)

    def note_all(self, section: str, text: str) -> None:
        """`note` for all keys of a section that have no record yet."""
        for key in self.values:
            if key.startswith(section + ".") and not self.is_known(key):
                self.note(text, key)

    def not_done(self, instead: Mapping[str, str]) -> Mapping[str, str]:
        """What the file asks that is not done, as it is written there, and what to give instead.

        Args: `instead` has that by key, or by KEY=VALUE if only that value is not done.
        """
        found = {}
        for key, value in self.values.items():
            text = instead.get(key) or instead.get(f"{key}={value}")
            if text is not None and value not in _NOTHING and key not in self._meaning:
                found[f"{self.shown(key)}: {as_json(value)}"] = text
        return found

    @property
    def words(self) -> tuple[Flag, ...]:
        """The flags so far, as arguments."""
        return tuple(words(name, value) for name, value in self.flags.items())

    def is_known(self, key: str) -> bool:
        """Whether there is a record for the key so far, or a reason why it has no flag."""
        return key in self._meaning or self._reason(key) is not None

    def lines(self) -> tuple[str, ...]:
        """One line per translated key, then one per reason for the others.

        Raises UsageError for keys that the tool does not have.
        """
        unknown = [key for key in self.values if not self.is_known(key)]
        if unknown:
            known = sorted({*self._unmapped, *self._asked})
            raise UsageError("\n".join(self._unknown(key, known) for key in unknown))
        entries = {
            key: f"{self.shown(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in self.values.items()
        }
        width = max((len(entries[key]) for key in self._meaning), default=0)
        without: dict[str | None, list[str]] = {}
        for key in entries.keys() - self._meaning.keys():
            without.setdefault(self._reason(key), []).append(entries[key])
        return (
            *(f"{entries[key]:<{width}}  {', '.join(self._meaning[key])}" for key in entries if key in self._meaning),
            *(f"no flag for {', '.join(sorted(keys))}\n    {text}" for text, keys in sorted(without.items(), key=str)),
        )

    def _reason(self, key: str) -> str | None:
        """Why `key` has no flag; None if neither it nor a key above it is in the table."""
        parts = key.split(".")
        above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((self._unmapped[name] for name in above if name in self._unmapped), None)

    def _unknown(self, key: str, known: list[str]) -> str:
        section, _, name = key.rpartition(".")
        beside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == section]
        close = [f"{section}.{one}" if section else one for one in difflib.get_close_matches(name, beside, n=1)]
        close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.9)
        whole = self.shown(key)
        hint = f"did you mean {whole.removesuffix(key)}{close[0]}?" if close else f"{self._owner} has no such key"
        return f"unknown key {whole}; {hint}"


READERS: Mapping[str, Callable[..., Any]] = {
    "boolean": ConfigFile.boolean,
    "bound": ConfigFile.bound,
    "count": ConfigFile.count,
    "number": ConfigFile.number,
    "recomputes": ConfigFile.recomputes,
    "text": ConfigFile.text,
    "whole": ConfigFile.whole,
}


def contradiction(text: str, remedy: str = "keep one of them, or make them equal") -> UsageError:
    """The error for two values of which only one can be meant, with what to do."""
    return UsageError(f"{text}: they contradict each other; {remedy}")


def as_json(value: object) -> str:
    """A value as messages show it."""
    return json.dumps(value, ensure_ascii=False)


def words(name: str, value: object) -> Flag:
    """A flag as command-line arguments; the entries of a tuple are a word each."""
    if isinstance(value, bool):
        head, _, last = name.rpartition(".")
        return (f"--{name}",) if value else (f"--{head}.no-{last}" if head else f"--no-{name}",)
    return (f"--{name}", *map(str, value)) if isinstance(value, tuple) else (f"--{name}", str(value))


def keys_by_flag(plain: Mapping[str, str]) -> Mapping[str, str]:
    """The first key of each row of `ConfigFile.plain`, by flag."""
    return {f"--{name}": row.split()[1] for name, row in plain.items()}


def not_replaced(flags: Sequence[Flag], given: Sequence[str], replaced: Mapping[str, Sequence[str]]) -> list[Flag]:
    """The flags of a config without those that the words of a command line replace.

    Args: `replaced` are flags by the one in whose place they stand, besides that of the same name.
    """
    names = {word.partition("=")[0].replace("_", "-") for word in given}
    left_out = {flag for name in names for flag in replaced.get(name, ())}
    return [flag for flag in flags if flag[0] not in left_out]


def flatten(config: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested mappings by dotted key."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
