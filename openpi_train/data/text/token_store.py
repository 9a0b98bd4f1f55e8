"""The tokens of a dataset, memory-mapped. Read next: `token_cache.py` (which writes them), `text_rows.py`.

tokens int32 [tokens], targets bool [tokens]      all texts, one after the other
text_ends int64 [texts]                           a preference has two texts, chosen and rejected
first_target, last_target int32 [texts]           without the first token, which is never predicted
digests uint64 [samples]                          of the prompt if there is one, else of the text
files int32, lines int64 [samples]                the place of each sample
labels int8 [samples]                             1 desirable, 0 not, -1 without a label
margins float32 [samples], references float32 [samples, 2]      nan where there is none
"""

from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.findings import Finding
from openpi_train.data.core.tables import Tables
from openpi_train.data.text.text_files import TextFile


class TokenStore:
    """The stored samples of one dataset. A pickled copy maps the same files."""

    def __init__(self, stored: Tables):
        self._stored = stored
        self.fingerprint: str = stored.manifest["fingerprint"]
        self.kind: str = stored.manifest["kind"]
        # Whether they were rendered by a chat template; of an older cache, by one that its tokenizer has.
        self.conversational: bool = stored.manifest.get("conversational", False)
        # How many records were left out, and the first of them; None if none.
        self.dropped: dict[str, Any] | None = stored.manifest["dropped"]
        self.findings = [Finding.from_json(one) for one in stored.manifest["findings"]]
        self.largest_token: int = stored.manifest["largest_token"]
        arrays = stored.arrays
        self.tokens, self.targets = arrays["tokens"], arrays["targets"]
        self.text_ends, self.digests = arrays["text_ends"], arrays["digests"]
        self.first_target, self.last_target = arrays["first_target"], arrays["last_target"]
        self.labels, self.margins, self.references = (arrays[name] for name in ("labels", "margins", "references"))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self._stored,)

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def texts_per_sample(self) -> int:
        """2 for preferences, else 1."""
        return 2 if self.kind == "preference" else 1

    @property
    def text_lengths(self) -> np.ndarray:
        """The number of tokens of each text, int64 [texts]."""
        return np.diff(self.text_ends, prepend=0)

    @property
    def sources(self) -> dict[str, str]:
        """The SHA-256 of each file by its name."""
        return {name: sha256 for name, _, _, sha256 in self._stored.manifest["sources"]}

    def text(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens int32 [t] and targets bool [t] of a text."""
        start, end = self.text_ends[number - 1] if number else 0, self.text_ends[number]
        return self.tokens[start:end], self.targets[start:end]

    def origin(self, sample: int) -> tuple[int, int]:
        """The number of a sample's file, and that of its record there (`TextFile.records`)."""
        return int(self._stored.arrays["files"][sample]), int(self._stored.arrays["lines"][sample])

    def place(self, sample: int) -> str:
        """The file and line of a sample."""
        file, line = self.origin(sample)
        name = self._stored.manifest["sources"][file][0]
        return TextFile(Path(name), name).place(line)
