"""Instructions that say nothing: which steps have one, and which episodes none.

Read next: `robot/windows.py`, a caller.
"""

from collections.abc import Sequence

import numpy as np

from openpi_train.data.core.findings import Finding

# Texts, in lower case, that tables of numbers have in place of none.
_NOTHING = frozenset(("", "nan", "none", "null"))


def is_blank(text: str | None) -> bool:
    """Whether an instruction says nothing: white space, or the word that a missing value has become."""
    return text is None or text.strip().lower() in _NOTHING


def blank_steps(prompts: Sequence[str], prompt_index: np.ndarray) -> np.ndarray:
    """Which steps have a blank instruction, bool [steps]."""
    return np.array([is_blank(text) for text in prompts], bool)[np.asarray(prompt_index)]


def filled(prompts: Sequence[str], prompt_index: np.ndarray, episode_ends: np.ndarray) -> np.ndarray:
    """`prompt_index` [steps] with a blank step's replaced by that of the nearest labelled step of its episode.

    That is the last one before it, or else the first one behind it; episodes without an instruction stay as they are.
    """
    blank = blank_steps(prompts, prompt_index)
    ends, place = np.asarray(episode_ends), np.arange(len(blank))
    lengths = np.diff(ends, prepend=0)
    first, end = np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)
    before = np.maximum.accumulate(np.where(blank, -1, place))
    behind = np.minimum.accumulate(np.where(blank, len(blank), place)[::-1])[::-1]
    source = np.where(before >= first, before, np.where(behind < end, behind, place))
    return np.asarray(prompt_index)[source]


def unlabeled_episodes(prompts: Sequence[str], prompt_index: np.ndarray, episode_ends: np.ndarray) -> np.ndarray:
    """Which episodes have no instruction at any step, bool [episodes]."""
    starts = np.concatenate([[0], np.asarray(episode_ends)[:-1]]).astype(np.int64)
    return np.logical_and.reduceat(blank_steps(prompts, prompt_index), starts)


def unlabeled(
    prompts: Sequence[str], prompt_index: np.ndarray, episode_ends: np.ndarray, names: Sequence[object] | None = None
) -> Finding | None:
    """The finding of a dataset that has an instruction for some of its episodes; None if it has for all, or for none.

    Args: `names` are those of the episodes in messages; their numbers if not given.
    """
    if not any(map(is_blank, prompts)):
        return None
    none = unlabeled_episodes(prompts, prompt_index, episode_ends)
    if not none.any() or none.all():
        return None
    first = int(np.argmax(none))
    return Finding(
        kind="no instruction",
        count=int(none.sum()),
        total=len(none),
        unit="episodes",
        where=f"episode {first if names is None else names[first]}",
        training="a robot with skip_unlabeled (Bridge, Droid, OpenX) leaves them out, others learn them with an empty "
        "prompt",
        remedy="--data.datasets.N.skip-unlabeled True or False says which",
    )
