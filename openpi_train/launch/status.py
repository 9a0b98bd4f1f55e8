"""The progress of a run, reported by its processes to their launcher in a file that is replaced atomically.

The launcher names the file in an environment variable; a process that was started by hand has none, and reports
nothing. The launcher uses it to decide whether a restart continues this run, and whether the run made progress
(`supervise.py`).
"""

import dataclasses
import json
import os
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "OPENPI_TRAIN_STATUS_FILE"
_PAUSE_S = 1.0
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
_told: dict[str, Status] = {}  # what this process has told, by file


def tell(**changes: bool | int) -> None:
    """Change fields of this process's status, if a launcher asked for it. On a full disk the file is not updated."""
    if path := os.environ.get(VARIABLE):
        # What a failing disk has not taken is told with the next change.
        status = _told[path] = dataclasses.replace(_told[path] if path in _told else read(path), **changes)
        draft = Path(f"{path}.draft")
        with suppress(OSError):
            draft.write_text(json.dumps(dataclasses.asdict(status)), encoding="utf-8")
            os.replace(draft, path)


def read(path: str | Path, *, limit_s: float = 0.0) -> Status:
    """The status in a file; the initial status if there is no valid file yet, or it cannot be read for so long."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return Status(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return NOTHING
        except OSError:
            if time.monotonic() >= deadline:
                return NOTHING
        time.sleep(_PAUSE_S)
