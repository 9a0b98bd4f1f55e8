"""The tokenizer in a checkpoint (`data/robot/tokens.py`), which lets a copied checkpoint be used anywhere.

Read next: `policy/loading.py`, which uses it.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from openpi_train.data.core import cache_folders, files
from openpi_train.data.robot.tokens import FAST
from openpi_train.data.tokenizers.text_tokenizer import FOLDER
from openpi_train.data.tokenizers.tokenizer import FILE
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored
from openpi_train.models.model_config import PolicyConfig
from openpi_train.runtime.exits import CheckpointError

# Files of a language model's tokenizer folder, one of which is always there.
_OF_LANGUAGE_MODELS = ("tokenizer.json", "config.json")
_FLAGS, _TOKENIZED = ("data.tokenizer", "model.fast_tokenizer"), ("words", "actions")


def check_tokenizer(trained_with: str | None, given: str | None, *, where: str) -> None:
    """Raise CheckpointError if the weights of `where` were trained with another tokenizer than `given`.

    Both are from `tokens_fingerprint`; parts that one of them lacks are not compared.
    """
    if trained_with is None or given is None:
        return
    for then, now, name, what in zip(trained_with.split("+"), given.split("+"), _FLAGS, _TOKENIZED, strict=False):
        if then != now:
            raise CheckpointError(
                f"{where} was trained with a tokenizer of fingerprint {then}, --{name.replace('_', '-')} has {now}: "
                f"the same {what} would give other tokens. Give the tokenizer of its training (`{name}` in its "
                "experiment.json), or start from other weights"
            )


def token_files_of(step: Place) -> Place | None:
    """The folder of the tokenizer's files in a checkpoint's directory; None if there is none, as in other trainers'."""
    folder = step / FOLDER
    return folder if any(folder.has(name) for name in (FILE, *_OF_LANGUAGE_MODELS)) else None


def copy_token_files(stored: Stored, directory: Path, names: Iterable[str]) -> None:
    """Copy the checkpoint's files of these names into a directory, as far as there are any."""
    carried = stored.token_files
    for name in names:
        if carried is not None and carried.has(name):
            files.write_bytes(directory / name, carried.read(name))


def on_disk(folder: Place) -> Path:
    """The folder on disk: itself, or for one in a bucket a copy in the project's cache folder."""
    if folder.local is not None:
        return folder.local
    content = {name: folder.read(name) for name in folder.names()}
    digest = hashlib.sha256(repr(sorted(content.items())).encode()).hexdigest()[:16]
    copy = cache_folders.home() / "tokenizers" / digest
    for name, data in content.items():
        files.write_bytes(copy / name, data)
    return copy


def with_files(model: PolicyConfig, folder: Path) -> PolicyConfig:
    """The model's config with the FAST processor in `folder`, if it has one."""
    return model.with_chunk_processor(str(folder / FAST)) if (folder / FAST).is_dir() else model
