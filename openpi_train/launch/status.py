"""The progress of a run, reported by its processes to their launcher in a file that is replaced atomically.

The launcher names the file in an environment variable; a process that was started by hand has none, and reports
nothing. The launcher uses it to decide whether a restart continues this run, and whether the run made progress
(`supervise.py`).
"""

import dataclasses
import json
import os
from contextlib import suppress
from pathlib import Path

VARIABLE = "OPENPI_TRAIN_STATUS_FILE"
# The restarts in a row without a new checkpoint that a launcher allows which does not count them itself.
MAX_RESTARTS_VARIABLE = "OPENPI_TRAIN_MAX_RESTARTS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The progress of a process.

    Attributes:
        opened: The run directory has been opened, so it belongs to this run.
        saved_step: The last step whose checkpoint was begun; 0 before the first.
    """

    opened: bool = False
    saved_step: int = 0


NOTHING = Status()


def tell(**changes: bool | int) -> None:
    """Change fields of this process's status, if a launcher asked for it. On a full disk the file is not updated."""
    if path := os.environ.get(VARIABLE):
        status = dataclasses.replace(read(path), **changes)
        draft = Path(f"{path}.draft")
        with suppress(OSError):
            draft.write_text(json.dumps(dataclasses.asdict(status)), encoding="utf-8")
            os.replace(draft, path)


def read(path: str | Path) -> Status:
    """The status in a file; the initial status if there is no valid file yet."""
    try:
        return Status(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return NOTHING
