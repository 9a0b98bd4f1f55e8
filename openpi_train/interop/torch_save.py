"""Writer of files as `torch.save` writes them, without torch: a zip file of a pickle and the values of each tensor.

The pickle is written operation by operation (protocol 2, torch's), since it names classes that need not be installed
here. Read next: `torch_file.py` (the reader), `diffusion_policy_checkpoint.py`.
"""

import dataclasses
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openpi_train.interop.stored_leaves import StoredLeaf, bytes_in_order

_STORAGES = {"float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage"}
_STORAGES |= {"bfloat16": "BFloat16Storage", "int64": "LongStorage", "int32": "IntStorage", "bool": "BoolStorage"}
_ROOT = "archive"


@dataclasses.dataclass(frozen=True)
class Name:
    """A class or function of a module, which whoever loads the file imports."""

    module: str
    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """What a function gives, called by whoever loads the file."""

    function: "Name | Call"
    arguments: tuple[Any, ...]


def save(path: Path, content: Mapping[str, object]) -> None:
    """Write nested dicts, lists, tuples, numbers, words, `Call`s and leaves; one that occurs twice is stored once."""
    pickled = _Pickle()
    pickled.add(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{_ROOT}/data.pkl", bytes(pickled.written + b"."))
        archive.writestr(f"{_ROOT}/byteorder", "little")
        for key, leaf in enumerate(pickled.leaves):
            entry = zipfile.ZipInfo(f"{_ROOT}/data/{key}")
            entry.file_size = leaf.size_bytes
            with archive.open(entry, "w") as file:
                for part in bytes_in_order(leaf):
                    file.write(part)
        archive.writestr(f"{_ROOT}/version", "3\n")


class _Pickle:
    """The operations of a pickle, and the leaves that it refers to."""

    def __init__(self) -> None:
        self.written = bytearray(b"\x80\x02")
        self.leaves: list[StoredLeaf] = []
        self._keys: dict[int, int] = {}

    def add(self, value: object) -> None:
        """The operations that leave `value` on the stack. Raises TypeError for other kinds of objects."""
        match value:
            case None | bool():
                self.written += {None: b"N", True: b"\x88", False: b"\x89"}[value]
            case int():
                self.written += b"J" + struct.pack("<i", value)
            case float():
                self.written += b"G" + struct.pack(">d", value)
            case str():
                words = value.encode()
                self.written += b"X" + struct.pack("<I", len(words)) + words
            case dict():
                self._all(b"}(", [part for pair in value.items() for part in pair], b"u")
            case list():
                self._all(b"](", value, b"e")
            case tuple():
                self._all(b"(", value, b"t")
            case Name():
                self.written += f"c{value.module}\n{value.name}\n".encode()
            case Call():
                self._all(b"", [value.function, value.arguments], b"R")
            case StoredLeaf():
                self._tensor(value)
            case _:
                raise TypeError(f"{type(value).__name__} cannot be written for torch")

    def _all(self, begin: bytes, values: Any, end: bytes) -> None:
        self.written += begin
        for value in values:
            self.add(value)
        self.written += end

    def _tensor(self, leaf: StoredLeaf) -> None:
        """torch's own call that makes a tensor of a storage (`torch._utils._rebuild_tensor_v2`)."""
        if id(leaf) not in self._keys:
            self._keys[id(leaf)] = len(self.leaves)
            self.leaves.append(leaf)
        kind, size = Name("torch", _STORAGES[str(leaf.dtype)]), math.prod(leaf.shape)
        self.add(Name("torch._utils", "_rebuild_tensor_v2"))
        self.written += b"("
        self.add(("storage", kind, str(self._keys[id(leaf)]), "cpu", size))
        self.written += b"Q"  # the storage itself: the persistent object of this description
        steps = tuple(math.prod(leaf.shape[at + 1 :]) for at in range(len(leaf.shape)))
        for part in (0, leaf.shape, steps, False, Call(Name("collections", "OrderedDict"), ())):
            self.add(part)
        self.written += b"tR"
