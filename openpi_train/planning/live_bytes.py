"""The peak memory of the arrays of a traced program, and what is computed by then. Read next: `costs.py`, the caller.

This models a compiler's fusion without running one. An array is stored if its operation is not elementwise, if a
product, convolution or loop reads it, or if storing it takes less memory than storing its inputs. All others are
computed where they are read, fused into the reader. Compilers differ in norms: XLA for GPUs computes arithmetic between
an array and its sums in the kernel that reads it, and what follows from a convolution even in the gradient of a maximum
over windows; XLA for CPUs stores each step.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from openpi_train.planning.jaxprs import bodies

# Bytes of an array of this shape and type that count.
SizeOf = Callable[[Any], float]

# Operations whose output has the memory layout of their input.
_VIEWS = frozenset(
    "bitcast_convert_type copy expand_dims mesh_cast name optimization_barrier pvary pcast reshape sharding_constraint "
    "squeeze stop_gradient transpose".split()
)
# Operations that can be fused into their reader, besides elementwise arithmetic.
_MOVES = frozenset("broadcast_in_dim concatenate dynamic_slice gather iota pad rev slice split".split())
_CONVOLUTION = "conv_general_dilated"
# Operations that reuse the memory of their first input for the output.
_IN_PLACE = frozenset("dynamic_update_slice psum psum_invariant scatter scatter-add".split())
# Operations that can look elementwise, by their shapes, but read other elements.
_BY_ITSELF = frozenset("all_to_all cumlogsumexp cummax cummin cumprod cumsum dot_general fft ppermute".split())
_BY_ITSELF |= _IN_PLACE | {_CONVOLUTION, "random_bits", "sort"}


# What sums of an array, such as its means, may take beside it and count for nothing, as a share of it.
_SLACK = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """What is known of a compiler. The default is XLA for CPUs.

    `fuses_norms`: it computes norms where they are read, as XLA for GPUs does. `puts_off`: it makes the gradients of
    convolutions' kernels last, as that does where they are sent to other devices.
    """

    fuses_norms: bool = False
    puts_off: bool = False


@dataclasses.dataclass(frozen=True)
class Moment:
    """A time in a program: the bytes of its arrays, which outputs, by number, are made later, and which groups of
    inputs, by number, are not needed then: they, and copies made from them alone, are read only before that time or,
    where layers are unrolled, only after it. Loops have their copies of whole stacks from the beginning.
    `begun_layers`: of how many unrolled layers, 2 at most, such outputs are made by then, or begun; in loops 2."""

    num_bytes: float
    later: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    begun_layers: int = 2


def peak_bytes(jaxpr: Any, size_of: SizeOf, compiler: Compiler = Compiler()) -> float:
    """Peak bytes of the arrays that a jaxpr computes, by `size_of`, without its inputs."""
    return moments(jaxpr, size_of, 0, compiler=compiler)[0].num_bytes


def moments(
    jaxpr: Any,
    size_of: SizeOf,
    num_outputs: int,
    groups: Sequence[Sequence[int]] = (),
    *,
    compiler: Compiler = Compiler(),
) -> list[Moment]:
    """The times at which memory can be fullest, the one with most bytes first.

    They differ in how many of the first `num_outputs` outputs, and of their layers, are there and in which of these
    `groups` of inputs, each by number, are read by then and later, whose own bytes `size_of` does not count: of times
    that differ in outputs only, at each there are more bytes than at any later one. Arguments as those of `peak_bytes`.
    """
    program = _Program(size_of, compiler)
    known = {var: _Array(0.0, 0, ()) for var in (*jaxpr.constvars, *jaxpr.invars)}
    program.add(jaxpr, known)
    for var in jaxpr.outvars:
        program.read(known, var, stored=True)
    for array in program.read_last:
        program.read_array(array, stored=True)
    outputs = [program.array(known, var) for var in jaxpr.outvars[:num_outputs]]
    made = [_begun(array) for array in outputs]
    layers = _layers_begun(outputs)
    alive, found = program.alive(), []
    read = program.reads([[known[jaxpr.invars[number]] for number in group] for group in groups])
    # Of layers that are unrolled, and not read in the backward pass, there is one at a time.
    passing = min(made, default=0) if program.unrolls else 0
    changes = {min(time, len(alive)) for first, last in read for time in (first, last + 1)}
    for begin, end in itertools.pairwise(sorted({0, *made, *layers, *changes, len(alive)})):
        later = frozenset(number for number, when in enumerate(made) if when > begin)
        unread = frozenset(
            number
            for number, (first, last) in enumerate(read)
            if last < max(begin, passing) or (program.unrolls and first >= end)
        )
        begun_layers = sum(when <= begin for when in layers)
        found.append(Moment(float(alive[begin:end].max()), later, unread, begun_layers))
    most: dict[frozenset[int], float] = {}
    kept = []
    for moment in reversed(found):
        if moment.num_bytes > most.get(moment.unread, -1.0):
            kept.append(moment)
            most[moment.unread] = moment.num_bytes
    return sorted(kept, key=lambda moment: -moment.num_bytes)


@dataclasses.dataclass(eq=False)
class _Array:
    """An array: its bytes, the operation that makes it, and the one that reads it last (-1: none).

    `sources` are the arrays from which a reader may recompute it; None if it is always stored. `of_convolution`: it is
    a convolution's output, or recomputed from one. `copy_last_read`: as `last_read`, of what is computed from it alone;
    `first_read` is of either.
    `parts`: of a stack, what unrolled turns of a loop have made.
    """

    size: float
    made: int
    sources: Sequence["_Array"] | None
    last_read: int = -1
    first_stored_read: int | None = None
    of_convolution: bool = False
    is_scalar: bool = False
    copy_last_read: int = -1
    first_read: int = sys.maxsize
    parts: Sequence["_Array"] = ()


@dataclasses.dataclass
class _Program:
    """The operations of a jaxpr in order, with calls inlined."""

    size_of: SizeOf
    compiler: Compiler = Compiler()
    arrays: list[_Array] = dataclasses.field(default_factory=list)
    # For every operation: whether it ends a fusion, and the bytes that it takes inside.
    ends: list[bool] = dataclasses.field(default_factory=list)
    inside: list[float] = dataclasses.field(default_factory=list)
    # Inputs whose memory an operation reuses for its outputs, if nothing reads them afterwards.
    given: list[tuple[_Array, int]] = dataclasses.field(default_factory=list)
    # What is read once more at the end, by what is put off.
    read_last: list[_Array] = dataclasses.field(default_factory=list)
    # Whether it has unrolled loops.
    unrolls: bool = False

    @property
    def now(self) -> int:
        """The index of the next operation."""
        return len(self.ends)

    def add(self, jaxpr: Any, known: dict[Any, _Array]) -> None:
        """Append the operations of `jaxpr`, whose inputs are `known`; its arrays are entered there."""
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            inputs = [known[var] for var in equation.invars if not isinstance(var, Literal)]
            body = _called(equation)
            if body is not None:
                own = dict.fromkeys(body.constvars, _Array(0.0, 0, ()))
                own |= zip(body.invars, [self.array(known, var) for var in equation.invars], strict=True)
                self.add(body, own)
                known |= zip(equation.outvars, [self.array(own, var) for var in body.outvars], strict=True)
            elif name == "scan" and equation.params["unroll"] >= equation.params["length"]:
                self._unroll(equation, known)
            elif name in _VIEWS:
                known |= zip(equation.outvars, [self.array(known, var) for var in equation.invars], strict=False)
            elif _is_fused(equation) or (self.compiler.fuses_norms and _is_by_element(equation, spread=True)):
                self._make(known, equation.outvars, tuple(inputs), any(array.of_convolution for array in inputs))
                self._end(False)
            else:
                of_windows = self.compiler.fuses_norms and name.startswith("select_and_")  # the gradient of a maximum
                for array in inputs:
                    is_fused = name.startswith(("reduce_", "arg")) or (of_windows and array.of_convolution)
                    self.read_array(array, stored=not is_fused)
                if self.compiler.puts_off and name == _CONVOLUTION and not self.size_of(equation.outvars[0].aval):
                    self.read_last += inputs
                if name in _IN_PLACE:
                    self.given += [(inputs[0], self.now)]
                if name == "scan":
                    consts, carried = _scan_inputs(equation)
                    inits = equation.invars[consts : consts + carried]
                    self.given += [(self.array(known, var), self.now) for var in inits]
                elif name == "while":
                    consts = equation.params["cond_nconsts"] + equation.params["body_nconsts"]
                    self.given += [(self.array(known, var), self.now) for var in equation.invars[consts:]]
                inside = _inside(equation, self.size_of, self.compiler)
                for var in equation.outvars:
                    self._make(known, [var], None, name == _CONVOLUTION)
                self._end(True, inside)

    def _unroll(self, scan: Any, known: dict[Any, _Array]) -> None:
        """Append the turns of a scan one after the other. Its stacks are in parts, which are joined where anything but
        another such scan reads them."""
        self.unrolls = True
        body, (consts, carried) = bodies(scan)[0], _scan_inputs(scan)
        inputs = [self.array(known, var) for var in scan.invars]
        states, stacked = inputs[consts : consts + carried], body.invars[consts + carried :]
        turns: list[list[_Array]] = [[]] * scan.params["length"]
        for turn in sorted(range(len(turns)), reverse=scan.params["reverse"]):
            own = dict.fromkeys(body.constvars, _Array(0.0, 0, ()))
            own |= zip(body.invars, [*inputs[:consts], *states], strict=False)
            for var, stack in zip(stacked, inputs[consts + carried :], strict=True):
                if stack.parts:
                    own[var] = stack.parts[turn]
                else:
                    self._make(own, [var], (stack,), stack.of_convolution)
                    self._end(False)
            self.add(body, own)
            made = [self.array(own, var) for var in body.outvars]
            states, turns[turn] = made[:carried], made[carried:]
        known |= zip(scan.outvars, states, strict=False)
        for number, var in enumerate(scan.outvars[carried:]):
            parts = [turn[number] for turn in turns]
            self._make(known, [var], parts, any(part.of_convolution for part in parts))
            known[var].parts = parts
            self._end(False)

    def read(self, known: Mapping[Any, _Array], var: Any, *, stored: bool) -> None:
        """Record that this array is read after all operations so far; `stored`: it must be in memory."""
        self.read_array(self.array(known, var), stored=stored)

    def reads(self, groups: Sequence[Sequence[_Array]]) -> list[tuple[int, int]]:
        """When each group of inputs, or what is computed from one alone, such as a copy in another type, is first and
        last read.

        To be called after `alive`, which tells what is read by being computed again.
        """
        for array in reversed(self.arrays):
            is_copy = not array.size  # nothing of the rows
            for source in array.sources or ():
                source.first_read = min(source.first_read, array.first_read if is_copy else array.made)
                if is_copy:
                    source.copy_last_read = max(source.copy_last_read, array.last_read, array.copy_last_read)
        return [
            (
                min(array.first_read for array in group),
                max(max(array.last_read, array.copy_last_read) for array in group),
            )
            for group in groups
        ]

    def peak(self) -> float:
        """The maximum bytes over all operations."""
        return float(self.alive().max())

    def alive(self) -> np.ndarray:
        """The bytes during every operation, and at the end."""
        ended = np.cumsum([0, *self.ends, 0])  # number of ends before each operation
        alive = np.zeros(self.now + 2)
        given = {(id(array), when) for array, when in self.given}
        for array in reversed(self.arrays):
            if array.last_read < 0:
                continue
            if not self._is_stored(array, ended):
                for source in array.sources or ():
                    source.last_read = max(source.last_read, array.last_read)
                continue
            made = array.made
            if array.sources is not None:
                for source in array.sources:
                    source.last_read = max(source.last_read, array.made)
                if not array.sources and array.first_stored_read is not None:
                    made = array.first_stored_read
            last = array.last_read - ((id(array), array.last_read) in given)
            alive[made] += array.size
            alive[max(last, made) + 1] -= array.size
        return np.cumsum(alive)[: self.now + 1] + np.array([*self.inside, 0.0])

    def _is_stored(self, array: _Array, ended: Any) -> bool:
        """Whether it is written to memory. All its readers are known by now."""
        if array.sources is None or array.first_stored_read is not None:
            return True
        if ended[array.last_read] == ended[array.made]:
            return False
        return _kept_for(array.sources, array.last_read) > (1 + _SLACK) * array.size

    def array(self, known: Mapping[Any, _Array], var: Any) -> _Array:
        """The array of a variable."""
        return _Array(0.0, 0, ()) if isinstance(var, Literal) else known[var]

    def read_array(self, array: _Array, *, stored: bool) -> None:
        """The same of an array."""
        array.last_read = self.now
        array.first_read = min(array.first_read, self.now)
        if stored and array.first_stored_read is None:
            array.first_stored_read = self.now

    def _make(
        self,
        known: dict[Any, _Array],
        variables: Sequence[Any],
        sources: Sequence[_Array] | None,
        of_convolution: bool,
    ) -> None:
        made = {
            var: _Array(
                self.size_of(var.aval),
                self.now,
                sources,
                of_convolution=of_convolution,
                is_scalar=getattr(var.aval, "size", 1) == 1,
            )
            for var in variables
        }
        self.arrays += made.values()
        known |= made

    def _end(self, ends: bool, inside: float = 0.0) -> None:
        self.ends.append(ends)
        self.inside.append(inside)


def _fused_into(array: _Array) -> Iterator[_Array]:
    """This array, and what it is computed from where that can be fused: no inputs of the program, nor scalars."""
    unread, seen = [array], set()
    while unread:
        array = unread.pop()
        if id(array) not in seen and array.made and not array.is_scalar:  # inputs have 0
            seen.add(id(array))
            unread += () if array.parts else array.sources or ()
            yield array


def _begun(array: _Array) -> int:
    """The operation that makes this array, or the first of what it is computed from where that can be fused."""
    return min((one.made for one in _fused_into(array)), default=array.made)


def _layers_begun(outputs: Sequence[_Array]) -> list[int]:
    """When the first of these outputs of an unrolled layer is begun, and when one of a second layer; of loops 0."""
    begun = [sorted(_begun(part) for one in _fused_into(array) for part in one.parts) for array in outputs]
    return [min((times[n] for times in begun if len(times) > n), default=0) for n in range(2)]


def _kept_for(sources: Sequence[_Array], until: int) -> float:
    """Bytes that stay longer so that these arrays can be computed again at `until`: of what they are made of, too,
    where it is not stored itself. What is alive then anyway, or can be computed again then, counts for nothing."""
    seen: set[int] = set()

    def kept(array: _Array) -> float:
        if array.last_read >= until or id(array) in seen:
            return 0.0
        seen.add(id(array))
        if array.sources is None or array.first_stored_read is not None:
            return array.size
        return min(array.size, sum(map(kept, array.sources)))

    return sum(map(kept, sources))


def _is_fused(equation: Any) -> bool:
    """Whether an operation can be fused into the reader of its output: elementwise arithmetic, and some moves.

    Arithmetic between an array and its sums or means (norms) is excluded: XLA fuses it on GPUs but not on CPUs.
    """
    return equation.primitive.name in _MOVES or _is_by_element(equation)


def _is_by_element(equation: Any, *, spread: bool = False) -> bool:
    """Whether it is arithmetic by element, of arrays of one shape; `spread`: inputs may have dims of size 1 instead."""
    if len(equation.outvars) != 1 or equation.primitive.name in _BY_ITSELF or bodies(equation):
        return False
    shapes = {getattr(var.aval, "shape", ()) for var in equation.invars} - {()}
    result = getattr(equation.outvars[0].aval, "shape", ())
    if not spread:
        return shapes <= {result}
    return all(
        len(shape) == len(result) and all(dim in (1, whole) for dim, whole in zip(shape, result, strict=True))
        for shape in shapes
    )


def _called(equation: Any) -> Any:
    """The jaxpr of a plain call; None for other operations."""
    found = bodies(equation)
    if len(found) != 1 or equation.primitive.name in ("scan", "while", "cond"):
        return None
    return found[0] if len(found[0].invars) == len(equation.invars) else None


def _inside(equation: Any, size_of: SizeOf, compiler: Compiler) -> float:
    """Bytes that an operation takes in addition to its inputs and outputs: one iteration of a loop, or one branch."""
    if equation.primitive.name == "scan":
        consts, carried = _scan_inputs(equation)
        return _loop_bytes(bodies(equation)[0], consts, carried, _Program(size_of, compiler))
    if compiler.fuses_norms and equation.primitive.name.startswith("select_and_"):
        # XLA for GPUs finds the place of each maximum first, a number for every dim.
        return size_of(equation.invars[0].aval) * len(equation.invars[0].aval.shape)
    if equation.primitive.name == "while":
        body = equation.params["body_jaxpr"].jaxpr
        return _loop_bytes(body, equation.params["body_nconsts"], len(body.outvars), _Program(size_of, compiler))
    return max((peak_bytes(body, size_of, compiler) for body in bodies(equation)), default=0.0)


def _scan_inputs(scan: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried on (parameters of jax 0.10 and of 0.11)."""
    if "ft_in" in scan.params:
        consts, carried, _ = (len(part) for part in scan.params["ft_in"].unpack())
        return consts, carried
    return scan.params["num_consts"], scan.params["num_carry"]


def _loop_bytes(body: Any, num_consts: int, num_carried: int, program: _Program) -> float:
    """Bytes of one iteration in addition to the loop's inputs and outputs: what it makes, and its slices of the
    inputs."""
    size_of = program.size_of
    consts, carried = body.invars[:num_consts], body.invars[num_consts : num_consts + num_carried]
    known = dict.fromkeys((*body.constvars, *consts), _Array(0.0, 0, ()))
    known |= {var: _Array(size_of(var.aval), 0, None) for var in carried}
    known |= {var: _Array(size_of(var.aval), 0, ()) for var in body.invars[num_consts + num_carried :]}
    program.arrays += [known[var] for var in body.invars[num_consts:]]
    program.add(body, known)
    for var in body.outvars[num_carried:]:  # written to its place in the stack immediately
        array = known.get(var) if not isinstance(var, Literal) else None
        if array is not None:
            array.last_read = max(array.last_read, array.made)
    for var in body.outvars[:num_carried]:
        program.read(known, var, stored=True)
    return max(program.peak() - sum(size_of(var.aval) for var in carried), 0.0)
