"""Files that hold a secret: written for the owner alone, and a warning where others can read one."""

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def write_private(path: Path, text: str) -> None:
    """Write a new file that nobody but its owner can read. Raises FileExistsError if there is one, OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def warn_if_others_can_read(path: Path, what: str) -> bool:
    """Log a warning with the command to type if the file's group or others may read it; returns whether they may."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & (stat.S_IRGRP | stat.S_IROTH):
        return False
    logger.warning("%s %s can be read by others on this machine (mode %04o): chmod 600 %s", what, path, mode, path)
    return True
