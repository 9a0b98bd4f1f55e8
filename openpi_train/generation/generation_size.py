"""`GenerationSize`: how much a run generates at a time. Read next: `generator.py`; `planning/generation.py`."""

import dataclasses

import jax
from jax.typing import DTypeLike

from openpi_train.models.language import LanguageConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSize:
    """The most that a device, or a tensor group, generates at a time.

    Attributes:
        language: the model that generates.
        rows: the completions.
        length: the tokens of a prompt and its completion together.
        flag: the flag that sets `rows`.
    """

    language: LanguageConfig
    rows: int
    length: int
    flag: str


def dtype_held(path: str, leaf: jax.Array | jax.ShapeDtypeStruct, dtype: DTypeLike) -> DTypeLike:
    """The type in which a parameter of a decoder is held to generate in `dtype`.

    Layers read vectors (norms, biases) in float32.
    """
    return dtype if leaf.ndim > 1 + path.startswith("layers/") else leaf.dtype
