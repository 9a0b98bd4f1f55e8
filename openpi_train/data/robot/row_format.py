"""`RowFormat`: what a row of a robot policy's batch holds, and how a robot's row becomes one.

A policy's config says its format by `PolicyConfig.rows`. Read next: `models/exact_policy.py`, `models/prompted.py`.
"""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from openpi_train.data.robot.normalize import Form
from openpi_train.data.robot.rows import RowTransform
from openpi_train.data.robot.windows import WindowShape
from openpi_train.data.tokenizers.fast_tokenizer import FastTokenizer
from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer

if TYPE_CHECKING:  # it imports jax, which data workers do without
    from openpi_train.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFormat(abc.ABC):
    """What a policy sees and predicts around a control step, and the arrays that this becomes.

    Attributes:
        window: what it sees and predicts.
        vocab_size: tokens that the model knows.
        normalization: the form of normalisation that the model was designed for.
        reads_text: whether a row's text reaches the model; one that reads none needs no tokenizer.
    """

    window: WindowShape
    vocab_size: int
    normalization: Form = "z_score"
    reads_text: bool = True

    @abc.abstractmethod
    def batch_spec(self, batch_size: int, cameras: Sequence[str], text_length: int | None = None) -> Any:
        """The batch, a `types.ActionBatch` of `jax.ShapeDtypeStruct`.

        `cameras` are the slots that the run's robots fill; `text_length` is the number of text tokens of a row, padding
        included. None: `text_limit`.
        """

    @abc.abstractmethod
    def transforms(self, tokenizer: PromptTokenizer, text_length: int | None = None) -> tuple[RowTransform, ...]:
        """The host steps from a normalised row to the arrays of `batch_spec`, in order (numpy in, numpy out)."""

    def check_dims(self, num_state_dims: int, num_action_dims: int) -> None:  # noqa: B027, most take all
        """Raise ValueError, with the flag to give, if the model takes no rows of so many dims (default: all)."""

    @property
    def text_limit(self) -> int | None:
        """The most text tokens of a row, padding included; None for a model without text (default)."""
        return None

    def text_length(self, tokenizer: PromptTokenizer, prompts: Iterable[tuple[str, int]]) -> int | None:
        """The text tokens of a row that the longest of these prompts needs (default: `text_limit`).

        Each prompt comes with the number of state dims of its robot. Padding beyond that length changes no result.
        """
        del tokenizer, prompts
        return self.text_limit

    def prompt_tokens(self, tokenizer: PromptTokenizer, prompt: str, num_state_dims: int) -> int:
        """The most tokens of a row's text with this instruction, but for those of its chunk (default: 0).

        `num_state_dims` are those of its robot. Asked for only where there is a `text_limit`.
        """
        del tokenizer, prompt, num_state_dims
        return 0

    def chunk_tokenizer(self, tokenizer: PromptTokenizer) -> FastTokenizer | None:
        """What makes the tokens of a chunk with which a row's text goes on; None: it does not (default)."""
        del tokenizer
        return None


@runtime_checkable
class RowModel(Protocol):
    """A model of robot actions, as the data code uses it: a `PolicyConfig`, which data cannot import."""

    @property
    def rows(self) -> RowFormat: ...

    def num_tokens_seen(self, batch: "Batch", draws: int = 1) -> Any: ...
