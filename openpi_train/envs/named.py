"""Environments by command-line name, each with all its tasks. Read next: `env.py`."""

import difflib
import importlib

from openpi_train.envs.env import Env

# Module and factory function of each; keyword arguments are fields.
ENVS = {
    "metaworld": ("openpi_train.envs.metaworld_env", "with_all_tasks"),
    "tabletop": ("openpi_train.envs.tabletop_env", "TabletopEnv"),
}
GYM = "gym:"


def environment(name: str, *, image_size: int | None = None) -> Env:
    """Create the environment of this name with pictures of `image_size` pixels square; None: its default.

    `gym:ID` and `gym:file.py:function` are Gymnasium's (`gym_env.py`). Raises ValueError for an unknown name.
    """
    if name.startswith(GYM):
        if image_size is not None:
            raise ValueError(f"{name} has pictures of its own size: leave out the size")
        made: Env = importlib.import_module("openpi_train.envs.gym_env").GymEnv(source=name.removeprefix(GYM))
        return made
    if name not in ENVS:
        close = difflib.get_close_matches(name, ENVS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"no environment {name!r}{hint} There are {', '.join(ENVS)}, gym:ID and gym:FILE.py:FUNCTION")
    module, make = ENVS[name]
    given = {} if image_size is None else {"image_size": image_size}
    return getattr(importlib.import_module(module), make)(**given)
