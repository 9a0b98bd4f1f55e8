"""Imports a Python file of the user's. Read next: `registry.py`, which finds experiments in them."""

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_file(file: Path, what: str) -> ModuleType:
    """Import a file from outside the package, with its own folder on the path. `what` names it in messages.

    The folder stays on `sys.path`, which spawned data workers inherit: classes defined in the file can be unpickled.

    Raises FileNotFoundError, or ValueError if it does not parse or has the name of another module.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{what} {str(file)!r} does not exist (looked in {Path.cwd()})")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(file.stem)
    except SyntaxError as error:
        raise ValueError(f"{error.filename} line {error.lineno} does not parse: {error.msg}") from error
    if Path(module.__file__ or "").resolve() != file.resolve():
        raise ValueError(f"{file} has the name of another module ({module.__file__}); rename the file")
    return module
