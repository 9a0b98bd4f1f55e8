"""What one kernel of a compiled GPU program computes, reads and writes. Read next: `hlo_text.py`, `step_account.py`.

Each kernel reads its inputs from memory and writes its results there: nothing is assumed to stay in the cache between
two kernels. Of an input of which a fusion reads only slices or rows, and of a result that it updates in place, only
those parts count.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

from openpi_train.planning.hlo_text import Computation, HloArray, HloInstruction, HloProgram

# Instructions that run nothing on the GPU.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"while", "call", "conditional", "opt-barrier", "add-dependency", "domain", "async-start", "async-update"}
# A fusion that runs beside the kernels, as XLA makes of what only copies (jaxlib 0.11).
COPIED = "fusion-start"
# Elementwise instructions of one input and moves: of a slice of the result only that slice of the input is read.
_FOLLOWED = {"bitcast", "reshape", "copy", "transpose", "convert", "negate", "reverse"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the number of the operand that is written
# Attention by cuDNN: products "b n t s" times the width of a head, forward (2) and backward (5, as the products of
# queries and keys are computed again).
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """What one run of a kernel does on one device. `flops` are those of matrix products and convolutions, two per
    multiply-add, of elements of `item_bytes` bytes; `read` and `written` are bytes of device memory."""

    flops: float = 0.0
    read: float = 0.0
    written: float = 0.0
    item_bytes: float = 2.0

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


def is_kernel(instruction: HloInstruction) -> bool:
    """Whether it launches something on the GPU. What starts or ends a transfer is no kernel."""
    return instruction.opcode not in _FREE and not instruction.opcode.endswith("-done")


def kernel_work(program: HloProgram, computation: str, instruction: HloInstruction) -> KernelWork:
    """The work of one run of an instruction for which `is_kernel` holds."""
    inputs = program.operands(computation, instruction)
    if instruction.opcode in ("fusion", COPIED):
        return _fusion(program, instruction, inputs)
    if instruction.opcode == "custom-call":
        return _custom_call(instruction, inputs)
    flops, item_bytes = _product(program, computation, instruction)
    read = sum(array.num_bytes for arrays in inputs for array in arrays)
    written = instruction.result_bytes
    if instruction.opcode in ("dynamic-slice", "slice"):
        read = written
    elif instruction.opcode in _UPDATES:
        read = written = sum(array.num_bytes for array in inputs[_UPDATES[instruction.opcode]])
    return KernelWork(flops, read, written, item_bytes)


def _fusion(program: HloProgram, instruction: HloInstruction, inputs: tuple[tuple[HloArray, ...], ...]) -> KernelWork:
    (name,) = instruction.called
    body = program.computations[name]
    users: dict[str, list[HloInstruction]] = {}
    flops, item_bytes = 0.0, 2.0
    for one in body.values():
        for operand in one.operands:
            users.setdefault(operand, []).append(one)
        found, size = _product(program, name, one)
        flops, item_bytes = flops + found, size if found else item_bytes
    parameters = [one for one in body.values() if one.opcode == "parameter"]
    read = sum(_read_bytes(body, users, one, _bytes(inputs[one.number])) for one in parameters)
    (root,) = (one for one in body.values() if one.is_root)
    outputs = [body[operand] for operand in root.operands] if root.opcode == "tuple" else [root]
    if any(one.opcode == "custom-call" for one in body.values()):
        outputs = [one for one in outputs if not _is_workspace(one.results)]
    return KernelWork(flops, read, sum(_written_bytes(body, one) for one in outputs), item_bytes)


def _read_bytes(
    body: Computation, users: dict[str, list[HloInstruction]], source: HloInstruction, full: float
) -> float:
    """Bytes of a fusion's parameter `source`, of `full` bytes, that are read."""
    item_bytes = source.results[0].item_bytes if source.results else 0.0

    def read_by(value: HloInstruction) -> Iterator[float]:
        for user in users.get(value.name, []):
            is_first = user.operands[0] == value.name
            if user.opcode in _SLICES and is_first:
                yield user.results[0].size * item_bytes
            elif user.opcode in _UPDATES and is_first and user.operands.count(value.name) == 1:
                yield 0.0
            elif user.opcode in _FOLLOWED and not user.is_root:
                yield from read_by(user)
            else:
                yield full

    return min(sum(read_by(source)), full)


def _written_bytes(body: Computation, output: HloInstruction) -> float:
    """Bytes that a fusion writes of one of its outputs."""
    item_bytes = output.results[0].item_bytes if output.results else 0.0
    source = output
    while source.opcode in _FOLLOWED:
        source = body[source.operands[0]]
    if source.opcode in _UPDATES and not _is_new(body, body[source.operands[0]]):
        return sum(array.size for array in body[source.operands[_UPDATES[source.opcode]]].results) * item_bytes
    return output.result_bytes


def _is_new(body: Computation, updated: HloInstruction) -> bool:
    """Whether what is updated in place has first to be written: it is not one of the fusion's inputs."""
    while updated.opcode in (*_FOLLOWED, "get-tuple-element"):
        updated = body[updated.operands[0]]
    return updated.opcode not in ("parameter", *_UPDATES)


def _custom_call(instruction: HloInstruction, inputs: tuple[tuple[HloArray, ...], ...]) -> KernelWork:
    """A library's kernel. Its workspace is neither read nor written by others."""
    flops, item_bytes = _library_flops(instruction, inputs)
    first, *others = instruction.results or (HloArray("u8", (0,)),)
    results = [first, *(array for array in others if not _is_workspace((array,)))]
    return KernelWork(flops, sum(map(_bytes, inputs)), _bytes(tuple(results)), item_bytes)


def _library_flops(instruction: HloInstruction, inputs: tuple[tuple[HloArray, ...], ...]) -> tuple[float, float]:
    """FLOPs of a library's call, and the bytes of an element; 0 FLOPs of one that is not known."""
    target = instruction.text("custom_call_target").strip('"')
    for name, count in _LIBRARIES.items():
        if name in target:
            return count(instruction, inputs), inputs[0][0].item_bytes
    return 0.0, 2.0


def _is_workspace(results: tuple[HloArray, ...]) -> bool:
    """Whether this is a result of bytes, in which a library keeps what is only its own."""
    return bool(results) and all(array.dtype in ("s8", "u8") for array in results)


def _product(program: HloProgram, computation: str, instruction: HloInstruction) -> tuple[float, float]:
    """FLOPs of a product or convolution, and the bytes of an element; 0 FLOPs for anything else.

    A fusion may hold a library's call, which then reads and writes slices of stacks.
    """
    if instruction.opcode == "custom-call":
        return _library_flops(instruction, program.operands(computation, instruction))
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0, 2.0
    inputs = program.operands(computation, instruction)
    count = _product_flops if instruction.opcode == "dot" else _convolution_flops
    return count(instruction, inputs), inputs[0][0].item_bytes


def _product_flops(instruction: HloInstruction, inputs: tuple[tuple[HloArray, ...], ...]) -> float:
    key = "lhs_contracting_dims" if instruction.opcode == "dot" else "lhs_contracting_dimensions"
    contracted = math.prod(inputs[0][0].shape[dim] for dim in instruction.numbers(key))
    return 2.0 * instruction.results[0].size * contracted


def _convolution_flops(instruction: HloInstruction, inputs: tuple[tuple[HloArray, ...], ...]) -> float:
    """Two per weight and output of the forward pass, whose gradients are as much."""
    left, right, result = inputs[0][0], inputs[1][0], instruction.results[0]
    outputs, kernel = result, right
    if "BackwardInput" in instruction.attributes:
        outputs = left
    elif "BackwardFilter" in instruction.attributes:
        outputs, kernel = right, result
    order = instruction.text("dim_labels").partition("_")[2].partition("->")[0]
    return 2.0 * outputs.size * kernel.size / kernel.shape[order.index("o")]


def _attention_flops(instruction: HloInstruction, inputs: tuple[tuple[HloArray, ...], ...]) -> float:
    sizes = re.search(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]', instruction.attributes)
    weights = math.prod(map(int, re.findall(r"\d+", sizes[1]))) if sizes else 0  # b n t s
    products = _BACKWARD_PRODUCTS if "Backward" in instruction.attributes else _FORWARD_PRODUCTS
    return 2.0 * products * weights * inputs[0][0].shape[-1]


_Count = Callable[[HloInstruction, tuple[tuple[HloArray, ...], ...]], float]
# By part of the name of the library's call (xla/service/gpu/cublas_cudnn.cc).
_LIBRARIES: dict[str, _Count] = {
    "__cublas$": _product_flops,
    "__cudnn$conv": _convolution_flops,
    "__cudnn$fmha": _attention_flops,
}


def _bytes(arrays: tuple[HloArray, ...]) -> float:
    return sum(array.num_bytes for array in arrays)
