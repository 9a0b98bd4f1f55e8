"""One line of the `doctor`'s report. Read next: `doctor.py`, and the checks that make them in `check_*.py`."""

import dataclasses
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check, and what to do if it is not ok."""

    level: Level
    topic: str
    text: str
    advice: str = ""

    def __post_init__(self):
        assert self.level == "ok" or self.advice, f"{self.topic}: a {self.level} without what to do"

    def line(self) -> str:
        """The finding as text, with the advice on a separate line."""
        advice = f"\n{'':18}-> {self.advice}" if self.advice else ""
        return f"{self.level:<5} {self.topic:<12}{self.text}{advice}"


def ok(topic: str, text: str) -> Finding:
    """All is well."""
    return Finding("ok", topic, text)


def warn(topic: str, text: str, advice: str) -> Finding:
    """It works, but not as well as it could, or not in every case."""
    return Finding("warn", topic, text, advice)


def fail(topic: str, text: str, advice: str) -> Finding:
    """A run would fail."""
    return Finding("fail", topic, text, advice)
