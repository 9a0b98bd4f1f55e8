"""Which part of a dataset is held out for evaluation. Read next: `robot/windows.py`, `text/opened_texts.py`."""

import hashlib
from collections.abc import Sequence

import numpy as np


def validation_episodes(episode_ids: Sequence[str] | np.ndarray, fraction: float) -> np.ndarray:
    """Which episodes are held out, bool [episodes]: a function of each episode's own content.

    So equal episodes are in the same split, and appending data moves no earlier episode, with one exception: if the
    hash would hold out nothing or everything, one distinct episode is held out or kept.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction {fraction} must be in [0, 1)")
    digests = {name: hashlib.sha256(name.encode()).digest() for name in set(episode_ids)}
    scores = {name: int.from_bytes(digest[:8]) / 2**64 for name, digest in digests.items()}
    held_out = {name for name, score in scores.items() if score < fraction}
    if fraction > 0 and len(scores) > 1:
        if not held_out:
            held_out = {min(scores, key=scores.__getitem__)}
        elif len(held_out) == len(scores):
            held_out.remove(max(scores, key=scores.__getitem__))
    elif len(scores) == 1:
        held_out = set()
    return np.array([name in held_out for name in episode_ids], bool)
