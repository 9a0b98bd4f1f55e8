"""The checkpoint that another tool's path names in a run of ours, as the value of `--resume-from`.

Read next: `training/resume_point.py`, which finds it.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from openpi_train.launch.spec import without_going_back

logger = logging.getLogger(__name__)

# A step's folder, also with the name that transformers gives it.
_STEP = re.compile(r"(?:checkpoint-)?(\d+)")
_LATEST = ("latest", "last", "checkpoint_latest")
_BEST = ("best", "best_model", "model_best")
_ENDINGS = (".pth", ".pt", ".tar")
# The folder of a run in which some tools keep the checkpoints.
_FOLDER = "checkpoints"


def split_checkpoint(path: str) -> tuple[Path, str | None]:
    """The run's folder, absolute, and its checkpoint: a step, `latest`, `best`, or None if the path is the folder."""
    whole = Path(os.path.abspath(os.path.expanduser(path)))
    word = _word(whole.name)
    if word is not None:
        whole = whole.parent
    return (whole.parent if whole.name == _FOLDER else whole), word


def own_checkpoint(path: str, folders: Sequence[Path]) -> str | None:
    """The checkpoint at a path in one of these folders of a run, absolute; `latest` for the folder; None elsewhere."""
    whole = Path(os.path.abspath(os.path.expanduser(path)))
    if whole in folders:  # its name may be a number, too
        return "latest"
    folder, word = split_checkpoint(path)
    return (word or "latest") if folder in folders else None


def going_on(words: Sequence[str], given: Sequence[str]) -> list[str]:
    """The flags of a config, without going back to a checkpoint of the run itself if `given` has --resume.

    A run that was killed starts again with --resume, and must not go back again.
    """
    if "--resume" not in given:
        return list(words)
    kept, point = without_going_back(tuple(words))
    if point is not None:
        logger.warning("--resume: the run goes on from its newest checkpoint, and not from %s", point)
    return list(kept)


def _word(name: str) -> str | None:
    while name.endswith(_ENDINGS):
        name = name.rpartition(".")[0]
    if name in _LATEST or name in _BEST:
        return "latest" if name in _LATEST else "best"
    step = _STEP.fullmatch(name)
    return step[1] if step else None
