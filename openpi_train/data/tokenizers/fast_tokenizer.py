"""FAST tokenizer: encodes action chunks by a cosine transform over time and byte-pair encoding (Pertsch et al. 2025).

Reads and writes the published processor's format (huggingface.co/physical-intelligence/fast: `processor_config.json`,
`tokenizer.json`), and fits new tokenizers to data. Read next: `robot/action_prompt.py`, which puts the tokens into
prompts, and `models/pi0_fast/action_tokens.py`, which decodes them on devices.
"""

import functools
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from openpi_train.data.core import files
from openpi_train.data.core.hub import hub_file

logger = logging.getLogger(__name__)

PUBLISHED = "physical-intelligence/fast"

_CONFIG, _BPE = "processor_config.json", "tokenizer.json"
_HOW = (
    f"give the directory of a FAST processor with --model.fast-tokenizer: a copy of huggingface.co/{PUBLISHED}, or "
    "one fitted to your data (python -m openpi_train data fit-fast <experiment> --out DIR)"
)
# Initial alphabet of the byte-pair encoding: every byte, so that any text can be encoded.
_NUM_BYTES = 256
# Far above any coefficient: 6 500 times the range of normalised actions.
_LAST_CHARACTER = "\uffff"


class FastTokenizer:
    """Encodes chunks as tokens and decodes them. Picklable. A chunk is normalised actions [h, a], float.

    Coefficients are multiplied by `scale`, rounded, and shifted by `-min_token` to give characters; byte-pair encoding
    of their UTF-8 bytes gives the tokens. Raises ValueError if `bpe` is not such a tokenizer; `name` is for messages.
    """

    def __init__(self, bpe: str, *, scale: float, min_token: int, name: str = "FAST tokenizer"):
        self.name, self.scale, self.min_token = name, float(scale), int(min_token)
        self._json = bpe
        try:
            self._bpe = tokenizers.Tokenizer.from_str(bpe)
        except Exception as error:  # the library raises no narrower class
            raise ValueError(f"{name}: {_BPE} is not a tokenizer of the library `tokenizers`: {error}") from error
        if not isinstance(self._bpe.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(f"{name}: {_BPE} is not a byte-level tokenizer, as a FAST processor's is; {_HOW}")

    def __repr__(self) -> str:
        return f"FastTokenizer({self.name!r}, {self.vocab_size} tokens, scale {self.scale:g})"

    @property
    def vocab_size(self) -> int:
        """Number of tokens; token ids are below it."""
        return self._bpe.get_vocab_size()

    @property
    def fingerprint(self) -> str:
        """A digest of everything that the tokens depend on."""
        return hashlib.sha256(f"{self.scale} {self.min_token} {self._json}".encode()).hexdigest()

    def encode(self, chunk: np.ndarray) -> list[int]:
        """The tokens of a chunk [h, a]. Raises ValueError if a coefficient has no token."""
        text = self._text(chunk)
        tokens = self._bpe.encode(text).ids
        if self._bpe.decode(tokens, skip_special_tokens=False) != text:
            raise ValueError(f"{self.name} has no tokens for some of this chunk's coefficients: {_HOW}")
        return tokens

    def decode(self, tokens: Sequence[int], horizon: int, action_dim: int) -> np.ndarray | None:
        """The chunk [horizon, action_dim] that these tokens encode, float64; None if they encode no such chunk."""
        text = self._bpe.decode([int(token) for token in tokens], skip_special_tokens=False)
        if len(text) != horizon * action_dim or "\N{REPLACEMENT CHARACTER}" in text or max(text) > _LAST_CHARACTER:
            return None
        coefficients = np.array([ord(character) for character in text], float) + self.min_token
        coefficients = coefficients.reshape(horizon, action_dim) / self.scale
        return from_frequencies(coefficients)

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        """The bytes that each token stands for."""
        places = {character: byte for byte, character in enumerate(_byte_characters())}

        def piece(token: int) -> bytes:
            text = self._bpe.id_to_token(token) or ""
            found = [places.get(character) for character in text]
            # The library's rule for tokens that contain other characters.
            return text.encode() if None in found else bytes(found)  # pyright: ignore[reportArgumentType]

        return [piece(token) for token in range(self.vocab_size)]

    def files(self) -> dict[str, bytes]:
        """The published processor's files by name. `AutoProcessor` reads them with the hub repository's code."""
        config = {
            "processor_class": "UniversalActionProcessor",
            "auto_map": {"AutoProcessor": f"{PUBLISHED}--processing_action_tokenizer.UniversalActionProcessor"},
            "scale": int(self.scale) if self.scale.is_integer() else self.scale,
            "vocab_size": self.vocab_size,
            "min_token": self.min_token,
            "action_dim": None,
            "time_horizon": None,
        }
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        return {
            _BPE: self._json.encode(),
            "special_tokens_map.json": b"{}\n",
            "tokenizer_config.json": files.json_text(tokenizer).encode(),
            _CONFIG: files.json_text(config).encode(),
        }

    def save(self, directory: str | Path) -> Path:
        """Write these files to `directory`, the config last; returns the directory."""
        for name, content in self.files().items():
            files.write_bytes(Path(directory) / name, content)
        return Path(directory)

    def _text(self, chunk: np.ndarray) -> str:
        rounded = np.around(_frequencies(chunk, axis=0) * self.scale)
        if not np.isfinite(rounded).all():
            raise ValueError(f"{self.name}: the chunk holds NaN or infinity")
        # Values below the range are clipped to its minimum, as in the published processor.
        return "".join(map(chr, np.maximum(rounded - self.min_token, 0).astype(int).flat))


def _frequencies(chunks: np.ndarray, axis: int) -> np.ndarray:
    """The cosine transform over time, whose axis is given."""
    from scipy import fft  # takes a tenth of a second, so only on use

    return np.asarray(fft.dct(chunks, axis=axis, norm="ortho"))


def from_frequencies(coefficients: np.ndarray) -> np.ndarray:
    """The inverse of the cosine transform over time, the first axis; float64."""
    from scipy import fft

    return np.asarray(fft.idct(coefficients, axis=0, norm="ortho"))


def fit_fast(chunks: np.ndarray, *, vocab_size: int = 1024, scale: float = 10.0) -> FastTokenizer:
    """A tokenizer of at most `vocab_size` tokens fitted to normalised chunks [n, h, a].

    Unlike the published `fit`, its alphabet has every byte, so that every chunk can be encoded, and the text is not
    split into words before merging. Raises ValueError if there is nothing to fit or no room for merges.
    """
    if vocab_size <= _NUM_BYTES:
        raise ValueError(f"vocab_size {vocab_size} leaves no tokens besides the {_NUM_BYTES} bytes; give 512 or more")
    if not scale > 0:
        raise ValueError(f"scale {scale} must be above 0")
    if chunks.ndim != 3 or not chunks.size or not np.isfinite(chunks).all():
        raise ValueError(f"chunks of shape {chunks.shape} are not finite action chunks [n, h, a]")
    rounded = np.around(_frequencies(chunks, axis=1) * scale).astype(int)
    low = int(rounded.min())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=10_000,
    )
    bpe.train_from_iterator(("".join(map(chr, chunk.flat)) for chunk in rounded - low), trainer=trainer)
    return FastTokenizer(bpe.to_str(), scale=scale, min_token=low, name="fitted FAST tokenizer")


@functools.cache
def load_fast(name: str, *, offline: bool = False) -> FastTokenizer:
    """Load the FAST processor from the directory `name`, or else from the hub repository `name`.

    Raises FileNotFoundError if neither exists, ValueError if it is not a FAST processor.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        config, bpe = path / _CONFIG, path / _BPE
        # Newer versions of transformers keep a processor's tokenizer in a separate folder.
        bpe = bpe if bpe.is_file() else path / "bpe_tokenizer" / _BPE
        missing = [str(file) for file in (config, bpe) if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"{name} is not a FAST processor, it lacks {' and '.join(missing)}: {_HOW}")
    else:
        config, bpe = (
            hub_file(name, file, offline=offline, what="FAST processor", how=_HOW) for file in (_CONFIG, _BPE)
        )
    try:
        values = json.loads(config.read_text())
        scale, min_token = float(values["scale"]), int(values["min_token"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} is not a FAST processor's: {type(error).__name__}: {error}; {_HOW}") from error
    return FastTokenizer(bpe.read_text(encoding="utf-8"), scale=scale, min_token=min_token, name=os.fspath(name))


def _byte_characters() -> list[str]:
    """The character for each byte in byte-level tokens: its own if printable, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte if byte in visible else next(others)) for byte in range(_NUM_BYTES)]
