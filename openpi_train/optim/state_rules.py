"""Wrappers of optax rules: layer by layer, part by part, and with moments stored in a smaller dtype.

They map a rule to a rule, over parameters in a flat dictionary by path. Read next: `optimizer_config.py`.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from openpi_train.types import Tree

_WHOLE = "whole"
# Names of stacks, and of ACT's and SmolVLA's by what a layer of theirs consists of. `layers/0` is one layer of a list.
_STACK = re.compile(r"(^|/)(layers/(?!\d)|vae_layers/|(encoder|decoder|expert)/(attention|among|across|mlp|norm_\d)/)")


def is_stacked(path: str) -> bool:
    """Whether the parameter holds one array per layer, on its first dim (`parallel/layers.py: stack_layers`)."""
    return _STACK.search(path) is not None


def by_layer(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `rule` to each layer of a stack as a separate parameter.

    The state is the rule's own by group: `whole` for parameters that are not stacked, `layers_18` for stacks of 18,
    in which every array has the layers on its first dim; counters are shared.
    """

    def init(params: Tree) -> dict[str, Any]:
        state = {}
        for name, group in _groups(params).items():
            one = rule.init if name == _WHOLE else jax.vmap(rule.init, out_axes=_layer_axes(rule, group))
            state[name] = one(group)
        return state

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        new_updates: dict[str, Any] = {}
        new_state: dict[str, Any] = {}
        own_params = _groups(params)
        for name, group in _groups(updates).items():
            one: Any = rule.update
            if name != _WHOLE:
                axes = _layer_axes(rule, group)
                one = jax.vmap(one, in_axes=(0, axes, 0), out_axes=(0, axes))
            of_group, new_state[name] = one(group, state[name], own_params[name])
            new_updates |= of_group
        return {path: new_updates[path] for path in updates}, new_state

    return optax.GradientTransformation(init, update)


def _groups(params: Tree) -> dict[str, dict[str, Any]]:
    """Parameters by the number of their layers."""
    groups: dict[str, dict[str, Any]] = {}
    for path, leaf in params.items():
        groups.setdefault(f"layers_{leaf.shape[0]}" if is_stacked(path) else _WHOLE, {})[path] = leaf
    return groups


def _layer_axes(rule: optax.GradientTransformation, group: Mapping[str, Tree]) -> Any:
    """The vmap axes of the rule's state: 0 for arrays per layer, None for shared counters."""
    layer = {path: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for path, leaf in group.items()}
    state = jax.eval_shape(rule.init, layer)
    return jax.tree.map(lambda leaf: None if jnp.issubdtype(leaf.dtype, jnp.integer) else 0, state)


def with_parts(num_parts: Callable[[str], int], rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `rule` to parameters whose last dim is cut into `num_parts(path)` parts: (inputs, parts, outputs).

    Parameters of one part, and all moments between updates, have the shapes that they would have without it.
    """

    def parts(tree: Tree) -> Any:
        def cut(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
            number = num_parts(str(getattr(path[-1], "key", ""))) if path else 1
            return leaf if number == 1 else leaf.reshape(*leaf.shape[:-1], number, leaf.shape[-1] // number)

        return jax.tree_util.tree_map_with_path(cut, tree)

    def joined(tree: Tree) -> Any:
        def join(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
            number = num_parts(str(getattr(path[-1], "key", ""))) if path else 1
            return leaf if number == 1 else leaf.reshape(*leaf.shape[:-2], math.prod(leaf.shape[-2:]))

        return jax.tree_util.tree_map_with_path(join, tree)

    def init(params: Tree) -> Any:
        return joined(rule.init(parts(params)))

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Any, Any]:
        updates, state = rule.update(parts(updates), parts(state), parts(params))
        return joined(updates), joined(state)

    return optax.GradientTransformation(init, update)


def moments_stored_as(dtype: DTypeLike, rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Compute `rule` in float32, but store its moments (arrays with a parameter's path and shape) in `dtype`.

    Rounding is to nearest, so a restored state reproduces the run, and no random key is needed.
    Stochastic rounding would be unbiased if a moment changes by less than half a unit in its last place per step;
    `OptimizerConfig.check` refuses the decay rates at which that happens instead.
    """

    def init(params: Tree) -> Any:
        return _cast_moments(rule.init(params), params, dtype)

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Any, Any]:
        updates, state = rule.update(updates, _cast_moments(state, updates, jnp.float32), params)
        return updates, _cast_moments(state, updates, dtype)

    return optax.GradientTransformation(init, update)


def _cast_moments(state: Tree, like: Mapping[str, Tree], dtype: DTypeLike) -> Any:
    def cast(path, leaf):
        name: Any = getattr(path[-1], "key", None) if path else None
        return leaf.astype(dtype) if name in like and leaf.shape == like[name].shape else leaf

    return jax.tree_util.tree_map_with_path(cast, state)
