"""A model's tokenizers: how they are opened, their fingerprint, and their files in checkpoints.

    <step>/tokenizer/tokenizer.model      the SentencePiece model for words; or
    <step>/tokenizer/tokenizer.json       a language model's own tokenizer, with the files beside it
    <step>/tokenizer/fast/                the FAST processor's files for actions, if the model uses them

Read next: `interop/checkpoint_tokenizer.py`, which finds them in checkpoints.
"""

from openpi_train.data.robot.row_format import RowModel
from openpi_train.data.tokenizers.published_tokenizer import is_published, load_published_tokenizer
from openpi_train.data.tokenizers.text_tokenizer import FOLDER
from openpi_train.data.tokenizers.tokenizer import BYTES, Tokenizer, load_tokenizer

FAST = "fast"


def open_tokenizer(model: RowModel, name: str, *, offline: bool = False) -> Tokenizer:
    """Load the tokenizer `name`, of either kind; a model that reads no text gets the built-in one.

    Raises FileNotFoundError and ValueError as `load_tokenizer` does.
    """
    name = name if model.rows.reads_text else BYTES
    load = load_published_tokenizer if is_published(name) else load_tokenizer
    return load(name, offline=offline, max_vocab_size=model.rows.vocab_size)


def tokens_fingerprint(model: RowModel, tokenizer: Tokenizer) -> str | None:
    """Fingerprint of the model's tokenizers: `Tokenizer.fingerprint`, followed by "+" and that of its FAST processor.

    None for a model that reads no text, for which all tokenizers are equivalent.
    """
    if not model.rows.reads_text:
        return None
    chunks = model.rows.chunk_tokenizer(tokenizer)
    return tokenizer.fingerprint if chunks is None else f"{tokenizer.fingerprint}+{chunks.fingerprint[:16]}"


def token_files(model: RowModel, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of the tokenizers, by path in a checkpoint's directory; empty for a model that reads no text."""
    if not model.rows.reads_text:
        return {}
    chunks = model.rows.chunk_tokenizer(tokenizer)
    fast = {} if chunks is None else chunks.files()
    files = {**tokenizer.files(), **{f"{FAST}/{name}": content for name, content in fast.items()}}
    return {f"{FOLDER}/{name}": content for name, content in files.items()}
