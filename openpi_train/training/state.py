"""The state of a run on the devices, as one tree of arrays. Read next: `step.py`, from one state to the next."""

from collections.abc import Mapping
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import Array, Int

from openpi_train.types import pytree

Params = dict[str, Array]


@pytree
class TrainState:
    """Everything that a step reads and writes.

    `params` holds the trainable leaves (float32 master copies) by path, `frozen` the leaves that training leaves
    alone (bfloat16 where the run computes in it), `ema` the average of `params` or None. Paths join the module's
    attribute names with "/".
    """

    step: Int[Array, ""]
    params: Params
    frozen: Params
    ema: Params | None
    opt_state: optax.OptState


def flat_params(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A nested parameter dictionary (of arrays, or of shapes) as one flat dictionary keyed by path."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(entry.key) for entry in path): leaf for path, leaf in flat}


def nested_params(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat_params`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def module_params(module: nnx.Module) -> Params:
    """A module's parameters by path."""
    return flat_params(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def merge_module(graphdef: nnx.GraphDef, params: Params) -> nnx.Module:
    """The module that `params` (all of its leaves, by path) make."""
    return nnx.merge(graphdef, nested_params(params))
