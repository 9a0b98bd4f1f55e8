"""When Python looks for garbage. Read next: `training/run.py`, where the loop begins.

A start imports modules and traces programs: millions of new objects, hardly any of them garbage, and each full look
goes through all that there are. Most of them live as long as the process.
"""

import gc

_USUAL = gc.get_threshold()
_RARE = (100_000, 20, 20)


def look_rarely() -> None:
    """Look for garbage rarely, while a program starts."""
    gc.set_threshold(*_RARE)


def look_as_usual() -> None:
    """Look as often as Python does by default, and never again among what there is now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)
