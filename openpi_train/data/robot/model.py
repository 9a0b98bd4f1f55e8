"""Interface of a model for robot data: the part of `models/model_config.py: PolicyConfig` that determines its rows.

It is a protocol because models import data and not the other way round. `PolicyConfig` documents each entry.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from openpi_train.data.robot.normalize import Form
from openpi_train.data.robot.rows import RowTransform
from openpi_train.data.robot.windows import WindowShape
from openpi_train.data.tokenizers.fast_tokenizer import FastTokenizer
from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer


@runtime_checkable
class RowModel(Protocol):
    """A model of robot actions, as the data code uses it."""

    reads_text: ClassVar[bool]

    @property
    def vocab_size(self) -> int: ...
    @property
    def window(self) -> WindowShape: ...
    @property
    def normalization(self) -> Form: ...
    @property
    def text_limit(self) -> int | None: ...

    def batch_spec(self, batch_size: int, cameras: Sequence[str], text_length: int | None = None) -> Any: ...
    def transforms(self, tokenizer: PromptTokenizer, text_length: int | None = None) -> tuple[RowTransform, ...]: ...
    def check_dims(self, num_state_dims: int, num_action_dims: int) -> None: ...
    def text_length(self, tokenizer: PromptTokenizer, prompts: Iterable[tuple[str, int]]) -> int | None: ...
    def prompt_tokens(self, tokenizer: PromptTokenizer, prompt: str, num_state_dims: int) -> int: ...
    def chunk_tokenizer(self, tokenizer: PromptTokenizer) -> FastTokenizer | None: ...
    def num_tokens_seen(self, batch: object, draws: int = 1) -> Any: ...
