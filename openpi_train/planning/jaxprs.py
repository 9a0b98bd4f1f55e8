"""Helpers to traverse traced programs (jaxprs). Read next: `flops.py`, `estimate.py`, `traffic.py`.

Before jax 0.12 a traced function is a `ClosedJaxpr`, with the attributes that are used here: `Jaxpr` stands for both.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

# Bytes of an array of this shape and type that count.
SizeOf = Callable[[Any], float]


def bodies(equation: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs inside an operation: a called function, a loop's body, or the branches of a conditional."""
    leaves = jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_jaxpr)
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if _is_jaxpr(leaf)]


def turns(equation: JaxprEqn) -> int:
    """How often the body runs on a device: 1 if it is not a loop, or if the count is unknown."""
    return equation.params.get("length", 1)


def devices(equation: JaxprEqn) -> int:
    """How many devices each run the body."""
    if equation.primitive.name != "shard_map":
        return 1
    axes = equation.params.get("newly_manual_axes") or equation.params["manual_axes"]  # in jax 0.10.2; elsewhere
    return math.prod(equation.params["mesh"].shape[axis] for axis in axes)


def array_of(atom: Var | Literal) -> jax.ShapeDtypeStruct:
    """What this input or output is, an array: jax's own types leave its shape out."""
    aval: Any = atom.aval
    return aval


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns")
