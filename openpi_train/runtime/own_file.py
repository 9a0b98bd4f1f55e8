"""Imports a Python file of the user's. Read next: `registry.py`, which finds experiments in them."""

import contextlib
import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from openpi_train.runtime.exits import RunError, UsageError

# The most frames of a traceback that are shown: the first are the user's, the last says where it failed.
_FIRST, _LAST = 3, 3


def import_file(file: Path, what: str) -> ModuleType:
    """Import a file from outside the package, with its own folder on the path. `what` names it in messages.

    The folder stays on `sys.path`, which spawned data workers inherit: classes defined in the file can be unpickled.

    Raises FileNotFoundError, ValueError if it does not parse or has the name of another module, or UsageError with its
    line and the end of the traceback if it cannot be run.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{what} {str(file)!r} does not exist (looked in {Path.cwd()})")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with told_of_file(file, what):
            module = importlib.import_module(file.stem)
    except SyntaxError as error:
        line = "" if error.lineno is None else f" line {error.lineno}"  # none where the file holds a null byte
        raise ValueError(f"{error.filename or file}{line} does not parse: {error.msg}") from error
    if Path(module.__file__ or "").resolve() != file.resolve():
        raise ValueError(f"{file} has the name of another module ({module.__file__}); rename the file")
    return module


@contextlib.contextmanager
def told_of_file(file: Path, what: str) -> Iterator[None]:
    """Turn what the user's file raises into a UsageError that names its line, with the traceback from there on.

    An error that is meant for the user already (`RunError`) stays as it is, and so does one of syntax.
    """
    try:
        yield
    except (RunError, SyntaxError):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        first = next((k for k, one in enumerate(frames) if Path(one.filename).resolve() == file.resolve()), None)
        if first is None:  # not its doing
            raise
        frames = frames[first:]
        left_out = max(len(frames) - _FIRST - _LAST, 0)
        lines = traceback.format_list(frames)
        if left_out:
            lines[_FIRST:-_LAST] = [f"  ... {left_out} more ...\n"]
        if isinstance(error, SystemExit):  # a program, which is not meant to be imported
            lines.append(f"it has ended itself ({error!r}): begin what it runs with if __name__ == '__main__':")
        else:
            lines += traceback.format_exception_only(error)
        text = "".join(lines).rstrip()
        raise UsageError(f"{what} {file} fails at line {frames[0].lineno}:\n{text}") from error
