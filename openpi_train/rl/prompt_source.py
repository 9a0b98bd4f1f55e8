"""The prompts that a policy completes, in an endless, reshuffled pass. Read next: `text_actor.py`."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from openpi_train.data.core.mixture import Mixture
from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.data.text.prompt_records import PromptRecord, prompt_records, with_all_columns
from openpi_train.data.text.text_data import TextData
from openpi_train.data.text.text_prompts import TextPrompt, prompt_of
from openpi_train.runtime.exits import DataError

logger = logging.getLogger(__name__)

# Prompts whose references are looked at for the tokens that end them.
_LOOKED_AT = 256
# Draws that are looked up at once.
_BLOCK = 1024


class PromptSource:
    """The prompts of a run's training texts that have at most `most_tokens`; the others are left out, with a warning.

    Raises DataError if a dataset has no such prompt.
    """

    def __init__(self, data: OpenedText, most_tokens: int):
        self._members, self._tokenizer = data.train.members, data.words
        self._samples: list[np.ndarray] = []
        self._records: list[list[PromptRecord]] = []
        longest = 0
        for member in self._members:
            store, samples = member.store, member.samples
            texts = samples * store.texts_per_sample
            # The tokens before the first target; a prompt alone has none.
            lengths = store.text_lengths[texts]
            if store.kind != "prompt only":
                lengths = np.minimum(lengths, store.first_target[texts])
            usable = (lengths > 0) & (lengths <= most_tokens)
            if not usable.any():
                raise DataError(
                    f"{member.name} has no prompt of at most {most_tokens} tokens: give a prompt column "
                    "(--data.datasets.N.columns prompt=...), or raise --data.max-length, which is the most tokens of "
                    "a prompt and its completion"
                )
            if not usable.all():
                logger.warning(
                    "%s: %d of %d samples have no prompt of at most %d tokens and are left out (--data.max-length "
                    "less --rl.max-new-tokens)",
                    *(member.name, (~usable).sum(), len(usable), most_tokens),
                )
            self._samples.append(samples[usable])
            longest = max(longest, int(lengths[usable].max()))
        self.longest = longest
        sizes = [len(samples) for samples in self._samples]
        self.num_prompts = sum(sizes)
        self._firsts = np.cumsum([0, *sizes[:-1]])
        self._mixture = Mixture(sizes, [member.weight for member in self._members], data.train.mixture.seed)
        self._block, self._located = -1, (np.zeros(0), np.zeros(0), np.zeros(0))
        # The rows of the data, and which of them are left out.
        self.identity: Mapping[str, Any] = {"texts": data.train.identity, "most_tokens": most_tokens}

    def prompt_id(self, draw: int) -> int:
        """The number of the prompt that is drawn as the `draw`-th."""
        dataset, index = self._locate(draw)
        return int(self._firsts[dataset]) + index

    def prompt(self, prompt_id: int) -> TextPrompt:
        """The prompt of this number."""
        dataset, index = self._place(prompt_id)
        return prompt_of(self._members[dataset], int(self._samples[dataset][index]), self._tokenizer)

    def read_records(self, config: TextData) -> frozenset[str]:
        """Read the records of the prompts from their files, for `record`; returns the columns that they have.

        Raises as `prompt_records`.
        """
        self._records = [
            prompt_records(dataset, member.store, samples, offline=config.offline)
            for dataset, member, samples in zip(config.datasets, self._members, self._samples, strict=True)
        ]
        every = iter(with_all_columns([one for records in self._records for one in records]))
        self._records = [[next(every) for _ in records] for records in self._records]
        return frozenset(name for records in self._records for one in records[:1] for name in one.columns)

    def record(self, prompt_id: int) -> PromptRecord | None:
        """The record of the prompt of this number; None before `read_records`."""
        dataset, index = self._place(prompt_id)
        return self._records[dataset][index] if self._records else None

    def ends(self) -> list[int]:
        """The special tokens that end references, which are not always the tokenizer's own (in conversations)."""
        found = (
            prompt_of(member, int(sample), self._tokenizer).end
            for member, samples in zip(self._members, self._samples, strict=True)
            for sample in samples[:_LOOKED_AT]
        )
        return list(dict.fromkeys(end for end in found if end is not None))

    def _place(self, prompt_id: int) -> tuple[int, int]:
        """The dataset of a prompt, and its number among those of the dataset."""
        dataset = int(np.searchsorted(self._firsts, prompt_id, side="right")) - 1
        return dataset, prompt_id - int(self._firsts[dataset])

    def _locate(self, draw: int) -> tuple[int, int]:
        block, place = divmod(draw, _BLOCK)
        if block != self._block:
            self._block = block
            self._located = self._mixture.locate(block * _BLOCK + np.arange(_BLOCK))
        dataset, _, index = self._located
        return int(dataset[place]), int(index[place])
