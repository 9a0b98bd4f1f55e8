"""Makes a script of this folder run from anywhere, installed and activated or not.

    import checkout; checkout.ready()            in a script in Python, before it imports openpi_train
    python checkout.py -m openpi_train ...       in a shell script: the same for a module

A Python that lacks the packages is replaced by that of the checkout's `.venv`, which `make` makes. It has to be read by
Pythons that are too old for the project.
"""

import importlib.util
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_ENVIRONMENT = os.path.join(_ROOT, ".venv")
_NEEDED = ("jax", "tyro")


def ready(arguments=None):
    """Returns where this Python can import openpi_train; else `.venv`'s goes on with the same script.

    With `arguments` it is not this script but they that a Python is started with. Exits with 2 where none has the
    packages.
    """
    paths = [_ROOT] + [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the processes that are started need it, too
    sys.path.insert(0, _ROOT)
    fits = sys.version_info >= (3, 11) and all(importlib.util.find_spec(name) for name in _NEEDED)
    if fits and arguments is None:
        return
    python = sys.executable if fits else os.path.join(_ENVIRONMENT, "bin", "python")
    if not os.path.exists(python) or (not fits and os.path.realpath(sys.prefix) == os.path.realpath(_ENVIRONMENT)):
        sys.stderr.write(
            f"{sys.executable} has not the packages of openpi_train, and {_ENVIRONMENT} has not either.\n"
            f"`make train` in {_ROOT} makes that environment; or activate your own, in which openpi_train is installed "
            "(docs/install.md).\n"
        )
        sys.exit(2)
    os.execv(python, [python] + (sys.argv if arguments is None else list(arguments)))


if __name__ == "__main__":
    ready(sys.argv[1:])
