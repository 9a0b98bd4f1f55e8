"""Grouped-query attention, rotary positions and attention masks.

Read next: `gemma.py`, which projects to heads and back.
"""

import contextlib
import contextvars
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from openpi_train.parallel.remat import keep
from openpi_train.runtime.device_kinds import KnownDevice
from openpi_train.runtime.exits import UsageError

AttentionKind = Literal["xla", "cudnn"]
Attention = Literal["auto", AttentionKind]


class Heads(NamedTuple):
    """Heads of an attention: of queries, of keys and values, and the width of each."""

    queries: int
    keys: int
    width: int

    def of_device(self, tensor_devices: int) -> "Heads":
        """Those that one device of a tensor group computes (`parallel/shard.py: own_heads`)."""
        queries = self.queries // tensor_devices
        if self.keys % tensor_devices == 0:
            return self._replace(queries=queries, keys=self.keys // tensor_devices)
        return self._replace(queries=queries, keys=1 if self.keys == 1 else queries)


# Gives weight zero, without the NaN of -inf in a fully masked row (padding). Gemma's own constant.
_MASKED = -2.3819763e38

# The device that programs are compiled for; None: this process's own.
_COMPILED_FOR: contextvars.ContextVar[Any] = contextvars.ContextVar("compiled_for", default=None)

# cuDNN's kernels read rows of the mask in pieces of 16 bytes.
_FLASH_TOKENS = 8


def rotary_angles(
    positions: Int[Array, "b t"], head_width: int, max_wavelength: float = 10_000.0
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """Sines and cosines that `rotate` needs, in float32; the same for all layers and heads."""
    exponents = np.arange(head_width // 2, dtype=np.float32) * np.float32(2.0 / head_width)
    timescale = max_wavelength ** jnp.asarray(exponents)
    angles = positions[..., None, None].astype(jnp.float32) / timescale
    return jnp.sin(angles), jnp.cos(angles)


@jax.named_scope("rotary")
def rotate(
    heads: Float[Array, "b t n c"], sine: Float[Array, "b t 1 half"], cosine: Float[Array, "b t 1 half"]
) -> Float[Array, "b t n c"]:
    """Rotary position encoding (Su et al. 2021); first and second half of a head pair up. Computed in float32.

    first * cosine - second * sine, second * cosine + first * sine: with the halves on an axis of their own XLA for GPUs
    computes both in one kernel, instead of writing halves in float32.
    """
    halves = heads.reshape(*heads.shape[:-1], 2, -1)  # b t n 2 half
    signed = jnp.stack([-sine, sine], axis=-2)
    rotated = halves * cosine[..., None, :] + jnp.flip(halves, axis=-2) * signed
    return rotated.reshape(heads.shape).astype(heads.dtype)


@jax.named_scope("attention")
def attend(
    query: Float[Array, "b t n c"],
    key: Float[Array, "b s k c"],
    value: Float[Array, "b s k c"],
    mask: Bool[Array, "b t s"],
    kind: Attention = "auto",
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Float[Array, "b t n c"]:
    """Values averaged by softmax(query . key * scale); `n / k` query heads share a key head. Softmax in float32.

    A single query per row, as in decoding, is computed by XLA in any case: its weights are small, and cuDNN's kernels
    would have keys and values padded for every token.

    Its output is kept for the backward pass (`parallel/remat.py: keep`). `scale` None is 1 / sqrt(c). `cap` bounds the
    products to that size, by cap * tanh(product / cap) (Gemma 2).

    Written out, because `jax.nn.dot_product_attention` (with the same FLOPs and, on a CPU, about the same time and
    memory) scales the products instead of the queries, which in bfloat16 rounds differently from openpi.
    """
    b, t, n, c = query.shape
    factor = float(c) ** -0.5 if scale is None else scale
    if t > 1 and uses_cudnn(kind, c, query.dtype):
        if cap is not None:
            raise UsageError("--model.attention cudnn cannot cap products (Gemma 2); use --model.attention auto or xla")
        return flash_attend(query, key, value, mask, factor)
    k, g = key.shape[2], n // key.shape[2]
    grouped = jnp.moveaxis((query * factor).reshape(b, t, k, g, c), 1, 2).reshape(b, k, t * g, c)
    # What is masked seems to depend on the queries: neither jax nor XLA then computes it once for all layers and stores
    # it for every head, in float32.
    grouped, mask, masked = jax.lax.optimization_barrier((grouped, mask, jnp.float32(_MASKED)))
    averaged = _averages(soft_cap(_products(grouped, key), cap), mask, masked, value)
    return jnp.moveaxis(averaged.reshape(b, k, t, g, c), 2, 1).reshape(b, t, n, c)


# Below, m are tokens and the query heads that share a key head, in one dim: then nothing as large as the weights
# "b k m s" is transposed. The backward pass reads and writes arrays of that size in the type of the queries only, as
# flash attention does.


@jax.custom_vjp
def _products(query: Float[Array, "b k m c"], key: Float[Array, "b s k c"]) -> Float[Array, "b k m s"]:
    """In float32; their gradient is rounded to the type of the queries before it is multiplied."""
    return jnp.einsum("bkmc,bskc->bkms", query, key, preferred_element_type=jnp.float32)


def _products_backward(
    kept: tuple[Array, Array], gradient: Float[Array, "b k m s"]
) -> tuple[Float[Array, "b k m c"], Float[Array, "b s k c"]]:
    query, key = kept
    narrow = gradient.astype(query.dtype)
    return jnp.einsum("bkms,bskc->bkmc", narrow, key), jnp.einsum("bkms,bkmc->bskc", narrow, query)


_products.defvjp(lambda query, key: (_products(query, key), (query, key)), _products_backward)


@jax.custom_vjp
def _averages(
    logits: Float[Array, "b k m s"],
    mask: Bool[Array, "b t s"],
    masked: Float[Array, ""],
    value: Float[Array, "b s k c"],
) -> Float[Array, "b k m c"]:
    """Values averaged by softmax(logits), which is computed in float32 and rounded to the type of the values.

    `masked` takes the place of the logits where `mask` is not set.
    """
    return _averages_forward(logits, mask, masked, value)[0]


def _averages_forward(
    logits: Float[Array, "b k m s"],
    mask: Bool[Array, "b t s"],
    masked: Float[Array, ""],
    value: Float[Array, "b s k c"],
) -> tuple[Float[Array, "b k m c"], tuple[Array, Array, Array]]:
    b, k, m, s = logits.shape
    by_head = logits.reshape(b, k, mask.shape[1], m // mask.shape[1], s)
    seen = jnp.where(mask[:, None, :, None], by_head, masked).reshape(logits.shape)
    weights = jax.lax.optimization_barrier(jax.nn.softmax(seen, axis=-1).astype(value.dtype))
    averaged = keep(jnp.einsum("bkms,bskc->bkmc", weights, value))
    return averaged, (weights, value, averaged)


def _averages_backward(
    kept: tuple[Array, Array, Array], gradient: Float[Array, "b k m c"]
) -> tuple[Float[Array, "b k m s"], None, None, Float[Array, "b s k c"]]:
    """A weight w whose gradient is d has the logit's gradient w * (d - mean), with the mean of all d by the weights:
    the product of the output with its gradient (Dao et al. 2022). What is masked has weight 0, so the mask is not kept.
    But a query that sees nothing, padding, has equal weights, and the gradient of its output must be 0."""
    weights, value, averaged = kept
    mean = jnp.sum(gradient * averaged, axis=-1, keepdims=True, dtype=jnp.float32)
    in_weights = jnp.einsum("bkmc,bskc->bkms", gradient, value)
    return weights * (in_weights - mean), None, None, jnp.einsum("bkms,bkmc->bskc", weights, gradient)


_averages.defvjp(_averages_forward, _averages_backward)


def soft_cap(x: Float[Array, "*n"], cap: float | None) -> Float[Array, "*n"]:
    """cap * tanh(x / cap), or `x` if `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def flash_attend(
    query: Float[Array, "b t n c"],
    key: Float[Array, "b s k c"],
    value: Float[Array, "b s k c"],
    mask: Bool[Array, "b t s"] | None,
    scale: float | None = None,
) -> Float[Array, "b t n c"]:
    """`attend` by cuDNN's fused kernels, which never write the weights "b n t s" to memory.

    cuDNN adds the mask to the products, and jax has it compute the gradient of that sum too ("b 1 t s" in 16 bits).
    Its output is kept for the backward pass by the kernels' own name (`parallel/remat.py`), so it is not named again.
    """
    t, c = query.shape[1], query.shape[3]
    if mask is None and (t % 2 or key.shape[1] % 2):  # jax wants even numbers of tokens
        mask = all_seen(query, key)
    if mask is not None:
        more_t, more_s = -t % _FLASH_TOKENS, -key.shape[1] % _FLASH_TOKENS
        # What is kept for the backward pass is what the kernels read: nothing is then padded twice.
        query = keep(jnp.pad(query, ((0, 0), (0, more_t), (0, 0), (0, 0))))
        key, value = (keep(jnp.pad(x, ((0, 0), (0, more_s), (0, 0), (0, 0)))) for x in (key, value))
        mask = jnp.pad(mask, ((0, 0), (0, more_t), (0, more_s)))[:, None]  # b 1 t s
    factor = c**-0.5 if scale is None else scale
    attended = jax.nn.dot_product_attention(query, key, value, mask=mask, scale=factor, implementation="cudnn")
    return attended[:, :t]


@contextlib.contextmanager
def compiling_for(device: KnownDevice) -> Iterator[None]:
    """What is traced inside is for `device`, which need not be present (`planning/gpu/plugin.py`)."""
    token = _COMPILED_FOR.set(device)
    try:
        yield
    finally:
        _COMPILED_FOR.reset(token)


def uses_cudnn(kind: Attention, head_dim: int, dtype: DTypeLike) -> bool:
    """Whether attention uses cuDNN on this process's devices, or on that of `compiling_for`: only with `cudnn`.

    `auto` is XLA's form where a run has not decided it (`best_kind`), as in a served policy. Raises UsageError if
    `kind` is `cudnn` and cuDNN cannot be used.
    """
    if kind != "cudnn":
        return False
    if problem := cudnn_problem(head_dim, dtype, _COMPILED_FOR.get() or jax.local_devices()[0]):
        raise UsageError(f"--model.attention cudnn cannot be used: {problem}; use --model.attention auto or xla")
    return True


def cudnn_problem(head_dim: int, dtype: DTypeLike, device: KnownDevice) -> str | None:
    """Why cuDNN cannot train this attention on `device`, or None where it can.

    By NVIDIA's support matrix for cuDNN 9.18 (docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/
    Attention.html), which is stricter than the checks of jax 0.10.2: 16-bit floats; Ampere or newer; heads of at most
    128, in a multiple of 8 (jax); in the backward pass 256 on Hopper only. So Gemma's heads of 256 run on H100 and
    H200, but not on A100, B200 or RTX cards. cuDNN 9.23 adds B200 (github.com/NVIDIA/TransformerEngine/pull/3056): try
    again when jax ships it. SigLIP's heads of 72 run on all of them.
    """
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform not in ("gpu", "cuda") or capability is None:
        return f"it needs an NVIDIA GPU, and this is a {device.platform} device"
    generation = int(capability[1])
    if generation < 8:
        return f"it needs compute capability 8.0, and this {device.device_kind} has {capability[0]}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and the model in {jnp.dtype(dtype).name} (--model.dtype)"
    widest = 256 if generation == 9 else 128
    if head_dim > widest or head_dim % 8:
        return f"its heads are multiples of 8 up to {widest} on a {device.device_kind}, and the model's are {head_dim}"
    return None


def best_kind(heads: Collection[Heads], dtype: DTypeLike, device: KnownDevice) -> AttentionKind:
    """Who computes attention in training on `device` if `auto` leaves it open: cuDNN on Hopper, where full pi0 was seen
    to train faster by it (docs/understand/benchmarks.md, "One H200"), if it can compute all these heads; else XLA."""
    if not heads or not str(getattr(device, "compute_capability", "")).startswith("9."):
        return "xla"
    return "xla" if any(cudnn_problem(one.width, dtype, device) for one in heads) else "cudnn"


def all_seen(query: Float[Array, "b t n c"], key: Float[Array, "b s k c"]) -> Bool[Array, "b t s"]:
    """The mask with which every token attends to all."""
    return jnp.ones((query.shape[0], query.shape[1], key.shape[1]), bool)


def block_mask(
    valid: Bool[Array, "b t"], block: Int[np.ndarray, " t"], branch: Int[np.ndarray, " t"]
) -> Bool[Array, "b t t"]:
    """The mask whose entry (i, j) says whether token i attends to token j.

    It does if both are valid, j's block is not later than i's, and j is on the common trunk (branch 0) or on
    i's own branch. Blocks define a prefix that attends only to itself; branches let several flow draws share it.
    """
    visible = block[None, :] <= block[:, None]
    visible &= (branch[None, :] == 0) | (branch[None, :] == branch[:, None])
    return jnp.asarray(visible) & valid[:, None, :] & valid[:, :, None]


def order_mask(valid: Bool[Array, "b t"], causal: Bool[Array, "b t"]) -> Bool[Array, "b t t"]:
    """The mask whose entry (i, j) says whether token i attends to token j.

    It does if both are valid and no causal token comes after i and up to j: causal tokens attend to earlier tokens,
    and runs of others to each other (big_vision's `ar_mask`, which openpi uses).
    """
    block = jnp.cumsum(causal, axis=1, dtype=jnp.int32)
    return (block[:, None, :] <= block[:, :, None]) & valid[:, None, :] & valid[:, :, None]
