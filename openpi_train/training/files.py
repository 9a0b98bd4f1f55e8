"""Files that are either whole or absent, and are read back as written. Read next: `manifest.py`, `rundir.py`."""

import json
import os
import pathlib
import time
from typing import Any


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write `value` to `path` so that a reader, or a crash, sees the old file or the new one and never a part.

    Raises:
        ValueError: `value` holds NaN or Inf, which JSON cannot say.
    """
    text = json.dumps(value, indent=1, allow_nan=False)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: pathlib.Path) -> Any:
    """The value that `write_json` wrote. Raises OSError or ValueError where it cannot be read."""
    return json.loads(path.read_text(encoding="utf-8"))


def set_aside(path: pathlib.Path, reason: str) -> pathlib.Path:
    """Rename `path` to `<name>.<reason>-<time>`, which is no run and no checkpoint; returns the new path."""
    target = path.with_name(f"{path.name}.{reason}-{time.strftime('%Y%m%dT%H%M%S')}")
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"{target.name.partition('~')[0]}~{number}")
    return path.rename(target)
