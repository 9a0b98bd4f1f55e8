"""What every model config promises. Read next: `pi0.py`, and `objectives/base.py` for who calls the built module."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from flax import nnx

Row = dict[str, Any]
RowTransform = Callable[[Row], Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """The frozen description of a model: everything needed to build it and to shape its batches.

    `provides` names what the built module can do, so that an objective's `needs` can be checked before anything
    is built: `velocity`, `sample`, `epsilon`, `logits`, `value`, `log_prob`.
    """

    provides: ClassVar[frozenset[str]] = frozenset()

    # Control steps of an action chunk, and tokens that the model knows.
    action_horizon: int
    vocab_size: int

    @property
    def normalization(self) -> Literal["z_score", "quantile"]:
        """The form of normalisation that the model was designed for."""
        return "z_score"

    @abc.abstractmethod
    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """A freshly initialised module, parameters in float32."""

    @abc.abstractmethod
    def batch_spec(self, batch_size: int, cameras: Sequence[str]) -> Any:
        """The batch as a tree of `jax.ShapeDtypeStruct`; `cameras` are the slots that the run's robots fill."""

    @abc.abstractmethod
    def transforms(self, tokenizer: Any) -> tuple[RowTransform, ...]:
        """The host steps from a normalised row to the arrays of `batch_spec`, in order (numpy in, numpy out)."""

    @abc.abstractmethod
    def flops_per_row(self, cameras: int, draws: int = 1) -> float:
        """Forward FLOPs for one row, two per multiply-add; `draws` flow draws share the row's prefix."""

    @abc.abstractmethod
    def activation_bytes_per_row(self, cameras: int, draws: int = 1) -> float:
        """Bytes that a training step keeps for one row between forward and backward, an estimate from shapes."""

    def public_name(self, path: str) -> str:
        """The name under which the parameter `path` is published in checkpoints (default: its own)."""
        return path

    def merge_lora(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters by path with low-rank adapters folded into the weights; as they are where there are none."""
        return dict(params)

    def frozen(self, path: str) -> bool:
        """Whether the model's own design keeps this parameter fixed (LoRA's base weights, for one)."""
        del path
        return False
