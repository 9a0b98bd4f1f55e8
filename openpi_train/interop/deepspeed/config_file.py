"""Values of a DeepSpeed config by dotted key, and how each was translated. Read next: `flags.py`."""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from openpi_train.interop.deepspeed.unmapped import UNMAPPED, reason
from openpi_train.runtime.exits import UsageError

Flag = tuple[str, ...]


class ConfigFile:
    """A config during its translation, which reads every key and records its result.

    `flags` are the flags so far, `missing` the reasons, by flag, for values that the file does not determine.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.flags: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.values = dict(_flatten(config))
        self._meaning: dict[str, list[str]] = {}
        self._asked: set[str] = set()

    def has(self, section: str) -> bool:
        """Whether the file has the key `section` or any key below it."""
        return any(key == section or key.startswith(section + ".") for key in self.values)

    def number(self, key: str, default: float | None = None) -> Any:
        """A number; the default if the key is absent or null, None if it is "auto"."""
        return self._get(key, default, (int, float), "a number")

    def count(self, key: str, default: int | None = None) -> int | None:
        """An integer of at least 1, as `number`."""
        value = self.number(key, default)
        if value is not None and (value < 1 or not float(value).is_integer()):
            raise UsageError(f'{key} is {value}; it must be a whole number of at least 1, or "auto"')
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
            raise UsageError(f"{key} is {json.dumps(value)}; it must be a list of two numbers")
        return value

    def _get(self, key: str, default: Any, kind: type | tuple[type, ...], in_words: str) -> Any:
        self._asked.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        if value == "auto":
            self.note(key, "auto: the experiment's own value")
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f'{key} is {json.dumps(value)}; it must be {in_words}, or "auto"')
        return value

    def flag(self, name: str, value: Any, *keys: str) -> None:
        """Record that `keys` give `--name value`; does nothing if the value is None."""
        if value is None:
            return
        self.flags[name] = value
        for key in keys:
            if key in self.values:
                self._meaning.setdefault(key, []).append(" ".join(words(name, value)))

    def becomes(self, key: str, name: str, read: Callable[["ConfigFile", str, Any], Any], default: Any = None) -> None:
        """Record that `key` gives `--name`, with the value that `read`, one of the methods above, returns."""
        self.flag(name, read(self, key, default), key)

    def note(self, key: str, text: str) -> None:
        """Record a text for a key that gives no flag; does nothing if the file does not have it."""
        self._asked.add(key)
        if key in self.values:
            self._meaning.setdefault(key, []).append(text)

    def note_all(self, section: str, text: str) -> None:
        """`note` for all keys of a section that have no record yet."""
        for key in self.values:
            if key.startswith(section + ".") and key not in self._meaning and reason(key) is None:
                self.note(key, text)

    def lines(self) -> tuple[str, ...]:
        """One line per translated key, then one per reason for the others.

        Raises UsageError for keys that DeepSpeed does not have.
        """
        unknown = [key for key in self.values if key not in self._meaning and reason(key) is None]
        if unknown:
            known = sorted({*UNMAPPED, *self._asked})
            raise UsageError("\n".join(_unknown(key, known) for key in unknown))
        entries = {key: f"{key}: {json.dumps(value)}" for key, value in self.values.items()}
        width = max((len(entries[key]) for key in self._meaning), default=0)
        without: dict[str | None, list[str]] = {}
        for key in entries.keys() - self._meaning.keys():
            without.setdefault(reason(key), []).append(entries[key])
        return (
            *(f"{entries[key]:<{width}}  {', '.join(self._meaning[key])}" for key in entries if key in self._meaning),
            *(f"no flag for {', '.join(sorted(keys))}\n    {text}" for text, keys in sorted(without.items(), key=str)),
        )


def words(name: str, value: Any) -> Flag:
    """A flag as command-line arguments."""
    if isinstance(value, bool):
        head, _, last = name.rpartition(".")
        return (f"--{name}",) if value else (f"--{head}.no-{last}" if head else f"--no-{name}",)
    return f"--{name}", str(value)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _unknown(key: str, known: list[str]) -> str:
    section, _, name = key.rpartition(".")
    beside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == section]
    close = [f"{section}.{one}" if section else one for one in difflib.get_close_matches(name, beside, n=1)]
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.9)
    return f"unknown key {key}; " + (f"did you mean {close[0]}?" if close else "DeepSpeed has no such key")
