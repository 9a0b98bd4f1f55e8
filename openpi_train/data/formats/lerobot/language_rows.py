"""LeRobot's language rows: the instruction of each step from its subtasks or the rephrasings of its task.

A dataset that `lerobot-annotate` has annotated has a column `language_persistent`: at every step the same list of rows
of its episode, each with `style`, `role`, `content` and a `timestamp` (s) from which on it holds, until the next of its
style (huggingface/lerobot `docs/source/language_and_recipes.mdx`, `datasets/language.py` of 0.6.1). Events, which hold
for one step (`language_events`: interjections, questions about pictures), are no instructions. Read next:
`episodes.py`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from openpi_train.data.formats.lerobot.lerobot_metadata import require
from openpi_train.json_object import JsonObject

PERSISTENT = "language_persistent"
# What the instruction of a step is: its task's text, one of its rephrasings, or the subtask that is under way.
PromptFrom = Literal["task", "task_aug", "subtask"]


def read_lists(column: Any) -> list[list[Mapping[str, Any]] | None]:
    """The lists of a column of parquet; an episode has the same at every step, which is then read once."""
    array = column.combine_chunks()
    rows, lengths = array.flatten(), require("pyarrow.compute").list_value_length(array).unique().to_pylist()
    same = len(lengths) == 1 and lengths[0] and rows[lengths[0] :].equals(rows[: -lengths[0]])
    return [array[0].as_py()] * len(array) if same else array.to_pylist()


def prompts_of(
    prompt_from: PromptFrom, lists: Sequence[Sequence[JsonObject] | None], times: np.ndarray, steps: np.ndarray
) -> list[str | None]:
    """The text of each step; None where there is none, or a blank one.

    Args: `lists` are the steps' persistent rows; `times` their timestamps (s) in the episode; `steps` their numbers in
    the dataset, which choose a rephrasing.
    """
    found = []
    for rows, time, step in zip(lists, times.tolist(), steps.tolist(), strict=True):
        text = _subtask(rows or (), time) if prompt_from == "subtask" else _rephrasing(rows or (), step)
        found.append((text or "").strip() or None)
    return found


def styles(lists: Sequence[Sequence[JsonObject] | None]) -> set[str]:
    """The styles of all rows."""
    distinct = {id(rows): rows for rows in lists}
    return {str(row["style"]) for rows in distinct.values() for row in rows or ()}


def _subtask(rows: Sequence[JsonObject], time: float) -> str | None:
    """The last subtask that has begun, as lerobot's `active_at`. Raises ValueError if there are two."""
    begun = [row for row in rows if row["style"] == "subtask" and row["timestamp"] <= time]
    last = [row for row in begun if row["timestamp"] == max(row["timestamp"] for row in begun)]
    if len(last) > 1:
        raise ValueError(f"{len(last)} subtasks begin at {last[0]['timestamp']:.3f} s")
    return last[0]["content"] if last else None


def _rephrasing(rows: Sequence[JsonObject], step: int) -> str | None:
    """The rephrasing that lerobot chooses for a step: the same in every epoch (`language_render.py: _resolve_task`)."""
    texts = [row["content"] for row in rows if row["style"] == "task_aug" and row["role"] == "user"]
    if not texts:
        return None
    digest = hashlib.blake2b(f"task_aug:{step}".encode(), digest_size=8).digest()
    return texts[int.from_bytes(digest, "big") % len(texts)]
