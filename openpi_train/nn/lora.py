"""Weights with an optional low-rank addition (LoRA, Hu et al. 2021), in openpi's form, and how to merge it.

Two peculiarities of openpi are kept, so that its checkpoints mean the same here: the MLP's addition is never scaled
by alpha / rank, and the attention output's factors are summed over heads one by one (see `merge_lora`).

Read next: `gemma.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from openpi_train.nn.matmul import product
from openpi_train.parallel.params import ParamKind

M = TypeVar("M", bound=nnx.Module)

_initializer = nnx.initializers.normal(stddev=0.01)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank additions to the weights of every layer of a language model, as in PEFT; rank 0 means none.

    Every addition is scaled by alpha / rank, or by alpha / sqrt(rank) with `rslora` (Kalajdzievski 2023), and starts
    at zero.
    """

    # Rank of the additions; 0 means none.
    rank: int = 0
    # The additions are scaled by alpha / rank, or with rslora by alpha / sqrt(rank).
    alpha: float = 16.0
    # Whether alpha is divided by the rank's square root.
    rslora: bool = False
    # Additions to the attention weights.
    attention: bool = True
    # Additions to the feed-forward weights.
    mlp: bool = True

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        """The factor on every addition."""
        return _scale(self.alpha, self.rank, self.rslora)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Ranks of the additions to the attention and MLP weights of every layer; rank 0 means none.

    `alpha` scales the attention's addition: by alpha / rank, or by alpha / sqrt(rank) with `rslora`. It does not
    affect the MLP's, as in openpi.
    """

    attention_rank: int = 0
    mlp_rank: int = 0
    alpha: float = 1.0
    rslora: bool = False

    @property
    def enabled(self) -> bool:
        return self.attention_rank > 0 or self.mlp_rank > 0

    @property
    def attention_scale(self) -> float:
        """The factor on the attention weights' addition."""
        return _scale(self.alpha, self.attention_rank, self.rslora)


def _scale(alpha: float, rank: int, rslora: bool) -> float:
    rank = max(rank, 1)
    return alpha / math.sqrt(rank) if rslora else alpha / rank


class LoraWeight(nnx.Module):
    """A weight whose last axes are (in, out), with factors `lora_a` (in, rank) and `lora_b` (rank, out).

    `inputs` and `outputs` are the numbers of these axes. `initializers` are those of `lora_a` and `lora_b`. `kind` is
    that of all three, but the factors are gathered with all their entries.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        initializer: nnx.Initializer,
        rank: int,
        scale: float = 1.0,
        *,
        inputs: int = 1,
        outputs: int = 1,
        initializers: tuple[nnx.Initializer, nnx.Initializer] = (_initializer, _initializer),
        kind: ParamKind = ParamKind(),
        rngs: nnx.Rngs,
    ):
        self.rank = rank
        self.scale = scale
        self.weight = nnx.Param(initializer(rngs.params(), shape, jnp.float32), kind=kind)
        if rank:
            before, out = shape[: -inputs - outputs], shape[-outputs:]
            first, second = initializers
            kind = dataclasses.replace(kind, by_entry=False)
            self.lora_a = nnx.Param(first(rngs.params(), (*shape[:-outputs], rank), jnp.float32), kind=kind)
            self.lora_b = nnx.Param(second(rngs.params(), (*before, rank, *out), jnp.float32), kind=kind)

    @property
    def part(self) -> Array:
        """The weight, or the first of its parts after `cut`."""
        return jax.tree.leaves(self.weight.get_value())[0]

    def cut(self) -> None:
        """Cut the first axis: `index` then chooses one of several arrays, and nothing is copied where it is used."""
        params: tuple[Any, ...] = (self.weight, self.lora_a, self.lora_b) if self.rank else (self.weight,)
        for param in params:
            param.set_value(tuple(param.get_value()))

    def __call__(self, x: Array, base: str, down: str = "", up: str = "", index: int | None = None) -> Array:
        """einsum(base, x, weight) + scale * einsum(up, einsum(down, x, lora_a), lora_b), in the type of `x`.

        `index` selects an entry of the weights' first axis. `down` and `up` are used only if there are factors.
        """

        def chosen(param):
            return param.get_value() if index is None else param.get_value()[index]

        result = product(base, x, chosen(self.weight))
        if not self.rank:
            return result
        low = product(up, product(down, x, chosen(self.lora_a)), chosen(self.lora_b))
        return result + (low if self.scale == 1.0 else low * self.scale)


def without_additions(module: M) -> M:
    """The same module with every low-rank addition switched off. It shares the parameters of `module`.

    Raises ValueError if the module has no additions.
    """
    plain = nnx.merge(*nnx.split(module))
    adapted = [part for _, part in nnx.iter_graph(plain) if isinstance(part, LoraWeight) and part.rank]
    if not adapted:
        raise ValueError(f"this {type(module).__name__} has no low-rank additions to switch off")
    for part in adapted:
        part.rank = 0
    return plain


def merge_lora(
    params: Mapping[str, Array], scale: Callable[[str], float], heads_axis: Callable[[str], int | None]
) -> dict[str, Array]:
    """Parameters by path, with every pair of factors merged into its weight in float32 and removed.

    Args:
        params: all parameters; a weight is `<path>/weight`, its factors `<path>/lora_a` and `<path>/lora_b`.
        scale: `<path>` -> factor of the addition.
        heads_axis: `<path>` -> the axis of `lora_b` to sum out first, or None. openpi's attention output multiplies
            (sum over heads of x A) by (sum over heads of B), so each head's weight gains A times that *sum*.
    """
    merged = {path: value for path, value in params.items() if not path.endswith(("/lora_a", "/lora_b"))}
    for name in (path.removesuffix("/lora_a") for path in params if path.endswith("/lora_a")):
        factor_a, factor_b = (jnp.asarray(params[f"{name}/{factor}"], jnp.float32) for factor in ("lora_a", "lora_b"))
        if (axis := heads_axis(name)) is not None:
            factor_b = jnp.sum(factor_b, axis=axis, keepdims=True)
        weight = params[f"{name}/weight"]
        merged[f"{name}/weight"] = _add_product(weight, factor_a, factor_b, scale(name))
    return merged


def _add_product(weight: Array, a: Float[Array, "..."], b: Float[Array, "..."], scale: float) -> Array:
    num_stacked = a.ndim + b.ndim - 2 - weight.ndim
    stacked, rank = weight.shape[:num_stacked], a.shape[-1]
    a, b = a.reshape(*stacked, -1, rank), b.reshape(*b.shape[:num_stacked], rank, -1)
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST).reshape(weight.shape)
    return (jnp.asarray(weight, jnp.float32) + scale * product).astype(weight.dtype)
