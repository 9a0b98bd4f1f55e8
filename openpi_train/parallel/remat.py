"""What a layer stores for its backward pass, and what that computes again. Read next: `layers.py`, which runs them."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jaxtyping import Array

# What is stored for the backward pass in addition to a layer's input: everything (of unrolled layers that are gathered:
# inputs and outputs of all products); inputs and outputs of products with weights, and of attention; outputs of those;
# inputs and outputs of attention; nothing. Each stores less than the one before and recomputes more.
Remat = Literal["none", "products", "dots", "attention", "full"]
# Or the policy with the shortest step of those that fit the devices of a run.
RematChoice = Literal["auto", "none", "products", "dots", "attention", "full"]

# The names of what is stored by name: heads around attention, and inputs of products with weights.
_KEPT, INPUT = "attention", "input"


def keep(x: Array) -> Array:
    """Mark `x` as an input or output of attention, which all policies but `full` store."""
    return checkpoint_name(x, _KEPT)


def keep_input(x: Array) -> Array:
    """Mark `x` as an input of products with weights, which `none` and `products` store."""
    return checkpoint_name(x, INPUT)


def _flash_attention(primitive: Primitive, *_: object, **__: object) -> bool:
    """Whether this is cuDNN's attention, whose softmax statistics have no name (jax 0.10.2: `jax/_src/cudnn`)."""
    return primitive.name == "dot_product_attention_fwd_wrapper"


_keep_attention = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(_KEPT), _flash_attention
)
_keep_outputs = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _keep_attention
)
_keep_inputs = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(INPUT), _keep_outputs
)
_POLICIES = {
    "none": jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, _keep_inputs),
    "products": _keep_inputs,
    "dots": _keep_outputs,
    "attention": _keep_attention,
    "full": jax.checkpoint_policies.nothing_saveable,
}
_WITHOUT_ARITHMETIC = frozenset(
    "linear_call convert_element_type slice dynamic_slice squeeze reshape transpose pvary".split()
)


def recomputed(step: Callable[..., object], remat: Remat, fetches: bool, *, unrolled: bool) -> Callable[..., Any]:
    """The step of a scan over layers, with what `remat` recomputes in the backward pass.

    Where the step `fetches` weights itself, gathered or read from a stack, they are fetched again and never kept: it
    then stores what checkpoint is told to. XLA for GPUs would compute elementwise arithmetic again where it reads it,
    rather than store it; so of `unrolled` layers `none` then stores no more than products. Else `none` stores all, in
    unrolled layers copies of fixed weights, too.
    """
    if remat == "none" and not fetches:
        return step
    policy = _all_but_weights if remat == "none" and not unrolled else _POLICIES[remat]
    # Inside a loop nothing can be merged across the barrier anyway, so it is not needed.
    return jax.checkpoint(step, prevent_cse=unrolled, policy=policy)


def _all_but_weights(primitive: Primitive, *_: object, **__: object) -> bool:
    """Whether the primitive does arithmetic. A gathered weight only passes through others before its product."""
    return primitive.name not in _WITHOUT_ARITHMETIC
