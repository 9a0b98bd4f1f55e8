"""Encodes a dataset once, into a cache that later openings read; an interrupted encoding is continued.

Read next: `encoded_parts.py`, `token_store.py` (what is stored).

    <cache_dir>/<label>-<key>/      one for each dataset, tokenizer, chat template and choice of targets
      lock                          held by the process that encodes; all others wait
      manifest.json                 the files with their digests, fingerprint, tables with checksums: written last
      tables-<key>/                 the arrays of a `TokenStore`
      .tables.parts-<key>/          while it is encoded: finished parts, each written atomically
"""

import dataclasses
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from openpi_train.data.core import cache_folders, tables
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.sidecar import digest
from openpi_train.data.text.encoded_parts import (
    OF_SAMPLES,
    OF_TEXTS,
    OF_TOKENS,
    PART_RECORDS,
    EncodedParts,
    column_of,
    joined,
    told_of,
)
from openpi_train.data.text.text_encoder import TextEncoder
from openpi_train.data.text.text_files import TextFile
from openpi_train.data.text.token_store import TokenStore
from openpi_train.runtime import locks

logger = logging.getLogger(__name__)

# Increase it when the content of the arrays changes: all datasets are then encoded again.
FORMAT = 5
# Tokens for what the tokenizer does not know: the kind of their finding.
UNKNOWN = "unknown tokens"
# An experiment that trains on each kind.
_TRAINS = {
    "language modelling": "lm_sft",
    "prompt/completion": "lm_sft",
    "preference": "lm_dpo",
    "unpaired preference": "gsm8k_kto_smollm2_135m --data.kind unpaired",
    "prompt only": "lm_grpo",
}
# The columns of each kind as the flag names them.
_COLUMNS = {
    "language modelling": "text=COLUMN or messages=COLUMN",
    "prompt/completion": "prompt=COLUMN completion=COLUMN",
    "preference": "prompt=COLUMN chosen=COLUMN rejected=COLUMN",
    "unpaired preference": "prompt=COLUMN completion=COLUMN label=COLUMN",
    "prompt only": "prompt=COLUMN",
}
# What rows depend on.
_CONTENT = ("tokens", "targets", "text_ends", "digests", "labels", "margins", "references")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCache:
    """The cached tokens of some files, which need not exist yet.

    Args: `name` is the dataset's name for messages and `where` its location; `columns` maps columns of the types to the
    files' columns (empty: they have the types' names); `kinds` are the types that the run can use.
    """

    name: str
    where: str
    files: Sequence[TextFile]
    encoder: TextEncoder
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kinds: Sequence[str] = ()
    cache_dir: str | None = None
    on_bad_record: Literal["error", "skip"] = "error"

    @property
    def place(self) -> Path:
        """The cache's folder."""
        names = [file.name for file in self.files]
        identity = [self.where, names, dict(self.columns), self.encoder.digest, self.on_bad_record]
        return cache_folders.indexes(self.cache_dir) / f"{self.name}-{digest(json.dumps(identity, sort_keys=True))}"

    def open(self) -> TokenStore:
        """Open the tokens, encoding the files first if the cache is missing, stale or damaged.

        Raises BadRecord naming file and line, ValueError if records are of several types or of one that the run cannot
        use, OSError if the cache cannot be written.
        """
        found = self._find()
        if found is None:
            with (
                tables.explain_cache_errors(self.place, "--data.cache-dir"),
                locks.held(self.place / tables.LOCK, f"tokens of {self.name}"),
            ):
                found = self._find() or self._build()
        require_kind(self.name, found.kind, self.kinds)
        if dropped := found.dropped:
            logger.warning(
                "%s: %d bad records are left out; the first: %s", self.name, dropped["number"], dropped["first"]
            )
        return found

    def is_ready(self) -> bool:
        """Whether `open` encodes nothing, unless the cache is damaged: the files are those that were encoded."""
        manifest = tables.read_manifest(self.place)
        if manifest is None or manifest.get("format") != FORMAT:
            return False
        try:
            return self._changed(manifest["sources"]) is None
        except (KeyError, TypeError, ValueError):  # damaged
            return False

    def _find(self) -> TokenStore | None:
        """The existing tokens, if they are complete and the files have not changed since; else None."""
        manifest = tables.read_manifest(self.place)
        if manifest is None or manifest.get("format") != FORMAT:
            return None
        try:
            changed = self._changed(manifest["sources"])
            if changed is None:
                return TokenStore(tables.open_tables(self.place, manifest, check_crc=True))
            logger.info("%s: %s changed since it was encoded: encoding again", self.name, changed)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("the tokens %s are damaged (%r): encoding again", self.place, error)
        return None

    def _changed(self, sources: Sequence[Sequence[object]]) -> str | None:
        """The first file whose content is another one than when it was encoded."""
        for file, (_, size, mtime_ns, sha256) in zip(self.files, sources, strict=True):
            stat = file.path.stat()
            # A copied or touched file has another time, and the same content.
            if stat.st_size != size or (stat.st_mtime_ns != mtime_ns and file.sha256() != sha256):
                return file.name
        return None

    def _build(self) -> TokenStore:
        started = time.monotonic()
        stats = [file.path.stat() for file in self.files]
        sources = [
            [file.name, stat.st_size, stat.st_mtime_ns, file.sha256()]
            for file, stat in zip(self.files, stats, strict=True)
        ]
        content = digest(json.dumps([FORMAT, PART_RECORDS, [source[3] for source in sources]]))
        folder = self.place / f".tables.parts-{content}"
        for stale in self.place.glob(".tables*"):
            if stale != folder:
                shutil.rmtree(stale, ignore_errors=True)
        parts = EncodedParts(
            folder=folder,
            name=self.name,
            files=self.files,
            encoder=self.encoder,
            columns=self.columns,
            on_bad_record=self.on_bad_record,
        ).encode()
        with tables.drafted(self.place) as draft:
            totals = _join(parts, draft)
        bad = [line for part in parts for line in told_of(part)["bad"]]
        if not totals["samples"]:
            why = f"all {len(bad)} records are bad; the first: {bad[0]}" if bad else "it is empty"
            raise BadRecord(f"no text in {self.name} ({', '.join(file.name for file in self.files[:3])}): {why}")
        manifest = {
            "format": FORMAT,
            "dataset": self.where,
            "sources": sources,
            "kind": next(kind for part in parts if (kind := told_of(part)["kind"])),
            "conversational": any("conversational" in (told_of(part)["type"] or "") for part in parts),
            "largest_token": totals["largest_token"],
            "dropped": {"number": len(bad), "first": bad[0]} if bad else None,
            "findings": [finding.as_json() for finding in self._findings(parts, totals)],
            "fingerprint": _fingerprint(draft),
            "files": tables.list_files(draft),
        }
        manifest["tables"] = f"tables-{manifest['fingerprint'][:12]}"
        manifest = tables.publish(self.place, draft, manifest)
        logger.info(
            "%s: encoded in %.1f s: %d samples, %d tokens, %d targets",
            *(self.name, time.monotonic() - started, totals["samples"], totals["tokens"], totals["targets"]),
        )
        return TokenStore(tables.open_tables(self.place, manifest, check_crc=True))

    def _findings(self, parts: Sequence[Path], totals: Mapping[str, int]) -> list[Finding]:
        """What is suspicious in the texts."""
        tokenizer = self.encoder.tokenizer
        found = []
        number, first = _counted(parts, "endless")
        if number:
            known = ", ".join(repr(tokenizer.piece(token)) for token in self.encoder.ends) or "none"
            found.append(
                Finding(
                    kind="no stop token is a target",
                    count=number,
                    total=totals["texts"],
                    unit="texts",
                    where=first,
                    what=f"tokens that end a completion: {known}",
                    training="the model does not learn from them where an answer ends, so that it goes on until its "
                    "limit",
                    remedy="Give a chat template that writes one of these tokens after an answer "
                    "(--data.chat-template), or name the token that does end it as eos_token in tokenizer_config.json, "
                    "or as eos_token_id in generation_config.json, beside tokenizer.json",
                )
            )
        number, first = _counted(parts, "unknown")
        if number:
            found.append(
                Finding(
                    kind=UNKNOWN,
                    count=number,
                    total=totals["tokens"],
                    unit="tokens",
                    where=first,
                    what=f"{number / totals['tokens']:.2g} of all, read as {tokenizer.piece(tokenizer.unknown or 0)!r} "
                    f"by the tokenizer {tokenizer.name}",
                    training="the model reads and learns this one token in place of all of them",
                    remedy="Give a tokenizer that knows these characters, and the model that it belongs to",
                )
            )
        return found


def _counted(parts: Sequence[Path], what: str) -> tuple[int, str]:
    """How many of something all parts tell, and the place of the first."""
    told = [told_of(part)[what] for part in parts]
    return sum(one["number"] for one in told), next((one["first"] for one in told if one["number"]), "")


def require_kind(name: str, kind: str, kinds: Sequence[str]) -> None:
    """Raise ValueError if a dataset of this kind is not one of `kinds`, which the run can use; without them all are."""
    if kinds and kind not in kinds:
        raise ValueError(
            f"{name} is a dataset of {kind}; this run takes {' or '.join(kinds)}: train {_TRAINS[kind]} on it, or name "
            f"its columns of that type (--data.datasets.N.columns {' or '.join(_COLUMNS[one] for one in kinds)})"
        )


def _join(parts: Sequence[Path], draft: Path) -> dict[str, int]:
    """Write the arrays of all parts as those of a `TokenStore`; returns some numbers."""
    small = {name: joined(list(column_of(parts, name)), dtype) for name, dtype in OF_TEXTS.items()}
    for name, dtype in OF_SAMPLES.items():
        tail = (2,) if name == "references" else ()
        small[name] = np.concatenate([np.empty((0, *tail), dtype), *column_of(parts, name)])
    small["text_ends"] = np.cumsum(small.pop("text_lengths"), dtype=np.int64)
    tables.write_arrays(draft, small)
    num_tokens = int(small["text_ends"][-1]) if len(small["text_ends"]) else 0
    for name, dtype in OF_TOKENS.items():
        tables.write_array(draft, name, dtype, (num_tokens,), column_of(parts, name))
    num_targets = sum(int(targets.sum()) for targets in column_of(parts, "targets"))
    largest = max((int(tokens.max(initial=0)) for tokens in column_of(parts, "tokens")), default=0)
    num_texts = len(small["text_ends"])
    return {
        "samples": len(small["digests"]),
        "texts": num_texts,
        "tokens": num_tokens,
        "targets": num_targets,
        "largest_token": largest,
    }


def _fingerprint(draft: Path) -> str:
    """Digest of what rows depend on: not of the place of a sample, nor of how the samples are split into files."""
    found = hashlib.sha256()
    tables.add_arrays(found, draft, _CONTENT)
    return found.hexdigest()
