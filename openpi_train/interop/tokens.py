"""What a model's tokens stand for: the tokenizer's files, which lie in every checkpoint, and what tells them apart.

    <step>/tokenizer/tokenizer.model      the SentencePiece model for words
    <step>/tokenizer/fast/                the FAST processor's files for actions, where the model has such tokens

With them a checkpoint answers wherever it is copied to. Read next: `policy/loading.py`, which takes them from there.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from openpi_train.data import files, places
from openpi_train.data.tokenizer import BYTES, FILE, Tokenizer, load_tokenizer
from openpi_train.interop.place import Place
from openpi_train.models.base import ModelConfig
from openpi_train.runtime.exits import CheckpointError

FOLDER, FAST = "tokenizer", "fast"
_FLAGS, _TOKENIZED = ("data.tokenizer", "model.fast_tokenizer"), ("words", "actions")


def open_tokenizer(model: ModelConfig, name: str, *, offline: bool = False) -> Tokenizer:
    """The tokenizer of this name, as `load_tokenizer` finds it; the built-in one for a model that reads no text.

    Raises FileNotFoundError and ValueError as `load_tokenizer` does.
    """
    return load_tokenizer(name if model.reads_text else BYTES, offline=offline, max_vocab_size=model.vocab_size)


def tokens_fingerprint(model: ModelConfig, tokenizer: Any) -> str | None:
    """What the model's tokens stand for: `Tokenizer.fingerprint`, and behind a "+" that of its FAST processor.

    None for a model that reads no text: all tokenizers are the same to it.
    """
    if not model.reads_text:
        return None
    chunks = model.chunk_tokenizer(tokenizer)
    return tokenizer.fingerprint if chunks is None else f"{tokenizer.fingerprint}+{chunks.fingerprint[:16]}"


def check_tokenizer(trained_with: str | None, given: str | None, *, where: str) -> None:
    """Raise CheckpointError where the weights of `where` were trained with another tokenizer than is `given`.

    Both are of `tokens_fingerprint`; nothing is said of what one of them does not know.
    """
    if trained_with is None or given is None:
        return
    for then, now, name, what in zip(trained_with.split("+"), given.split("+"), _FLAGS, _TOKENIZED, strict=False):
        if then != now:
            raise CheckpointError(
                f"{where} was trained with a tokenizer of fingerprint {then}, --{name.replace('_', '-')} has {now}: "
                f"the same {what} would be other tokens. Give the tokenizer that it was trained with (`{name}` in its "
                "experiment.json), or start from other weights"
            )


def token_files(model: ModelConfig, tokenizer: Any) -> dict[str, bytes]:
    """The files of the tokenizers, by path in a checkpoint's directory; none for a model that reads no text."""
    if not model.reads_text:
        return {}
    chunks = model.chunk_tokenizer(tokenizer)
    fast = {} if chunks is None else chunks.files()
    return {f"{FOLDER}/{FILE}": tokenizer.model, **{f"{FOLDER}/{FAST}/{name}": fast[name] for name in fast}}


def token_files_of(step: Place) -> Place | None:
    """The folder of these files in a checkpoint's directory; None where there is none, as in other trainers'."""
    return step / FOLDER if (step / FOLDER).has(FILE) else None


def on_disk(folder: Place) -> Path:
    """The same folder, or of one in a bucket a copy in the project's own folder."""
    if folder.local is not None:
        return folder.local
    content = {name: folder.read(name) for name in folder.names()}
    digest = hashlib.sha256(repr(sorted(content.items())).encode()).hexdigest()[:16]
    copy = places.home() / "tokenizers" / digest
    for name, data in content.items():
        files.write_bytes(copy / name, data)
    return copy


def with_files(model: ModelConfig, folder: Path) -> ModelConfig:
    """The model's config with the FAST processor in `folder`, where it has one."""
    if not (folder / FAST).is_dir() or not hasattr(model, "fast_tokenizer"):
        return model
    return dataclasses.replace(model, fast_tokenizer=str(folder / FAST))
