"""A folder that the program itself writes, from arguments: complete or absent, and written by one process.

It is put in place atomically, with `prepared.json`: the arguments, what the writer says of the content, and the
checksum of every file. Read next: `embedded.py` and `text/arithmetic.py`, which write such folders.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from openpi_train.data.core import cache_folders, files, tables
from openpi_train.json_object import JsonObject
from openpi_train.runtime import locks

logger = logging.getLogger(__name__)

MANIFEST = "prepared.json"


def missing(path: str | Path, names: Collection[str]) -> str | None:
    """The one of `names` that stands for the missing dataset in `datasets()` that holds a path, or None."""
    name = cache_folders.dataset_name(path)
    return name if name is not None and name in names and not (cache_folders.datasets() / name).exists() else None


def written(root: Path, arguments: JsonObject, write: Callable[[Path], Mapping[str, object]]) -> dict[str, Any]:
    """The manifest of the folder `root`, which is written first if it is missing, damaged or of other arguments.

    Several processes may call it: one writes, the others wait. Other content of `root` is moved aside, never deleted.

    Args:
        arguments: JSON; the content is a function of them.
        write: Writes the files into the folder that it is given; returns further entries of the manifest (JSON).
    """
    manifest = _complete(root, arguments)
    if manifest is not None:
        logger.info("%s is already complete: reusing it", root)
        return manifest
    workspace = root.with_name(f".{root.name}.incomplete")
    with locks.held(workspace / tables.LOCK, f"data prepare of {root}"):
        try:
            # Another process may have finished meanwhile.
            return _complete(root, arguments) or _write_at(root, workspace / "draft", arguments, write)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)


def digest(path: Path) -> str:
    """The checksum of a file, as in the manifest."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_at(
    root: Path, draft: Path, arguments: JsonObject, write: Callable[[Path], Mapping[str, object]]
) -> dict[str, Any]:
    """Write the files in `draft` and move it to `root` atomically; returns its manifest."""
    started = time.monotonic()
    logger.info("writing %s ...", root)
    shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
    draft.mkdir(parents=True)
    told = write(draft)
    digests = {str(path.relative_to(draft)): digest(path) for path in sorted(draft.rglob("*")) if path.is_file()}
    manifest = {"arguments": dict(arguments), **told, "files": digests}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if root.exists():
        logger.warning("the previous content of %s is now at %s", root, files.set_aside(root, "aside"))
    os.replace(draft, root)
    content = ", ".join(f"{value} {name.removeprefix('num_')}" for name, value in told.items())
    logger.info("%s written: %s, in %.0f s", root, content, time.monotonic() - started)
    return manifest


def _complete(root: Path, arguments: JsonObject) -> dict[str, Any] | None:
    """The manifest at `root`, if it was made with these arguments and every file is unchanged; else None."""
    if not root.exists():
        return None
    try:
        manifest = json.loads((root / MANIFEST).read_text())
        if manifest["arguments"] != arguments:
            logger.info("%s was made with other arguments: writing it again", root)
            return None
        torn = [name for name, expected in manifest["files"].items() if digest(root / name) != expected]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError) as error:
        logger.warning("%s is incomplete (%s): writing it again", root, error)
        return None
    if torn:
        logger.warning("%s is damaged (%s): writing it again", root, ", ".join(torn))
        return None
    return manifest
