"""Interface of the tokenizer of a robot policy's prompts, as models and the steps of a row use it.

`tokenizer.py: Tokenizer` documents each entry, and implements it.
"""

from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class PromptTokenizer(Protocol):
    """A tokenizer of prompts. `name` is for messages; `offline` forbids access to the hub for companion files."""

    name: str
    offline: bool

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]: ...
    def prompt(self, text: str, max_len: int, state: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]: ...
    def prompt_tokens(self, text: str, state: np.ndarray | None = None) -> list[int]: ...
    def fit(self, tokens: list[int], max_len: int, text: str) -> np.ndarray: ...
    def longest_prompt(self, text: str, num_state_dims: int | None = None) -> int: ...
