"""The Python that has the packages: this one, or that of the checkout's `.venv`, which `make` makes.

`python -m openpi_train` and `scripts/checkout.py` begin here, so Pythons that are too old for the project read this
file. Read next: `__main__.py`, `spec.py`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_ENVIRONMENT = os.path.join(_ROOT, ".venv")
_NEEDED = ("jax", "tyro")
_OLDEST = (3, 11)


def has_packages() -> bool:
    """Whether this Python can run openpi_train."""
    return sys.version_info >= _OLDEST and not _missing()


def begin(command: Sequence[str], *, launches: bool = False) -> None:
    """Return where this Python has the packages; else `.venv`'s goes on with `command`, its arguments.

    Exits with code 2 where neither has them; with `launches` it returns all the same: a launcher needs none, and says
    itself whether its processes do (`lacking`).
    """
    if has_packages():
        return
    python = os.path.join(_ENVIRONMENT, "bin", "python")
    if os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(_ENVIRONMENT):
        find_here()
        os.execv(python, [python, *command])
    if not launches or sys.version_info < _OLDEST:
        sys.stderr.write("error: {}\n".format("\n".join(lacking())))
        sys.exit(2)


def find_here() -> None:
    """Let the processes that this one starts find this package, wherever they run."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *others])


def lacking() -> list[str]:
    """What this Python lacks, and what to type, in two lines; none where it lacks nothing."""
    if has_packages():
        return []
    if sys.version_info < _OLDEST:
        what = "is Python {}.{}; openpi_train needs {}.{} or newer".format(*sys.version_info[:2], *_OLDEST)
    else:
        what = "lacks packages of openpi_train ({})".format(", ".join(_missing()))
    if not os.path.exists(os.path.join(_ROOT, "Makefile")):  # installed, without its dependencies
        return [f"{sys.executable} {what}.", f"Type: {sys.executable} -m pip install openpi-train (docs/install.md)"]
    state = "does not have them either" if os.path.exists(_ENVIRONMENT) else "does not exist"
    return [
        f"{sys.executable} {what}, and {_ENVIRONMENT} {state}.",
        f"Activate the environment in which openpi_train is installed, or type: make -C {_ROOT} train "
        "(docs/install.md)",
    ]


def _missing() -> list[str]:
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]
