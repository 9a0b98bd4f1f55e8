"""Prompts followed by an action chunk as FAST tokens, for models that predict actions as tokens.

The prompt formats and the ids of the FAST tokens in the vocabulary are openpi's (`models/tokenizer.py`: FASTTokenizer).
Read next: `tokenizers/fast_tokenizer.py`, `tokenizers/tokenizer.py`, `models/pi0_fast/action_tokens.py`.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from openpi_train.data.robot.transforms import padded
from openpi_train.data.tokenizers.fast_tokenizer import FastTokenizer
from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer
from openpi_train.data.tokenizers.tokenizer import state_text

Row = dict[str, Any]
# pi0_fast: the prompt is lower-cased, and "Action: " is predicted too; pi05: pi0.5's prompt unchanged, then the chunk.
Form = Literal["pi0_fast", "pi05"]

# The last tokens of PaliGemma's vocabulary are for image segmentation; FAST's come before them, in descending order.
SKIPPED_TOKENS = 128
_PROBE = "Task: abcdefghijklmnopqrstuvwxyz, State: -0 1 2 3 4 5 6 7 8 9;\nAction: |"


def vocabulary_token(fast_token: Any, vocab_size: int) -> Any:
    """The token id in the model's vocabulary for a FAST token id; its own inverse. Works on arrays."""
    return vocab_size - 1 - SKIPPED_TOKENS - fast_token


def check_vocabulary(tokenizer: PromptTokenizer, fast: FastTokenizer, vocab_size: int) -> None:
    """Raise ValueError if the ids of FAST tokens overlap those of text tokens."""
    first = vocabulary_token(fast.vocab_size - 1, vocab_size)
    words = 1 + max(tokenizer.encode(_PROBE, bos=True, eos=True))
    if first < words:
        raise ValueError(
            f"{fast.name} has {fast.vocab_size} tokens, which with {SKIPPED_TOKENS} others take the end of the model's "
            f"vocabulary of {vocab_size} and overlap the {words} text tokens of {tokenizer.name}: set "
            f"--model.vocab-size {words + SKIPPED_TOKENS + fast.vocab_size} or more, or fit fewer tokens "
            "(data fit-fast --vocab-size)"
        )


@dataclasses.dataclass(frozen=True)
class TokenizeActionPrompt:
    """`prompt`, `state` and `actions` -> `prompt_tokens` int32 [max_len], `prompt_mask`, `token_ar_mask` and
    `token_loss_mask` bool [max_len].

    State and actions must be normalised. Use it before `PadDims`: the state is written unpadded, and actions are padded
    to `action_dim` here. The prefix, prompt and present state, has bidirectional attention; the tokens of the chunk
    follow, are causal, and have the loss. Without `actions` (serving) there is only the prefix. Tokens beyond `max_len`
    are cut.
    """

    tokenizer: PromptTokenizer
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
