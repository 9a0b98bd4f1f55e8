"""Atomic file writes: a file is complete or absent, also after a crash. Safe for several processes."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from openpi_train.data.core.damage import raise_if_system
from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)

# File in an unfinished folder that says what is being written there.
PLAN = "plan.json"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` atomically when the block ends, or is deleted if the block raises.

    Creates the folder of `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}")
    try:
        with draft.open("wb") as file:
            yield file
            with naming(path):
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):  # where it cannot be written, the first error tells more
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError that names no file, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically, creating its folder."""
    with replacing(path) as file:
        file.write(content)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write `arrays` as an npz file, as `write_bytes` does; `is_whole_npz` says whether it is undamaged."""
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def is_whole_npz(path: Path) -> bool:
    """Whether the npz file is there and undamaged, by its CRCs; a damaged one is named in a warning.

    Raises OSError if the system cannot read it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except FileNotFoundError:
        return False
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise_if_system(error, path)
        damaged = str(error)
    if damaged:
        logger.warning("%s is damaged (%s): it is made again", path, damaged)
    return not damaged


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON, as `write_text` does. Raises ValueError if it holds NaN or Inf, which JSON lacks."""
    write_text(path, json_text(value))


def json_text(value: object) -> str:
    """The text that `write_json` writes. Raises ValueError as it does."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """The value of a JSON file, with or without a byte order mark. Raises OSError, or ValueError if it is not JSON."""
    with naming(path):
        return json.loads(path.read_bytes())


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not blank, from 1, and its value. Raises OSError, ValueError naming the line."""
    for number, line in lines_of(path):
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); mend or remove it") from error


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    r"""The number of each line that is not blank, from 1, and the line, for `json.loads`, which knows byte order marks.

    Lines end at \n alone: U+2028, U+0085 and others at which `str.splitlines` divides may stand inside JSON's texts.
    """
    with path.open("rb") as file, naming(path):
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def lines_from_the_end(path: Path, block_bytes: int = 1 << 16) -> Iterator[tuple[int, bytes]]:
    r"""The byte at which each line begins and the line, the last one first, read in blocks from the file's end."""
    with path.open("rb") as file, naming(path):
        begin, held = file.seek(0, os.SEEK_END), b""
        while begin > 0:
            size = min(block_bytes, begin)
            begin -= size
            file.seek(begin)
            held = file.read(size) + held
            # The first line may begin in the block before; until there is none, its begin is held.
            cut = held.find(b"\n") + 1 if begin else 0
            if begin and not cut:
                continue
            place, lines = begin + len(held), held[cut:].split(b"\n")
            for number, line in enumerate(reversed(lines)):
                whole = line if number == 0 else line + b"\n"
                place -= len(whole)
                if whole:
                    yield place, whole
            held = held[:cut]


def claim(folder: Path, plan: JsonObject) -> bool:
    """Record in `folder`, which is created, the `plan` (JSON) of what is written there; returns whether it was begun.

    Raises ValueError if the folder was begun with another plan.
    """
    path, plan = folder / PLAN, json.loads(json.dumps(plan))
    if not path.is_file():
        write_json(path, plan)
        return False
    begun = read_json(path)
    differing = sorted(name for name in {*begun, *plan} if begun.get(name) != plan.get(name))
    if differing:
        raise ValueError(
            f"{folder} was begun with other {', '.join(differing)}: give the same again, or remove it to start over"
        )
    return True


def set_aside(path: Path, reason: str) -> Path:
    """Rename `path` to `<name>.<reason>-<time>`, which is not read as a run or checkpoint; returns the new path."""
    target = path.with_name(f"{path.name}.{reason}-{time.strftime('%Y%m%dT%H%M%S')}")
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"{target.name.partition('~')[0]}~{number}")
    return path.rename(target)
