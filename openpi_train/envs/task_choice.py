"""Tasks of an environment, chosen by name or by number. Read next: `env.py`."""

import difflib
from collections.abc import Sequence

from openpi_train.envs.env import Env


def chosen_tasks(env: Env, wanted: Sequence[str] | None) -> tuple[int, ...]:
    """The numbers of these tasks, in this order; of all tasks if `wanted` is None.

    Args: `wanted` are names, or numbers from 0.

    Raises ValueError, saying what the environment has, for a task that it lacks, for one that is given twice, and if
    none is given.
    """
    names = env.tasks
    if wanted is None:
        return tuple(range(len(names)))
    has = f"{type(env).__name__} has {', '.join(f'{number} {name}' for number, name in enumerate(names)) or 'no task'}"
    if not wanted:
        raise ValueError(f"no task is given; {has}")
    found: list[int] = []
    for one in wanted:
        number = names.index(one) if one in names else int(one) if one.isdecimal() else len(names)
        if number >= len(names):
            close = difflib.get_close_matches(one, names, n=1)
            raise ValueError(f"there is no task {one}" + (f"; did you mean {close[0]}? " if close else "; ") + has)
        if number in found:
            raise ValueError(f"task {names[number]} is given twice")
        found.append(number)
    return tuple(found)
