"""Environments by command-line name, each with all its tasks. Read next: `env.py`."""

import difflib
import importlib
from collections.abc import Callable

from openpi_train.envs.env import Env

# Module and factory function of each; keyword arguments are fields.
ENVS = {
    "metaworld": ("openpi_train.envs.metaworld_env", "with_all_tasks"),
    "tabletop": ("openpi_train.envs.tabletop_env", "TabletopEnv"),
}
# How those are written that say more than a name.
FORMS = "gym:ID, FILE.py:FUNCTION, libero:SUITE, maniskill:ID"
# A reset of LIBERO builds the scene anew.
_LIBERO_TIMEOUT_S = 600.0


def environment(name: str, *, image_size: int | None = None) -> Env:
    """Create the environment of this name with pictures of `image_size` pixels square; None: its default.

    `gym:ID` and `file.py:function`, also written `gym:file.py:function`, are Gymnasium's (`gym_env.py`). They,
    `libero:SUITE` (`libero_env.py`) and `maniskill:ID` (`maniskill.py`) run in worker processes, which may end or hang.

    Raises ValueError for an unknown name, UsageError if the package is not installed.
    """
    kind, _, rest = name.partition(":")
    if kind.endswith(".py"):
        kind, rest = "gym", name
    if rest and kind in _NAMED:
        if image_size is not None and kind != "libero":
            raise ValueError(f"{name} has pictures of its own size: leave out the size")
        return _NAMED[kind](rest, image_size)
    if name not in ENVS:
        close = difflib.get_close_matches(name, ENVS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"no environment {name!r}{hint} There are {', '.join(ENVS)}, {FORMS}")
    module, make = ENVS[name]
    given = {} if image_size is None else {"image_size": image_size}
    return getattr(importlib.import_module(module), make)(**given)


def _gym(source: str, _: int | None) -> Env:
    return _of("in_processes", "ProcessEnv", env=_of("gym_env", "GymEnv", source=source))


def _libero(suite: str, image_size: int | None) -> Env:
    given = {} if image_size is None else {"image_size": image_size}
    env = _of("libero_env", "LiberoEnv", suite=suite, **given)
    _ = env.tasks  # which says so if LIBERO is not installed
    return _of("in_processes", "ProcessEnv", env=env, timeout_s=_LIBERO_TIMEOUT_S)


def _maniskill(task: str, _: int | None) -> Env:
    maniskill = importlib.import_module("openpi_train.envs.maniskill")
    env = _of("gym_env", "GymEnv", source=f"maniskill:{task}", **maniskill.settings(task))
    return _of("in_processes", "ProcessEnv", env=env)


def _of(module: str, kind: str, **fields: object) -> Env:
    return getattr(importlib.import_module(f"openpi_train.envs.{module}"), kind)(**fields)


_NAMED: dict[str, Callable[[str, int | None], Env]] = {"gym": _gym, "libero": _libero, "maniskill": _maniskill}
