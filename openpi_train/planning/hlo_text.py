"""Reads the text of a compiled program (optimized, scheduled HLO): instructions, loops, groups of devices.

Read next: `traffic.py` (what is sent), `gpu/kernels.py` (what a GPU's kernels compute and move).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

# Bytes of an element, by HLO's names of types.
_ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1.0),
    **dict.fromkeys(("s4", "u4"), 0.5),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2.0),
    **dict.fromkeys(("f32", "s32", "u32"), 4.0),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8.0),
    **dict.fromkeys(("f8e4m3fn", "f8e5m2", "f8e4m3", "f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0fnu"), 1.0),
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:to_apply|calls|body|\w+_computations?)=(?:%?([\w.\-]+)|\{(.*?)\})")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# Instructions whose computations are instructions of the program. A fusion's are one kernel, and those of a reduction,
# a collective, a scatter or a sort say what is done with two elements.
CALLING = ("while", "call", "conditional", "async-start")
_HOST = "S(5)"  # the memory space of the host in a layout (xla/layout.h: kHostMemorySpace)


@dataclasses.dataclass(frozen=True)
class HloArray:
    """Type and shape of an array on one device, and whether it lies in host memory."""

    dtype: str
    shape: tuple[int, ...]
    on_host: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> float:
        """Bytes of an element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> float:
        """Bytes of the array, without padding."""
        return self.size * self.item_bytes


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One instruction, as texts: of most of a program's nobody asks more than the operation.

    `shape` is its result's, `inside` what its parentheses hold, `attributes` the rest of the line.
    """

    name: str
    opcode: str
    shape: str
    inside: str
    attributes: str
    is_root: bool = False

    @functools.cached_property
    def results(self) -> tuple[HloArray, ...]:
        """The arrays of its result, those of nested tuples one after the other."""
        return arrays_in(self.shape)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of instructions of the same computation."""
        return () if self.opcode == "parameter" else tuple(re.findall(r"%([\w.\-]+)", self.inside))

    @property
    def number(self) -> int:
        """A parameter's number; 0 of others."""
        return int(self.inside) if self.opcode == "parameter" else 0

    @property
    def result_bytes(self) -> float:
        """Bytes of all results."""
        return sum(array.num_bytes for array in self.results)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs. A loop's condition is not one of them."""
        found = (name for one, several in _CALLED.findall(self.attributes) for name in (one or several).split(", "))
        return tuple(name.lstrip("%") for name in found)

    @property
    def trips(self) -> int | None:
        """How often a loop runs, if the compiler knows."""
        known = _TRIPS.search(self.attributes)
        return int(known[1]) if known else None

    @property
    def op_name(self) -> str:
        """The operation of the traced program that it stems from, with scopes; empty if unknown."""
        found = _OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    def text(self, key: str) -> str:
        """The attribute `key`, up to the next comma or the closing brace; empty without it."""
        found = re.search(rf'\b{key}"?[=:] ?(\{{[^}}]*\}}|\[[^\]]*\]|[^,\s]+)', self.attributes)
        return found[1] if found else ""

    def numbers(self, key: str) -> tuple[int, ...]:
        """The numbers in the attribute `key`."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.text(key)))

    def groups(self, num_devices: int) -> np.ndarray:
        """The groups of devices of a collective: device numbers "group member", in any of HLO's three notations."""
        if mesh := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", self.attributes):
            return _mesh_groups(mesh[1], mesh[2])
        if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", self.attributes):
            shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
            devices = np.arange(math.prod(dims or ())).reshape(dims or ())
            return devices.transpose(order).reshape(shape)
        if listed := re.search(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", self.attributes):
            return np.array([[int(n) for n in re.findall(r"\d+", group)] for group in listed[1].split("},")])
        return np.arange(num_devices)[None]


Computation = Mapping[str, HloInstruction]


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """Computations by name, each with its instructions by name in the order in which they run; `entry` runs first."""

    computations: Mapping[str, Computation]
    entry: str

    def operands(self, computation: str, instruction: HloInstruction) -> tuple[tuple[HloArray, ...], ...]:
        """The results of each of its operands."""
        return tuple(self.computations[computation][name].results for name in instruction.operands)


def read_hlo(text: str) -> HloProgram:
    """The program of an HLO module's text. Raises ValueError if it has no entry computation."""
    computations: dict[str, dict[str, HloInstruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (instruction := _instruction(line.strip())):
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    return HloProgram(computations, entry)


def arrays_in(shape: str) -> tuple[HloArray, ...]:
    """The arrays of the text of a shape, which may be a tuple's."""
    return tuple(
        HloArray(dtype, tuple(int(n) for n in dims.split(",") if n), _HOST in layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
        if dtype in _ITEM_BYTES
    )


def _instruction(line: str) -> HloInstruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    root, name, shape, opcode, rest = found.groups()
    inside, _, attributes = rest.partition(")")
    return HloInstruction(name, opcode, shape, inside, attributes, is_root=root is not None)


def _mesh_groups(axes: str, chosen: str) -> np.ndarray:
    """Groups along `chosen` of a mesh's `axes`, such as "'a'=4,'b'=2" and "'a':(1)2": the outer two devices of a."""
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    dims: list[int] = []
    starts: dict[str, int] = {}
    parts = {name: (outer, size) for name, outer, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)}
    along: list[int] = []
    for axis, size in sizes.items():
        starts[axis] = len(dims)
        outer, inner = parts.get(axis, ("", ""))
        if inner:
            dims += [int(outer), int(inner), size // (int(outer) * int(inner))]
            along += [starts[axis] + 1]
        else:
            dims.append(size)
            along += [starts[axis]] if axis in parts else []
    devices = np.arange(math.prod(dims)).reshape(dims)
    members = math.prod(dims[dim] for dim in along)
    return np.moveaxis(devices, along, range(-len(along), 0)).reshape(-1, members)


def runs(program: HloProgram, name: str | None = None, times: int = 1) -> Iterator[tuple[str, HloInstruction, int]]:
    """Every instruction that runs, with its computation and how often; what fusions are made of is left out.

    All branches of a conditional count. A loop whose trip count the compiler does not know counts once.
    """
    name = program.entry if name is None else name
    for instruction in program.computations[name].values():
        yield name, instruction, times
        if instruction.opcode in CALLING:
            inner = times * (instruction.trips or 1) if instruction.opcode == "while" else times
            for called in instruction.called:
                yield from runs(program, called, inner)


def endless(program: HloProgram) -> list[HloInstruction]:
    """The loops that run whose trip count the compiler does not know."""
    return [one for _, one, _ in runs(program) if one.opcode == "while" and one.trips is None]
