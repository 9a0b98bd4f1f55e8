"""Environments by command-line name, each with all its tasks. Read next: `env.py`, `gym_tasks.py`."""

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Mapping

from openpi_train.envs.env import Env
from openpi_train.runtime.exits import UsageError

# Module and factory function of each; keyword arguments are fields.
ENVS = {
    "metaworld": ("openpi_train.envs.metaworld_env", "with_all_tasks"),
    "tabletop": ("openpi_train.envs.tabletop_env", "TabletopEnv"),
}
# How those are written that say more than a name.
FORMS = (
    "metaworld:TASK, libero:SUITE, maniskill:ID, aloha:TASK, fetch:TASK, pusht, pusht:keypoints, gym:ID, "
    "FILE.py:FUNCTION"
)
# Fields of `GymEnv` by the last part of the flag.
_FIELDS = {
    "prompt": "prompt",
    "rate": "rate_hz",
    "success": "success_entry",
    "success_at": "success_at",
    "state": "state_entries",
    "cameras": "camera_names",
    "make": "make",
    "clip": "clip",
}


def environment(name: str, *, image_size: int | None = None, settings: Mapping[str, object] | None = None) -> Env:
    """Create the environment of this name with pictures of `image_size` pixels square; None: its default.

    `gym:ID` and `file.py:function`, also written `gym:file.py:function`, are Gymnasium's (`gym_env.py`), and so are
    those of `gym_tasks.py`. They, and `libero:SUITE` (`libero_env.py`), run in worker processes, which may end or hang.
    `settings` are those of `with_settings`.

    Raises ValueError for an unknown name, UsageError if the package is not installed, or a setting is not one.
    """
    return with_settings(_named(name, image_size), settings or {})


def with_settings(env: Env, settings: Mapping[str, object]) -> Env:
    """The environment with these of its settings, by the last part of their flags (`command_line.EnvFlags`).

    Raises UsageError if it is none of Gymnasium's: others have no such settings.
    """
    if not settings:
        return env
    inner = getattr(env, "env", env)
    if not env.tasks or not {*_FIELDS.values()} <= {field.name for field in dataclasses.fields(inner)}:
        flags = ", ".join(f"--env.{name.replace('_', '-')}" for name in settings)
        has = f"{type(inner).__name__} is none" if env.tasks else "there is none: give it with --env NAME"
        raise UsageError(f"{flags}: for environments of Gymnasium, and {has}")
    changed = dataclasses.replace(inner, **{_FIELDS[name]: value for name, value in settings.items()})
    return changed if inner is env else dataclasses.replace(env, env=changed)  # pyright: ignore[reportCallIssue]


def _named(name: str, image_size: int | None) -> Env:
    kind, _, rest = name.partition(":")
    if kind.endswith(".py"):
        kind, rest = "gym", name
    if kind in _NAMED and (rest or kind == "pusht"):
        if image_size is not None and kind not in ("libero", "metaworld"):
            raise ValueError(f"{name} has pictures of its own size: leave out the size")
        return _NAMED[kind](rest, image_size)
    if name not in ENVS:
        close = difflib.get_close_matches(name, ENVS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"no environment {name!r}{hint} There are {', '.join(ENVS)}, {FORMS}")
    module, make = ENVS[name]
    return getattr(importlib.import_module(module), make)(**_size(image_size))


def _size(image_size: int | None) -> dict[str, int]:
    return {} if image_size is None else {"image_size": image_size}


def _gym(source: str, _: int | None) -> Env:
    return _in_processes(_of("gym_env", "GymEnv", source=source))


def _known(kind: str) -> Callable[[str, int | None], Env]:
    def env(task: str, _: int | None) -> Env:
        fields = importlib.import_module("openpi_train.envs.gym_tasks").fields_of(kind, task)
        return _in_processes(_of("gym_env", "GymEnv", **fields))

    return env


def _libero(suite: str, image_size: int | None) -> Env:
    env = _of("libero_env", "LiberoEnv", suite=suite, **_size(image_size))
    _ = env.tasks  # which says so if LIBERO is not installed
    # A beginning of LIBERO builds the scene anew.
    return _in_processes(env, timeout_s=120.0)


def _metaworld(task: str, image_size: int | None) -> Env:
    known = importlib.import_module("openpi_train.envs.metaworld_tasks").INSTRUCTIONS
    name = task.removesuffix("-v3")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise ValueError(f"Meta-World has no task {task!r}" + (f"; did you mean {close[0]}?" if close else ""))
    return _of("metaworld_env", "MetaWorldEnv", task_list=(name,), **_size(image_size))


def _maniskill(task: str, _: int | None) -> Env:
    settings = importlib.import_module("openpi_train.envs.maniskill").settings(task)
    return _in_processes(_of("gym_env", "GymEnv", source=f"maniskill:{task}", **settings))


def _in_processes(env: Env, **fields: object) -> Env:
    return _of("in_processes", "ProcessEnv", env=env, **fields)


def _of(module: str, kind: str, **fields: object) -> Env:
    return getattr(importlib.import_module(f"openpi_train.envs.{module}"), kind)(**fields)


_NAMED: dict[str, Callable[[str, int | None], Env]] = {
    "aloha": _known("aloha"),
    "fetch": _known("fetch"),
    "gym": _gym,
    "libero": _libero,
    "maniskill": _maniskill,
    "metaworld": _metaworld,
    "pusht": _known("pusht"),
}
