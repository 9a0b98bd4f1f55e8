"""Writing small files whole: a reader, or a crash, never meets half of one. Safe for several processes at once."""

import os
import socket
import threading
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())
