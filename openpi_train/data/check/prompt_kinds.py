"""Kinds of faults of instructions. Read next: `scripts.py`."""

import collections
from collections.abc import Iterator

import numpy as np

from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.check.scripts import main_script, shares_in_words
from openpi_train.data.core.findings import Finding


def mixed_scripts(data: ExaminedData) -> Iterator[Finding]:
    """Instructions in another script than most episodes have."""
    source = data.source
    starts = np.concatenate([[0], np.asarray(source.episode_ends[:-1], np.int64)]).astype(np.int64)
    number_of = np.asarray(source.prompt_index)[starts]
    script_of = [main_script(text) for text in source.prompts]
    counts = collections.Counter(script for number in number_of.tolist() if (script := script_of[number]) is not None)
    if len(counts) < 2:
        return
    (most, _), *others = counts.most_common()
    first = next(episode for episode, number in enumerate(number_of.tolist()) if script_of[number] not in (None, most))
    yield Finding(
        kind="languages mixed",
        count=sum(count for _, count in others),
        total=source.num_episodes,
        unit="episodes",
        where=f"{source.describe(int(starts[first]))}: {source.prompts[int(number_of[first])][:60]!r}",
        what=f"instructions by script: {shares_in_words(counts.most_common())}",
        training="all are trained on as they are",
        is_note=True,
        remedy="Translate the instructions, or leave those episodes out, unless both languages are meant",
    )
