"""Rows of a mixture of text datasets by position: texts cut to a length, packed if asked, as arrays of one shape.

Read next: `opened_texts.py`, which makes `TextRows`; `packing.py`; `token_store.py`.
"""

import copy
import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from openpi_train.data.core.interface import RowSource, RowSpec
from openpi_train.data.core.mixture import Mixture
from openpi_train.data.core.text_lengths import TextLengths
from openpi_train.data.text.packing import pack
from openpi_train.data.text.token_store import TokenStore
from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)

# What is kept of a text with too many tokens: its first ones, its last ones, or nothing.
Truncation = Literal["keep_start", "keep_end", "drop"]
# Entries of a row that are as long as the row.
_TOKEN_ENTRIES = {"tokens": "int32", "segments": "int32", "positions": "int32", "weights": "float32"}


@dataclasses.dataclass(frozen=True)
class TextCut:
    """How texts are cut to `max_length` tokens."""

    max_length: int
    truncation: Truncation

    def of(self, length: int) -> slice:
        """The part of a text with `length` tokens that is kept."""
        if self.truncation == "keep_end":
            return slice(max(0, length - self.max_length), length)
        return slice(0, min(length, self.max_length))

    def usable(
        self, store: TokenStore, samples: np.ndarray, *, name: str, on_no_targets: Literal["error", "drop"]
    ) -> np.ndarray:
        """Those of the samples whose texts all have a target left, and are short enough if long ones are dropped.

        Logs how many are left out. Raises ValueError for a sample without targets, unless these are dropped.
        """
        texts = samples[:, None] * store.texts_per_sample + np.arange(store.texts_per_sample)
        lengths = store.text_lengths[texts]
        long = (lengths > self.max_length).any(1) if self.truncation == "drop" else np.zeros(len(samples), bool)
        if self.truncation == "keep_end":
            # The first token that is kept has none before it from which it could be predicted.
            empty = store.last_target[texts] <= np.maximum(lengths - self.max_length, 0)
        else:
            empty = store.first_target[texts] >= np.minimum(lengths, self.max_length)
        if store.kind == "prompt only":
            # It has no targets. Its end must be kept, where the answer begins.
            empty = (lengths > self.max_length) & (self.truncation == "keep_start")
        empty = empty.any(1) & ~long
        if long.any():
            logger.warning(
                "%s: samples with more than %d tokens, which are dropped: %d of %d; the first: %s (--data.truncation)",
                *(name, self.max_length, long.sum(), len(samples), store.place(int(samples[np.argmax(long)]))),
            )
        if empty.any():
            self._without_targets(store, samples[empty], lengths[empty], name, on_no_targets)
        return samples[~long & ~empty]

    def _without_targets(
        self, store: TokenStore, samples: np.ndarray, lengths: np.ndarray, name: str, on_no_targets: str
    ) -> None:
        first = int(samples[0])
        text = first * store.texts_per_sample
        prompt = int(store.first_target[text])
        why = f"all its targets are cut off ({int(lengths[0].max())} tokens, --data.max-length {self.max_length})"
        if self.truncation == "keep_start" and prompt >= self.max_length:
            why = f"its prompt has {prompt} tokens, which leaves no target in --data.max-length {self.max_length}"
        told = f"{name}, {store.place(first)}: {why}"
        if on_no_targets == "error":
            raise ValueError(
                f"{told} (samples without targets: {len(samples)}). Raise --data.max-length, keep the end of texts "
                "(--data.truncation keep_end), or leave such samples out (--data.on-no-targets drop)"
            )
        logger.warning("samples without targets, which are dropped: %d; the first: %s", len(samples), told)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMember:
    """The rows of one dataset: `samples` in order, of which those before `ends[0]` are in row 0, and so on."""

    name: str
    weight: float
    store: TokenStore
    cut: TextCut
    samples: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, store: TokenStore, samples: np.ndarray, cut: TextCut, *, packing: bool, **named: Any) -> "RowMember":
        """The rows of these samples: one for each, or packed."""
        ends = np.arange(1, len(samples) + 1)
        if packing:
            order, ends = pack(np.minimum(store.text_lengths[samples], cut.max_length), cut.max_length)
            samples = samples[order]
        return cls(store=store, samples=samples, cut=cut, ends=ends, **named)

    def __len__(self) -> int:
        return len(self.ends)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens in each row, int64 [rows]."""
        texts = self.samples[:, None] * self.store.texts_per_sample + np.arange(self.store.texts_per_sample)
        of_samples = np.minimum(self.store.text_lengths[texts], self.cut.max_length).sum(1)
        return np.add.reduceat(of_samples, np.concatenate([[0], self.ends[:-1]])) if len(self) else of_samples

    @property
    def num_cut(self) -> int:
        """How many of the samples have a text that is cut."""
        texts = self.samples[:, None] * self.store.texts_per_sample + np.arange(self.store.texts_per_sample)
        return int((self.store.text_lengths[texts] > self.cut.max_length).any(1).sum())

    def length_holding(self, share: float) -> int:
        """The fewest tokens that this share of the samples have at most, in their longest text."""
        texts = self.samples[:, None] * self.store.texts_per_sample + np.arange(self.store.texts_per_sample)
        return int(np.percentile(self.store.text_lengths[texts].max(1), 100 * share, method="higher"))

    def samples_of(self, row: int) -> np.ndarray:
        """The samples in a row."""
        return self.samples[self.ends[row - 1] if row else 0 : self.ends[row]]

    def write(self, row: int, columns: Mapping[str, np.ndarray], place: int) -> None:
        """Write a row to the `columns` at `place`, which are zero there."""
        start = 0
        samples = self.samples_of(row)
        for number, sample in enumerate(samples.tolist()):
            for which in range(self.store.texts_per_sample):
                segment = number + which + 1
                if self.store.labels[sample] == 0:
                    segment = 2
                tokens, targets = self.store.text(sample * self.store.texts_per_sample + which)
                kept = self.cut.of(len(tokens))
                tokens, targets = tokens[kept], targets[kept]
                here = slice(start, start + len(tokens))
                columns["tokens"][place, here] = tokens
                columns["segments"][place, here] = segment
                columns["positions"][place, here] = np.arange(len(tokens))
                columns["weights"][place, here] = targets
                columns["weights"][place, start] = 0
                start += len(tokens)
        if "margin" in columns:
            columns["margin"][place] = self.store.margins[samples[0]]
        if "reference_log_probs" in columns:
            columns["reference_log_probs"][place] = np.nan_to_num(self.store.references[samples[0]])

    def describe(self, row: int) -> str:
        """The files and lines of a row."""
        samples = self.samples_of(row)
        more = f" and {len(samples) - 3} more" if len(samples) > 3 else ""
        return f"{self.name}: {', '.join(self.store.place(int(sample)) for sample in samples[:3])}{more}"


class TextRows(RowSource):
    """The rows of one split of a mixture of texts, at every position of an endless, reshuffled pass.

    Args: rows have `length` tokens, padding included; `judged` rows are preferences or judged completions and have a
    `margin`, and `reference_log_probs` if `references`; `identity` is JSON of what rows depend on besides the seed.
    """

    def __init__(
        self,
        members: Sequence[RowMember],
        *,
        length: int,
        seed: int,
        judged: bool = False,
        references: bool = False,
        identity: JsonObject | None = None,
    ):
        self.members = tuple(members)
        self.mixture = Mixture([len(member) for member in members], [member.weight for member in members], seed)
        self.judged, self.references = judged, references
        self.spec = self.spec_of(length)
        self.identity = {"seed": seed, **(identity or {})}
        self.num_samples = sum(self.mixture.sizes)
        self.text: TextLengths | None = None

    def spec_of(self, length: int) -> RowSpec:
        """The row spec of batches of this length."""
        return row_spec_of(length, judged=self.judged, references=self.references)

    def in_lengths(self, lengths: tuple[int, ...]) -> "TextRows":
        """The same rows in batches of these lengths."""
        rows = copy.copy(self)
        rows.text = TextLengths(lengths=lengths, tokens=tuple(member.lengths for member in self.members))
        return rows

    @property
    def sources(self) -> Mapping[str, str]:
        return {
            f"dataset {number} ({member.name}): {file}": sha256[:16]
            for number, member in enumerate(self.members)
            for file, sha256 in member.store.sources.items()
        }

    def batch(self, positions: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
        dataset, _, index = self.mixture.locate(positions)
        columns = {name: np.zeros((len(positions), *shape), dtype) for name, (shape, dtype) in self.spec.items()}
        for place, (number, row) in enumerate(zip(dataset.tolist(), index.tolist(), strict=True)):
            self.members[number].write(row, columns, place)
        return columns, []

    def cut(self, columns: Mapping[str, np.ndarray], positions: np.ndarray) -> dict[str, np.ndarray]:
        if self.text is None:
            return dict(columns)
        dataset, _, index = self.mixture.locate(positions)
        length = self.text.of(dataset, index)
        return {name: column[:, :length] if name in _TOKEN_ENTRIES else column for name, column in columns.items()}

    def describe(self, positions: np.ndarray) -> list[str]:
        """Dataset, files and lines, and epoch of the row at each position."""
        dataset, epoch, index = self.mixture.locate(positions)
        places = zip(dataset.tolist(), epoch.tolist(), index.tolist(), strict=True)
        return [f"{self.members[number].describe(row)} (epoch {of})" for number, of, row in places]

    def proportions(self, num_positions: int) -> dict[str, float]:
        counts = self.mixture.counts(num_positions)
        names = enumerate(member.name for member in self.members)
        return {f"{number}_{name}": int(counts[number]) / num_positions for number, name in names}


def row_spec_of(length: int, *, judged: bool, references: bool) -> RowSpec:
    """Shape and dtype of each entry of a row of `length` tokens."""
    spec: dict[str, tuple[tuple[int, ...], str]] = {name: ((length,), dtype) for name, dtype in _TOKEN_ENTRIES.items()}
    if judged:
        spec["margin"] = ((), "float32")
    if references:
        spec["reference_log_probs"] = ((2,), "float32")
    return spec
