"""Environments by command-line name, each with all its tasks. Read next: `env.py`."""

import difflib
import importlib

from openpi_train.envs.env import Env

# Module and factory function of each; keyword arguments are fields.
ENVS = {
    "metaworld": ("openpi_train.envs.metaworld_env", "with_all_tasks"),
    "tabletop": ("openpi_train.envs.tabletop_env", "TabletopEnv"),
}


def environment(name: str, *, image_size: int | None = None) -> Env:
    """Create the environment of this name with pictures of `image_size` pixels square; None: its default.

    Raises ValueError for an unknown name.
    """
    if name not in ENVS:
        close = difflib.get_close_matches(name, ENVS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"no environment {name!r}{hint} There are {', '.join(ENVS)}")
    module, make = ENVS[name]
    given = {} if image_size is None else {"image_size": image_size}
    return getattr(importlib.import_module(module), make)(**given)
