"""An estimate of the bytes that a step's activations take, from its traced gradient: said to be within a quarter.

No compiler is imitated. The rules:

1. An array is there from the operation that makes it to the last one that reads it.
2. Arithmetic by element, and what only moves elements, is computed where it is read and not stored: what it is made
   from stays until then. What a product, a convolution or a loop reads is stored.
3. A loop over layers takes the stacks that it makes and the work of one turn, whether it is unrolled or not.
4. What does not depend on the rows (parameters, gradients) does not count: `memory.py` has it, by shapes.

So it is what the backward pass keeps and the work of one layer of it, or the forward pass where that needs more. What a
step needs indeed its compiler says (`training/fitting.py`). Read next: `costs.py`, the caller.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from openpi_train.planning.jaxprs import SizeOf, bodies

# What moves elements, or gives them another shape.
_MOVES = frozenset(
    "bitcast_convert_type broadcast_in_dim concatenate copy dynamic_slice expand_dims gather iota mesh_cast name "
    "optimization_barrier pad pcast pvary reshape rev sharding_constraint slice split squeeze stop_gradient "
    "transpose".split()
)
# What may write its result in the place of its first input.
_IN_PLACE = frozenset("dynamic_update_slice psum psum_invariant scatter scatter-add".split())
# What reads other elements, though its shapes may look as if it did not.
_BY_ITSELF = _IN_PLACE | frozenset(
    "all_to_all conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general fft ppermute random_bits "
    "sort".split()
)
_LOOPS = ("scan", "while", "cond")


@dataclasses.dataclass(eq=False)
class _Array:
    """Bytes, the operations that make it and read it last, and what it is computed from where it is not stored."""

    size: float = 0.0
    made: int = -1
    sources: Sequence["_Array"] = ()
    is_stored: bool = True
    last: int = -1


@dataclasses.dataclass(frozen=True)
class _Operation:
    """Bytes that it takes inside, what it makes, and whether that may have the place of what it reads last."""

    inside: float
    outputs: Sequence[_Array]
    reuses: bool


def peak_bytes(jaxpr: Jaxpr, size_of: SizeOf, *, counts_outputs: bool = True) -> float:
    """The most bytes, by `size_of`, of the arrays that this program computes; its inputs do not count."""
    program: list[_Operation] = []
    outputs = _add(jaxpr, [_Array() for _ in jaxpr.invars], size_of, program)
    for output in outputs:
        output.is_stored, output.last = True, len(program)
        output.size *= counts_outputs
    arrays = [array for one in program for array in one.outputs]
    for array in reversed(arrays):
        for source in array.sources:
            source.last = max(source.last, array.made if array.is_stored else array.last)
    made, freed = [0.0] * len(program), [0.0] * (len(program) + 1)
    for array in arrays:
        if array.is_stored and array.last >= 0:
            made[array.made] += array.size
            freed[max(array.last, array.made)] += array.size
    alive = [0.0, *itertools.accumulate(new - old for new, old in zip(made, freed, strict=False))]
    during = (
        alive[now] + one.inside + (max(made[now] - freed[now], 0.0) if one.reuses else made[now])
        for now, one in enumerate(program)
    )
    return max(during, default=0.0)


def _add(jaxpr: Jaxpr, inputs: Sequence[_Array], size_of: SizeOf, program: list[_Operation]) -> list[_Array]:
    """Append the operations of `jaxpr`, with calls inlined. Returns its outputs."""
    known = {**{var: _Array() for var in jaxpr.constvars}, **dict(zip(jaxpr.invars, inputs, strict=True))}

    def arrays_of(variables: Sequence[Var | Literal]) -> list[_Array]:
        return [_Array() if isinstance(var, Literal) else known[var] for var in variables]

    for equation in jaxpr.eqns:
        name, read, inner = equation.primitive.name, arrays_of(equation.invars), bodies(equation)
        if len(inner) == 1 and name not in _LOOPS and len(inner[0].invars) == len(read):
            known |= zip(equation.outvars, _add(inner[0], read, size_of, program), strict=True)
            continue
        is_fused = name in _MOVES or _is_by_element(equation)
        for array in read if not is_fused else ():
            array.last = len(program)
            array.is_stored |= not name.startswith(("reduce_", "arg"))  # a sum computes its input as it reads it
        made = [
            _Array(size_of(var.aval), len(program), read if is_fused else (), not is_fused) for var in equation.outvars
        ]
        inside = max((peak_bytes(body, size_of, counts_outputs=False) for body in inner), default=0.0)
        program.append(_Operation(inside, made, is_fused or name in _IN_PLACE))
        known |= zip(equation.outvars, made, strict=True)
    return arrays_of(jaxpr.outvars)


def _is_by_element(equation: JaxprEqn) -> bool:
    """Whether it is arithmetic by element; of some inputs all elements of a dim may be one."""
    if len(equation.outvars) != 1 or equation.primitive.name in _BY_ITSELF or bodies(equation):
        return False
    result = getattr(equation.outvars[0].aval, "shape", ())
    shapes = {getattr(var.aval, "shape", ()) for var in equation.invars} - {()}
    return all(
        len(shape) == len(result) and all(dim in (1, whole) for dim, whole in zip(shape, result, strict=True))
        for shape in shapes
    )
