"""The text of a row: the prompt alone, or the prompt followed by the chunk as FAST tokens.

Read next: `prompted.py`, whose configs have one of these, `data/robot/action_prompt.py`.
"""

import abc
import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from openpi_train.data.core.text_lengths import rounded
from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer
from openpi_train.models.model_config import RowTransform

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowText(abc.ABC):
    """How the text of a row is made, and its length."""

    # Whether rows mark causal tokens and tokens to predict.
    token_masks: ClassVar[bool] = False

    # Maximum number of tokens.
    limit: int
    # Whether the prompt contains the discretised state.
    with_state: bool

    @abc.abstractmethod
    def tokenize(self, tokenizer: PromptTokenizer, length: int) -> RowTransform:
        """The transform that tokenizes a normalised row, to `length` tokens including padding."""

    def chunk_tokenizer(self, tokenizer: PromptTokenizer) -> Any:
        """The tokenizer of chunks; None if the text contains none (default)."""
        del tokenizer

    def most_chunk_tokens(self, tokenizer: PromptTokenizer) -> int:
        """Maximum number of chunk tokens after a prompt (default: none)."""
        del tokenizer
        return 0

    def prompt_tokens(self, tokenizer: PromptTokenizer, prompt: str, num_state_dims: int) -> int:
        """Maximum number of tokens with this instruction, without those of the chunk (`RowFormat.prompt_tokens`)."""
        return min(self.longest_prompt(tokenizer, prompt, num_state_dims), self.limit)

    def fitted_length(self, tokenizer: PromptTokenizer, prompts: Iterable[tuple[str, int]]) -> int:
        """Number of tokens of the longest of these prompts, each with its robot's state dims; at most `limit`."""
        more = self.most_chunk_tokens(tokenizer)
        lengths = [more + self.longest_prompt(tokenizer, text, dims) for text, dims in prompts]
        longest = max(lengths, default=self.limit)
        used = rounded(longest, self.limit)
        if longest > self.limit and not more:  # chunk tokens are counted themselves, not by their bound
            logger.warning(
                "prompts have up to %d tokens, and the model reads %d: their ends are cut off. Give "
                "--model.max-token-len %d",
                *(longest, self.limit, longest),
            )
        else:
            logger.info(
                "prompts have at most %d tokens, rows %d (--model.max-token-len: %d)", *(longest, used, self.limit)
            )
        return used

    def longest_prompt(self, tokenizer: PromptTokenizer, prompt: str, num_state_dims: int) -> int:
        """Maximum number of tokens of this instruction, over all states."""
        return tokenizer.longest_prompt(prompt, num_state_dims if self.with_state else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptText(RowText):
    """The prompt alone."""

    def tokenize(self, tokenizer: PromptTokenizer, length: int) -> RowTransform:
        # Imported here: tokenizer libraries are only needed where rows are made.
        from openpi_train.data.robot.transforms import TokenizePrompt

        return TokenizePrompt(tokenizer, self.limit, self.with_state, length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptAndChunkText(RowText):
    """The prompt, then the chunk's FAST tokens, in the format of pi0-FAST or of the insulated pi0.5."""

    token_masks = True

    form: Literal["pi0_fast", "pi05"]
    fast_tokenizer: str
    vocab_size: int
    action_horizon: int
    action_dim: int

    def tokenize(self, tokenizer: PromptTokenizer, length: int) -> RowTransform:
        """As in `RowText`. Raises ValueError if action tokens overlap with words."""
        from openpi_train.data.robot.action_prompt import TokenizeActionPrompt, check_vocabulary

        fast = self.chunk_tokenizer(tokenizer)
        check_vocabulary(tokenizer, fast, self.vocab_size)
        return TokenizeActionPrompt(tokenizer, fast, self.vocab_size, length, self.action_dim, self.form)

    def most_chunk_tokens(self, tokenizer: PromptTokenizer) -> int:
        """Tokens of a chunk with two bytes per number, each a token, and of its delimiters."""
        return self._frame(tokenizer) + 2 * self.action_horizon * self.action_dim

    def prompt_tokens(self, tokenizer: PromptTokenizer, prompt: str, num_state_dims: int) -> int:
        if self.form == "pi0_fast":  # which lower-cases instructions, and truncates with a warning
            return self.longest_prompt(tokenizer, prompt.lower(), num_state_dims) + self._frame(tokenizer)
        return min(self.longest_prompt(tokenizer, prompt, num_state_dims) + self._frame(tokenizer), self.limit)

    def chunk_tokenizer(self, tokenizer: PromptTokenizer) -> Any:
        """The FAST processor; read once."""
        from openpi_train.data.tokenizers.fast_tokenizer import load_fast

        return load_fast(self.fast_tokenizer, offline=tokenizer.offline)

    def _frame(self, tokenizer: PromptTokenizer) -> int:
        """Number of delimiter tokens around those of the chunk."""
        return len(tokenizer.encode("Action: ") + tokenizer.encode("|", eos=True))
