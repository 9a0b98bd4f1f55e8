"""How far a run is, told by its processes to their launcher in a file, replaced as a whole at every change.

The launcher names the file in an environment variable; a process that was started by hand has none, and tells nothing.
The launcher decides by it whether another start continues this run and has brought it further (`supervise.py`).
"""

import dataclasses
import json
import os
from contextlib import suppress
from pathlib import Path

VARIABLE = "OPENPI_TRAIN_STATUS_FILE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """What a process has reached.

    Attributes:
        opened: The run's directory has been opened: what lies there is this run.
        saved_step: The last step of which a checkpoint was begun; 0 before the first.
    """

    opened: bool = False
    saved_step: int = 0


NOTHING = Status()


def tell(**changes: bool | int) -> None:
    """Change fields of this process's status, if a launcher wants to know. A full disk keeps it from the launcher."""
    if path := os.environ.get(VARIABLE):
        status = dataclasses.replace(read(path), **changes)
        draft = Path(f"{path}.draft")
        with suppress(OSError):
            draft.write_text(json.dumps(dataclasses.asdict(status)), encoding="utf-8")
            os.replace(draft, path)


def read(path: str | Path) -> Status:
    """The status in a file; the first one where there is no file yet, or none of ours."""
    try:
        return Status(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return NOTHING
