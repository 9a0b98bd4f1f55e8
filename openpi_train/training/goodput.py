"""Where a run's wall time went, over all its starts, and the share of it that became steps that are kept.

    <run>/time.jsonl    a line per evaluation and save, and per five minutes of training; each has the totals until then

The last line is the whole account, so a start reads the file from its end, back to the step that it continues from:
what was trained after that step is lost. Read next: `runtime/phases.py`, which measures.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from openpi_train.data.core.files import lines_from_the_end
from openpi_train.runtime import phases
from openpi_train.runtime.waiting import duration

logger = logging.getLogger(__name__)

NAME = "time.jsonl"
KEPT = "training"
# Parts of a run's wall time, in the order in which they are shown, each with what it is.
PARTS = {
    KEPT: "steps that are kept",
    "data": "waiting for data",
    "evaluate": "evaluating",
    "save": "saving: what held up the loop",
    "start": "starting: processes, data, state",
    "compile": "compiling",
    "other": "profiles, the end",
    "lost": "trained, and lost by a fault",
    "down": "between starts",
}
# What is done again if its step is.
_REPEATED = (KEPT, "data", "evaluate", "save")
# Parts of phases; of all others it is "start".
_PART_OF = {
    "training": KEPT,
    "acting": KEPT,
    "compiling the training step": "compile",
    "evaluating": "evaluate",
    "saving": "save",
    "saving locally": "save",
    "finishing": "save",
    "writing the profile": "other",
    "reading the profile": "other",
    "ending": "other",
    "leaving the run": "other",
}
_EVERY_S = 300.0


class Goodput:
    """The account of a run that goes on, written by process 0.

    Args:
        directory: the run directory.
        step: the step that this start continues from.
        waited_s: the total time so far that training has waited for data.
        spent_s: the time of this process so far by phase.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        directory: Path,
        *,
        step: int,
        waited_s: Callable[[], float] = lambda: 0.0,
        spent_s: Callable[[], Mapping[str, float]] = phases.seconds,
        clock: Callable[[], float] = time.time,
    ):
        self._waited_s, self._spent_s, self._clock = waited_s, spent_s, clock
        began = clock() - sum(spent_s().values())
        self._before = _continued(directory / NAME, step, began)
        self._path = directory / NAME
        # The last line of a start that was killed may be torn.
        self._separator = "\n" if self._path.exists() else ""
        self._written = 0.0
        self.write(step)

    def totals(self) -> dict[str, float]:
        """Seconds of the run by part, which add up to its wall time."""
        totals, waited = dict(self._before), self._waited_s()
        for phase, seconds in self._spent_s().items():
            totals[_PART_OF.get(phase, "start")] += seconds
        totals[KEPT] -= waited
        totals["data"] += waited
        return totals

    def metrics(self) -> dict[str, float]:
        """The share of the wall time so far that became steps."""
        return {"time/goodput": share(self.totals())}

    def write(self, step: int, *, if_due: bool = False, is_end: bool = False) -> None:
        """Append a line for the state of this step; with `if_due` only every five minutes.

        After the end of a run no time counts until it is made longer.
        """
        now = self._clock()
        if if_due and now - self._written < _EVERY_S:
            return
        self._written = now
        seconds = {part: round(total, 3) for part, total in self.totals().items()}
        longest = {name: round(longest, 3) for name, longest in phases.longest_s().items()}
        line = {"at": round(now, 3), "step": step, "seconds": seconds, "longest_s": longest}
        line |= {"is_end": True} if is_end else {}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._separator + json.dumps(line) + "\n")
            self._separator = ""
        except OSError as error:  # the next line has it all
            self._separator = "\n"
            logger.warning("%s cannot be written (%s)", self._path, error.strerror)

    def words(self) -> str:
        """The account in a line, for the log."""
        totals = self.totals()
        parts = ", ".join(f"{part} {duration(totals[part])}" for part in PARTS if totals[part] >= 1)
        return f"goodput {share(totals):.0%} of {duration(sum(totals.values()))}: {parts}"


def share(seconds: Mapping[str, float]) -> float:
    """The share of these seconds that became steps that are kept."""
    return seconds[KEPT] / max(sum(seconds.values()), 1e-9)


def read_account(directory: Path) -> Mapping[str, float] | None:
    """Seconds of a run by part, as last written; None: it has no account."""
    last = next(_lines(directory / NAME), None)
    return None if last is None else last["seconds"]


def read_longest(directory: Path) -> Mapping[str, float]:
    """The longest times without progress by phase of a run's starts so far, for `phases.expect`."""
    last = next(_lines(directory / NAME), None)
    return {} if last is None else last["longest_s"]


def _continued(path: Path, step: int, began: float) -> dict[str, float]:
    """The totals with which a start at `began` continues from the state of this step."""
    nothing = dict.fromkeys(PARTS, 0.0)
    last: Mapping[str, Any] | None = None
    kept = nothing
    for line in _lines(path):
        last = last or line
        if line["step"] <= step:
            kept = line["seconds"]
            break
    if last is None:
        return nothing
    totals = nothing | last["seconds"]
    for part in _REPEATED:
        totals["lost"] += totals[part] - kept[part]
        totals[part] = kept[part]
    if not last.get("is_end"):
        totals["down"] += max(began - last["at"], 0.0)
    return totals


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of an account from its end; torn ones are left out."""
    if not path.is_file():
        return
    for _, line in lines_from_the_end(path):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and {"at", "step", "seconds", "longest_s"} <= found.keys():
            yield found
