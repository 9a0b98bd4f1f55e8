"""Tokenization of prompts with a SentencePiece model: PaliGemma's from a file or the hub, or a small one trained here.

The prompt formats are openpi's (`models/tokenizer.py`). Read next: `published_tokenizer.py` (other tokenizers),
`robot/transforms.py` (`TokenizePrompt`).
"""

import functools
import hashlib
import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np
import sentencepiece

from openpi_train.data.core import cache_folders, files, hub
from openpi_train.data.core.hub import hub_file
from openpi_train.runtime.exits import DataError

logger = logging.getLogger(__name__)

# File name of a SentencePiece model.
FILE = "tokenizer.model"
_HOW = (
    "give the path of a SentencePiece model with --data.tokenizer (PaliGemma's is `tokenizer.model` of "
    "google/paligemma-3b-pt-224 on the hub, or gs://big_vision/paligemma_tokenizer.model)"
)
# Name of the built-in tokenizer with one piece per byte, for runs on fake data.
BYTES = "bytes"

_STATE_BINS = 256
# " 255" is the longest text of a bin in a prompt.
_MOST_PIECES_PER_NUMBER = 4
# 256 bytes, 4 special pieces, and the space, which SentencePiece writes as a character of its own.
_LEAST_VOCAB, _SPACE = 261, "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
    """A SentencePiece model and the prompt formats of pi0 and pi0.5. Picklable.

    Raises ValueError if `model` is not a SentencePiece model; `name` is for messages. `offline` forbids access to the
    hub when companion files are loaded. Prompts that are too long are truncated, or refused if `cuts` is False.
    """

    def __init__(self, model: bytes, name: str = "tokenizer", offline: bool = False, cuts: bool = True):
        self.name, self.offline, self.cuts = name, offline, cuts
        self.model = model
        self._truncated: set[str] = set()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            loaded = False
        if not loaded:
            raise ValueError(f"{name} is not a SentencePiece model ({len(model)} bytes); give its `.model` file")

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.model, self.name, self.offline, self.cuts)

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.vocab_size} pieces)"

    @property
    def vocab_size(self) -> int:
        """Number of pieces; tokens are below it."""
        return self._processor.vocab_size()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the pieces in order: under another fingerprint the same token ids mean other text."""
        pieces = (self._processor.id_to_piece(token) for token in range(self.vocab_size))
        return hashlib.sha256("\n".join(pieces).encode()).hexdigest()[:16]

    def without_cuts(self) -> "Tokenizer":
        """The same tokenizer, which refuses prompts that are too long."""
        return Tokenizer(self.model, self.name, self.offline, cuts=False)

    def files(self) -> dict[str, bytes]:
        """What a checkpoint keeps of it, by name: enough to load it again."""
        return {FILE: self.model}

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """The tokens of a text, unchanged."""
        return self._processor.encode(text, add_bos=bos, add_eos=eos)

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """The text of tokens, without special tokens."""
        return self._processor.decode([int(token) for token in tokens])

    def prompt(self, text: str, max_len: int, state: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [max_len] and mask bool [max_len] of an instruction, cut or padded with 0.

        Without `state`, pi0's format; with it (normalised, [s]), pi0.5's, which writes it in 256 bins over [-1, 1].
        """
        tokens = self.prompt_tokens(text, state)
        return self.fit(tokens, max_len, text), np.arange(max_len) < len(tokens)

    def prompt_tokens(self, text: str, state: np.ndarray | None = None) -> list[int]:
        """The tokens of `prompt`, neither cut nor padded."""
        text = _clean(text)
        if state is None:
            # The newline is encoded separately, as in openpi: it must be its own token.
            return self.encode(text, bos=True) + self.encode("\n")
        return self.encode(f"Task: {text}, State: {state_text(state)};\nAction: ", bos=True)

    def fit(self, tokens: list[int], max_len: int, text: str) -> np.ndarray:
        """The tokens cut or padded with 0 to int32 [max_len]; a cut logs a warning that quotes `text`.

        Raises ValueError instead if `cuts` is False.
        """
        if len(tokens) > max_len and not self.cuts:
            raise ValueError(
                f"the prompt {text[:200]!r} has {len(tokens)} tokens; the model reads {max_len}: shorten it, or have "
                "it cut as training does (serve --cut-prompts, load_policy(..., cut_prompts=True))"
            )
        if len(tokens) > max_len:
            self._warn_of_truncation(text, len(tokens), max_len)
        padded = np.zeros(max_len, np.int32)
        padded[: len(tokens)] = tokens[:max_len]
        return padded

    def longest_prompt(self, text: str, num_state_dims: int | None = None) -> int:
        """Maximum number of tokens in `prompt` of this text, uncut, with any state of `num_state_dims` if given.

        Exact for tokenizers that split numbers into digits (PaliGemma's does), an upper bound for others: no piece
        spans a space, so the counts add up.
        """
        if num_state_dims is None:
            return len(self.encode(_clean(text), bos=True)) + len(self.encode("\n"))
        around = len(self.encode(f"Task: {_clean(text)}, State:", bos=True)) + len(self.encode(";\nAction: "))
        return around + _MOST_PIECES_PER_NUMBER * num_state_dims

    def _warn_of_truncation(self, text: str, length: int, max_len: int) -> None:
        if text in self._truncated:
            return
        self._truncated.add(text)
        logger.warning(
            "prompt of %d tokens cut to %d: %r; raise --model.max-token-len to %d", length, max_len, text[:200], length
        )


def _clean(text: str) -> str:
    return text.strip().replace("_", " ").replace("\n", " ")


def discretize(state: np.ndarray) -> np.ndarray:
    """A normalised state in 256 bins over [-1, 1]: -1 below, 255 in the last bin and above."""
    return np.digitize(state, np.linspace(-1, 1, _STATE_BINS + 1)[:-1]) - 1


def state_text(state: np.ndarray) -> str:
    """The bins of a normalised state as prompts write them."""
    return " ".join(map(str, discretize(state)))


def load_tokenizer(name: str, *, offline: bool = False, max_vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer from the file `name`, or else from the hub repository `name`; `bytes` is built in.

    Args: `offline` uses only what the hub client has cached (so does HF_HUB_OFFLINE); `max_vocab_size` is the size of
    the model's vocabulary.

    Raises FileNotFoundError if neither exists, ValueError if it is not a tokenizer or has too many pieces.
    """
    tokenizer = Tokenizer(_train([" "], 0) if name == BYTES else _read_model(name, offline), name, offline)
    if max_vocab_size is not None and tokenizer.vocab_size > max_vocab_size:
        raise ValueError(
            f"tokenizer {name} has {tokenizer.vocab_size} pieces, the model's vocabulary only {max_vocab_size}: "
            "give the tokenizer that belongs to the model (--data.tokenizer)"
        )
    return tokenizer


def train_tokenizer(texts: Iterable[str], path: str | Path, vocab_size: int) -> Tokenizer:
    """Train a byte-pair SentencePiece model, write it to `path` and return it.

    Lossless: decoding restores every text exactly. Special pieces as in PaliGemma: pad 0, eos 1, bos 2, unk 3.
    `vocab_size` is an upper limit (256 bytes, 4 special pieces and the characters are always included).
    """
    model = _train(texts, vocab_size)
    files.write_bytes(Path(path), model)
    return Tokenizer(model, str(path))


def _train(texts: Iterable[str], vocab_size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=max(vocab_size, _LEAST_VOCAB), model_type="bpe",
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, hard_vocab_limit=False, minloglevel=2,
        # SentencePiece's defaults are lossy: they fold characters, spaces and newlines.
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False, byte_fallback=True,
        required_chars=_SPACE,
    )  # fmt: skip
    return model.getvalue()


def require_tokenizer(repository: str) -> None:
    """Raise DataError if neither the hub nor its client's cache has this repository. Nothing is downloaded."""
    try:
        hub.require(f"{hub.SCHEME}{repository}", "model", DataError, FILE)
    except DataError as error:
        raise DataError(f"{error}; or {_HOW}") from error


def _read_model(name: str, offline: bool) -> bytes:
    path = Path(name).expanduser()
    path = path / FILE if path.is_dir() else path
    if path.is_file():
        return path.read_bytes()
    if name.endswith(".model"):
        raise FileNotFoundError(f"no tokenizer at {name}: {_HOW}.{cache_folders.how_to_write(name)}")
    return hub_file(name, FILE, offline=offline, what="tokenizer", how=_HOW).read_bytes()
