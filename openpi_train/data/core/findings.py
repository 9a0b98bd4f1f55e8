"""What is suspicious in a dataset: one line in the log of a run that opens it, one row of the table of `data check`.

A finding is not an error: the data can be read, but perhaps not as whoever recorded them meant. What training does with
it, and what to do about it, are part of the finding. An index keeps those of its dataset (`formats/sidecar.py`), so
that every opening tells them.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One kind of fault in one dataset.

    Attributes:
        kind: Its name in the table and on the page of `data check`, such as "no instruction".
        count, total, unit: How many of how many: 12 of 60 "episodes". `total` is None where it is not known.
        where: The first one: its file, record, episode, step or line. Empty if that says nothing.
        what: The fault in this dataset, as a clause, if `kind` alone does not say it: numbers, names of dims.
        training: What training does with it, as a clause: "they are trained on with an empty prompt".
        remedy: What to do, as a clause that names the flag or the file.
        is_note: It is usual in sound data, and training changes nothing of them: no fault.
    """

    kind: str
    count: int
    unit: str
    training: str
    remedy: str
    total: int | None = None
    where: str = ""
    what: str = ""
    is_note: bool = False

    def line(self) -> str:
        """The finding as one line for a log."""
        of = "" if self.total is None else f" of {self.total}"
        first = f"; the first: {self.where}" if self.where else ""
        what = f" ({self.what})" if self.what else ""
        return f"{self.kind}: {self.count}{of} {self.unit}{what}{first}. In training {self.training}. {self.remedy}"

    def as_json(self) -> dict[str, Any]:
        """All attributes, by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: JsonObject) -> "Finding":
        """The inverse of `as_json`."""
        return cls(**stored)


def report(dataset: str, findings: Iterable[Finding]) -> None:
    """Log a warning for each finding in a dataset, and each note as information."""
    for finding in findings:
        logger.log(logging.INFO if finding.is_note else logging.WARNING, "%s: %s", dataset, finding.line())


@contextlib.contextmanager
def not_reported() -> Iterator[None]:
    """In this block `report` logs nothing: whoever opens the datasets shows their findings."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
