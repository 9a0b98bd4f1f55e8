"""Parameters by path: the flat dictionary in which the project trains, shards and stores a module's parameters.

Paths join the module's attribute names with "/". Read next: `state.py`.
"""

from collections.abc import Container, Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from openpi_train.parallel.shard import Gathering

Params = dict[str, Array]
# Metadata of a parameter: no gradient is taken in it; it is of a stack whose layers are unrolled; it is a table of a
# model through which gradients are taken.
FIXED, UNROLLED, AS_GATHERED, LEARNING = "is_fixed", "is_unrolled", "as_gathered", "is_learning"


def flat_params(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A nested parameter dictionary (of arrays, or of shapes) as one flat dictionary keyed by path."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


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


def module_params(module: nnx.Module) -> dict[str, Any]:
    """A module's parameters (or their shapes, of an abstract module) by path."""
    return flat_params(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def gatherings(module: nnx.Module) -> dict[str, Gathering]:
    """How a module gathers its parameters, by path; without those that must be whole before it runs."""
    variables = nnx.to_flat_state(nnx.state(module, nnx.Param))
    found = {"/".join(map(str, path)): variable.get_metadata("gathering", None) for path, variable in variables}
    return {path: gathering for path, gathering in found.items() if gathering is not None}


def mark_fixed(module: nnx.Module, paths: Container[str]) -> None:
    """Mark the parameters with these paths as fixed: no gradient is taken in them (`layers.py: scan_to_last`)."""
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if "/".join(map(str, path)) in paths:
            variable.set_metadata(FIXED, True)


def mark_unrolled(module: nnx.Module, *, as_gathered: bool = False) -> None:
    """Mark all stacks of layers to be unrolled (`layers.py: scan_layers`).

    `as_gathered`: they are to store what layers of shards store.
    """
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if variable.get_metadata("gathering", None) is Gathering.BY_LAYER:
            variable.set_metadata(UNROLLED, True)
            variable.set_metadata(AS_GATHERED, as_gathered)


def mark_learning(module: nnx.Module) -> None:
    """Mark the tables of a model through which gradients are taken (`nn/vocabulary.py: remat_of`)."""
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if variable.get_metadata("gathering", None) is Gathering.BY_ROW:
            variable.set_metadata(LEARNING, True)


def merge_module(graphdef: nnx.GraphDef, params: Mapping[str, Any]) -> nnx.Module:
    """Build the module from `params`, all of its leaves by path (arrays, their shapes, or shards)."""
    return nnx.merge(graphdef, nested_params(params))
