"""What a parameter is, and what a step does with it; parameters by path: the flat dictionary in which the project
trains, shards and stores them.

Paths join the module's attribute names with "/". Read next: `state.py`.
"""

import dataclasses
import enum
from collections.abc import Container, Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

Params = dict[str, Array]
# The same, of arrays or of what stands for them: shapes, shards, shardings.
ParamLeaves = Mapping[str, Any]


class Gathering(enum.Enum):
    """When devices gather a parameter that they shard."""

    AT_ONCE = enum.auto()  # before its module runs
    BY_LAYER = enum.auto()  # when its layer runs, by `layers.py: scan_layers`
    BY_ROW = enum.auto()  # never: of a table that is read only by `take_rows` and `nn/vocabulary.py` rows are sent


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamKind:
    """What a parameter is to devices that shard it, given where it is made: `nnx.Param(value, kind=ParamKind(...))`.

    `layers.py: stack_layers` sets the gathering of what is in its layers.
    """

    gathering: Gathering = Gathering.AT_ONCE
    # A product reads one entry of the first axis: a layer gathers each by itself.
    by_entry: bool = False
    # The product for its gradient reads the widest activations of a layer.
    wide: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamUse:
    """What a step that takes gradients through a module does with a parameter; elsewhere a parameter has no use."""

    # No gradient is taken in it.
    frozen: bool = False
    # The layers of its stack are code of their own, one after the other, and no loop (`layers.py: scan_layers`).
    unrolled: bool = False
    # Unrolled layers store what gathered ones store: the step is traced, and does not run.
    as_gathered: bool = False


def flat_params(tree: ParamLeaves) -> dict[str, Any]:
    """A nested parameter dictionary (of arrays, or of shapes) as one flat dictionary keyed by path."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def nested_params(flat: ParamLeaves) -> dict[str, Any]:
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


def kind_of(variable: nnx.Variable) -> ParamKind:
    """What a parameter is. One that was made without a kind, as flax makes them, has the defaults."""
    return variable.get_metadata("kind", ParamKind())


def param_kinds(module: nnx.Module) -> dict[str, ParamKind]:
    """What the parameters of a module are, by path."""
    variables = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {"/".join(map(str, path)): kind_of(variable) for path, variable in variables}


def use_of(variable: nnx.Variable) -> ParamUse | None:
    """What a step does with a parameter; None outside of a step."""
    return variable.get_metadata("use", None)


def use_params(module: nnx.Module, use: ParamUse, frozen: Container[str] = ()) -> None:
    """Begin a step with a module: `use` is that of all its parameters, and those of the paths `frozen` are frozen."""
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable.set_metadata(use=dataclasses.replace(use, frozen="/".join(map(str, path)) in frozen))


def merge_module(graphdef: nnx.GraphDef, params: ParamLeaves) -> nnx.Module:
    """Build the module from `params`, all of its leaves by path (arrays, their shapes, or shards)."""
    return nnx.merge(graphdef, nested_params(params))
