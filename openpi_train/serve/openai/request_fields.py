"""The fields of a request by type and range; a field that is not read is refused. Read next: `text_request.py`."""

import json
from typing import Any

from openpi_train.json_object import JsonObject
from openpi_train.serve.openai.api_error import ApiError, invalid

_SHOWN = 60


class RequestFields:
    """Reads the fields of an object. `null` stands for a field that is not given, as in OpenAI's API.

    Args: `path` names the object in errors, such as `messages[0]`.
    """

    def __init__(self, given: JsonObject, path: str = ""):
        self._given, self._path = given, path
        self._read: set[str] = set()

    def place(self, name: str) -> str:
        """The field's name in errors."""
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> Any:
        """The value, of any type; None if it is not given."""
        self._read.add(name)
        return self._given.get(name)

    def text(self, name: str) -> str | None:
        """A text without halves of surrogate pairs, which JSON can write and no character is."""
        return None if (value := self.get(name)) is None else checked_text(value, self.place(name))

    def flag(self, name: str) -> bool:
        """A boolean; False if it is not given."""
        value = self.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, least: int, most: int) -> int | None:
        """An integer in this range."""
        value = self.get(name)
        if value is None:
            return None
        if not is_integer(value) or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, *, above: bool = False) -> float | None:
        """A number in this range; `above`: greater than `least`."""
        value = self.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (above and value == least):  # NaN is in no range
            least_of = f"above {least:g} and at most" if above else f"from {least:g} to"
            raise self.wrong(name, f"a number {least_of} {most:g}")
        return float(value)

    def only(self, name: str, *allowed: object, why: str = "") -> None:
        """Refuse any value but these, where others would change the answer in a way that is not supported."""
        value = self.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            place = self.place(name)
            shown = [repr_of(one) for number, one in enumerate(allowed) if one not in allowed[:number]]
            known = f"; it may be {' or '.join(shown)}" if shown else "; leave it out"
            raise invalid(f"{place} {repr_of(value)} is not supported{why}{known}", place, "unsupported_value")

    def ignore(self, *names: str) -> None:
        """Accept these fields with any value: they do not change the answer."""
        self._read.update(names)

    def refuse_others(self) -> None:
        """Refuse the request if it has fields that were not read."""
        for name, value in self._given.items():
            if name not in self._read and value is not None:
                place = self.place(repr_of(name).strip('"'))
                raise invalid(f"{place} is not supported by this server; leave it out", place, "unknown_parameter")

    def wrong(self, name: str, expected: str) -> ApiError:
        """The error of a field with a value of another type or range."""
        place = self.place(name)
        return invalid(f"{place} {repr_of(self._given.get(name))} is not valid: it must be {expected}", place)


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def checked_text(value: object, place: str) -> str:
    """The value, if it is a text of characters. Raises ApiError."""
    if not isinstance(value, str):
        raise invalid(f"{place} {repr_of(value)} is not valid: it must be a text", place)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{place} has half of a surrogate pair at character {error.start}, which is not a character"
        raise invalid(message, place) from error
    return value


def repr_of(value: object) -> str:
    """The value as errors show it: short, and in ASCII."""
    if isinstance(value, list | dict):
        shown = ""
        for piece in json.JSONEncoder().iterencode(value):  # no more of a large one than is shown
            shown += piece[: _SHOWN + 1]
            if len(shown) > _SHOWN:
                return f"{shown[:_SHOWN]}..."
        return shown
    if isinstance(value, str):
        shown = ascii(value[:_SHOWN])[1:-1]
        return f'"{shown}{"..." if len(value) > _SHOWN else ""}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return f"(an integer of {value.bit_length()} bits)"
    return repr(value)
