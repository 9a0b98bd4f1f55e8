"""Tokenization of prompts with the tokenizer of a published language model, a `tokenizer.json`, as SmolVLA does it.

Read next: `text_tokenizer.py`, which reads the files, and `tokenizer.py` for SentencePiece models.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np

from openpi_train.data.core.hub import SCHEME
from openpi_train.data.tokenizers.text_tokenizer import FILES, TOKENIZER, TextTokenizer, load_text_tokenizer
from openpi_train.data.tokenizers.tokenizer import FILE, Tokenizer


class PublishedTokenizer(Tokenizer):
    """The words of a published language model, in SmolVLA's format of prompts: the instruction, then a newline.

    Picklable. The instruction is not changed, and the newline not tokenized apart, as in LeRobot.
    """

    def __init__(self, words: TextTokenizer, offline: bool = False, cuts: bool = True):
        self.words, self.name, self.offline, self.cuts = words, words.name, offline, cuts
        self._truncated: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return PublishedTokenizer, (self.words, self.offline, self.cuts)

    def __repr__(self) -> str:
        return f"PublishedTokenizer({self.name!r}, {self.vocab_size} tokens)"

    @property
    def vocab_size(self) -> int:
        return self.words.num_tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        return self.words.fingerprint

    def without_cuts(self) -> "PublishedTokenizer":
        return PublishedTokenizer(self.words, self.offline, cuts=False)

    def files(self) -> dict[str, bytes]:
        return {name: content for name, content in self.words.files.items() if name in FILES}

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """The tokens of a text, unchanged; `bos` adds those that the tokenizer puts before every text, if any."""
        end = [self.words.eos] if eos and self.words.eos is not None else []
        return [*(self.words.begin if bos else ()), *self.words.encode([text])[0].tokens, *end]

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        return self.words.decode(tokens, skip_special_tokens=True)

    def prompt_tokens(self, text: str, state: np.ndarray | None = None) -> list[int]:
        """The tokens of `prompt`, neither cut nor padded. Raises ValueError for a state, which has no such format."""
        if state is not None:
            raise ValueError(
                f"{self.name} is a tokenizer.json, whose prompts have no state in them: this model needs a "
                "SentencePiece model (--data.tokenizer)"
            )
        return self.encode(text if text.endswith("\n") else f"{text}\n", bos=True)

    def longest_prompt(self, text: str, num_state_dims: int | None = None) -> int:
        return len(self.prompt_tokens(text, None if num_state_dims is None else np.zeros(num_state_dims)))


def is_published(name: str) -> bool:
    """Whether `name` is `hub:USER/NAME`, or a folder or file of a `tokenizer.json` without a SentencePiece model."""
    path = Path(name).expanduser()
    in_folder = (path / TOKENIZER).is_file() and not (path / FILE).is_file()
    return name.startswith(SCHEME) or path.name == TOKENIZER or in_folder


def load_published_tokenizer(
    name: str, *, offline: bool = False, max_vocab_size: int | None = None
) -> PublishedTokenizer:
    """Load the tokenizer of a folder, or of `hub:USER/NAME`; `max_vocab_size` is the size of the model's vocabulary.

    Raises FileNotFoundError if there is none, DataError if the hub does not give it, ValueError if it is damaged or has
    too many tokens.
    """
    words = load_text_tokenizer(name, offline=offline)
    if max_vocab_size is not None and words.num_tokens > max_vocab_size:
        raise ValueError(
            f"tokenizer {name} has {words.num_tokens} tokens, the model's vocabulary only {max_vocab_size}: give the "
            "tokenizer that belongs to the model (--data.tokenizer)"
        )
    return PublishedTokenizer(words, offline)
