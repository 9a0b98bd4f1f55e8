"""Prompts that go on with an action chunk as FAST tokens, for models that learn to say them.

The forms and the place of FAST's tokens in the vocabulary are openpi's (`models/tokenizer.py`: FASTTokenizer).
Read next: `fast_tokenizer.py`, `tokenizer.py`, `models/action_tokens.py`.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from openpi_train.data.fast_tokenizer import FastTokenizer
from openpi_train.data.tokenizer import Tokenizer, state_text
from openpi_train.data.transforms import padded

Row = dict[str, Any]
# pi0_fast: lower-cased, and "Action: " is to be said too; pi05: pi0.5's prompt as it is, and then the chunk.
Form = Literal["pi0_fast", "pi05"]

# The last tokens of PaliGemma's vocabulary are for image segmentation; FAST's stand before them, in falling order.
SKIPPED_TOKENS = 128
_PROBE = "Task: abcdefghijklmnopqrstuvwxyz, State: -0 1 2 3 4 5 6 7 8 9;\nAction: |"


def vocabulary_token(fast_token: Any, vocab_size: int) -> Any:
    """The token of the model's vocabulary that stands for a token of FAST's; its own inverse. Works on arrays."""
    return vocab_size - 1 - SKIPPED_TOKENS - fast_token


def check_vocabulary(tokenizer: Tokenizer, fast: FastTokenizer, vocab_size: int) -> None:
    """Raise ValueError where FAST's tokens would stand for words, too."""
    first = vocabulary_token(fast.vocab_size - 1, vocab_size)
    words = 1 + max(tokenizer.encode(_PROBE, bos=True, eos=True))
    if first < words:
        raise ValueError(
            f"{fast.name} has {fast.vocab_size} tokens, which with {SKIPPED_TOKENS} others end the model's vocabulary "
            f"of {vocab_size}, where {tokenizer.name} has words up to {words}: set --model.vocab-size "
            f"{words + SKIPPED_TOKENS + fast.vocab_size} or more, or fit fewer tokens (data fit-fast --vocab-size)"
        )


@dataclasses.dataclass(frozen=True)
class TokenizeActionPrompt:
    """`prompt`, `state` and `actions` -> `prompt_tokens` int32 [max_len], `prompt_mask`, `token_ar_mask` and
    `token_loss_mask` bool [max_len].

    State and actions are normalised; it stands before `PadDims`: the state is written unpadded, and actions padded to
    `action_dim` here. Prompt and present state come first and see each other; the chunk follows, token by token, and is
    to be predicted. Without `actions` (serving) only the first part is there. What exceeds `max_len` is cut.
    """

    tokenizer: Tokenizer
    fast: FastTokenizer
    vocab_size: int
    max_len: int
    action_dim: int
    form: Form = "pi0_fast"

    def __call__(self, row: Row) -> Row:
        if "prompt" not in row:
            raise ValueError("the row has no prompt; give the dataset one with --data.datasets.N.prompt")
        row = dict(row)
        text = row.pop("prompt")
        state = row["state"] if row["state"].ndim == 1 else row["state"][-1]
        first, said = self._first(text, state), self._said(row["actions"]) if "actions" in row else []
        tokens = self.tokenizer.fit(first + said, self.max_len, text)
        place = np.arange(self.max_len)
        is_said = (place >= len(first)) & (place < len(first) + len(said))
        mask = place < len(first) + len(said)
        return row | {
            "prompt_tokens": tokens,
            "prompt_mask": mask,
            "token_ar_mask": is_said,
            "token_loss_mask": is_said.copy(),
        }

    def _first(self, text: str, state: np.ndarray) -> list[int]:
        if self.form == "pi05":
            return self.tokenizer.prompt_tokens(text, state)
        text = text.lower().strip().replace("_", " ")
        return self.tokenizer.encode(f"Task: {text}, State: {state_text(state)};\n", bos=True)

    def _said(self, actions: np.ndarray) -> list[int]:
        tokens = self.fast.encode(padded("actions", actions, self.action_dim))
        lead = self.tokenizer.encode("Action: ") if self.form == "pi0_fast" else []
        said = [vocabulary_token(token, self.vocab_size) for token in tokens]
        return lead + said + self.tokenizer.encode("|", eos=True)
