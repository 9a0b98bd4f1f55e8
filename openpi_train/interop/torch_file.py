"""Reader of the files that `torch.save` writes (.pth, .pt), without torch, and without running what is pickled in them.

Such a file is a pickle that names tensors, and their values: a zip file with one entry per storage, or (before torch
1.6, and torchvision's older weights) the values behind the pickle. Only the names of tensors and what torch itself
needs to rebuild them are read; any other object, such as a trainer's config beside the tensors, is a blank in its
place. Read next: `torch_pickle.py` (what is read of a pickle), `torchvision_resnet.py`,
`diffusion_policy_checkpoint.py`, `torch_save.py` (the writer).
"""

import contextlib
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, StoredLeaf, in_memory, mapped
from openpi_train.interop.torch_pickle import MOST_BYTES, Blank, Named, StridedTensor, Unpickled
from openpi_train.interop.zip_entry import values_offset
from openpi_train.runtime.exits import CheckpointError

# The first pickle of a file without zip (`torch/serialization.py: MAGIC_NUMBER`), and how many precede the tensors'.
_MAGIC, _BEFORE = 0x1950A86A20F9469CFC6C, 3
_COUNT_BYTES = 8
_SUFFIXES = (".pth", ".pt", ".pth.tar")
# Objects and depth of a trainer's config, which may refer to itself.
_MOST_PLAIN, _DEEPEST = 1_000_000, 100
# Values of a tensor that repeats those of a storage, as `expand` does.
_MOST_REPEATED = 1 << 20
# The begin of a storage's values in the file, and how many bytes are there.
_Places = Mapping[str, tuple[int, int]]


def is_torch_file(place: Place) -> bool:
    """Whether the place is a file on a disk with an ending that such files have."""
    return place.local is not None and place.url.endswith(_SUFFIXES) and place.local.is_file()


def open_torch_file(path: Path) -> Leaves:
    """The tensors of a state dict by name; those of a dict "state_dict" or "model" in it, if the file has one.

    Raises CheckpointError if the file is damaged, of another form, or if other objects are among the tensors.
    """
    with _reading(path) as (found, places):
        for name in ("state_dict", "model"):
            found = found[name] if isinstance(found, dict) and isinstance(found.get(name), dict) else found
        return _tensors(path, found, places)


def open_payload(path: Path) -> tuple[Mapping[str, Leaves], Any]:
    """The tensors of each dict in "state_dicts" of such a file, and the plain values of its "cfg", None without one.

    It is what diffusion_policy's trainers write. Raises CheckpointError as `open_torch_file`.
    """
    with _reading(path) as (found, places):
        if not isinstance(found, dict) or not isinstance(found.get("state_dicts"), dict):
            raise ValueError('it has no "state_dicts"')
        models = {
            str(name): _tensors(path, one, places)
            for name, one in found["state_dicts"].items()
            if isinstance(one, dict) and any(isinstance(value, StridedTensor) for value in one.values())
        }
        return models, _plain(found.get("cfg"))


def _plain(value: object) -> Any:
    """The numbers, words, lists and dicts that a pickled OmegaConf holds; None in place of anything else.

    Raises ValueError if they are too many, or too deep, as where one holds itself.
    """
    left = _MOST_PLAIN

    def plain(value: object, depth: int) -> Any:
        nonlocal left
        left -= 1
        if not left or depth > _DEEPEST:
            raise ValueError(
                f"the config in it has more than {_MOST_PLAIN:,} parts or {_DEEPEST} levels: it may hold itself"
            )
        if isinstance(value, Blank):
            held = value.held if isinstance(value.held, dict) else {}
            return plain(held.get("_content", held.get("_val")), depth + 1)
        if isinstance(value, dict):
            return {str(name): plain(one, depth + 1) for name, one in value.items() if isinstance(name, str | int)}
        if isinstance(value, list | tuple):
            return [plain(one, depth + 1) for one in value]
        return value if isinstance(value, str | int | float) else None

    return plain(value, 0)


def _tensors(path: Path, found: object, places: _Places) -> Leaves:
    if not isinstance(found, dict):
        raise _no_tensor(found)
    for name, one in found.items():
        if not isinstance(one, StridedTensor):
            raise _no_tensor(one)
        if not isinstance(name, str | int):
            raise ValueError("a tensor in it has no text as its name")
    return {str(name): _leaf(path, tensor, places) for name, tensor in found.items()}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[Any, _Places]]:
    """What is pickled in the file, and where its values are; errors of reading as CheckpointErrors."""
    try:
        with path.open("rb") as file:
            found, places = _of_zip(path, file) if zipfile.is_zipfile(path) else _of_pickles(file)
        yield found, places
    except (pickle.UnpicklingError, ValueError, KeyError, TypeError, EOFError, OSError, struct.error) as error:
        raise CheckpointError(f"{path} is no file of tensors that torch.save wrote, or damaged: {error}") from error
    # Of zip files: RuntimeError if it is encrypted, NotImplementedError (one of those) for a method or version.
    except (AttributeError, IndexError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error


def _no_tensor(found: object) -> ValueError:
    if isinstance(found, Blank | Named):
        return ValueError(f"it holds {found.what}, which is not needed for tensors: it is not read")
    return ValueError("it is no dictionary of tensors by name")


def _of_zip(path: Path, file: BinaryIO) -> tuple[Any, _Places]:
    """What is pickled in a zip file, and where the values of each storage are."""
    with zipfile.ZipFile(path) as archive:
        root = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
        if root is None:
            raise ValueError("it is a zip file without data.pkl")
        root, places = root.removesuffix("data.pkl"), {}
        for entry in archive.infolist():
            name = entry.filename.removeprefix(root)
            if name not in ("data.pkl", "byteorder") and not name.startswith("data/"):
                continue
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise ValueError(f"{entry.filename} is compressed")
            if entry.file_size > MOST_BYTES and not name.startswith("data/"):
                raise ValueError(
                    f"{entry.filename} has {entry.file_size:,} bytes, far more than the names of tensors need: the "
                    f"most are {MOST_BYTES:,}"
                )
            if name == "byteorder" and archive.read(entry) != b"little":
                raise ValueError("its values are not in little-endian order")
            if name.startswith("data/"):
                places[name.removeprefix("data/")] = (values_offset(file, entry), entry.file_size)
        return Unpickled(io.BytesIO(archive.read(f"{root}data.pkl"))).value, places


def _of_pickles(file: BinaryIO) -> tuple[Any, _Places]:
    """The same of a file without zip: pickles, and behind them for each storage its length and its values."""
    first = Unpickled(file)
    if first.value != _MAGIC:
        if first.others:
            raise ValueError(f"it holds {first.others[0]}, which is not needed for tensors: it is not read")
        raise ValueError("its first bytes are not those of such a file")
    for _ in range(_BEFORE - 1):
        Unpickled(file)
    names = Unpickled(file)
    order = Unpickled(file).value
    if not isinstance(order, list) or not all(isinstance(key, str | int) for key in order):
        raise ValueError("the names of its storages are lost")
    places, at = {}, file.tell()
    for key in order:
        storage = names.storages[str(key)]
        if not isinstance(storage.dtype, np.dtype):
            raise ValueError(f"its tensors are of {storage.dtype.what}, which is not read")
        size_bytes = storage.size * storage.dtype.itemsize
        places[storage.key] = (at + _COUNT_BYTES, size_bytes)
        at += _COUNT_BYTES + size_bytes
    return names.value, places


def _leaf(path: Path, tensor: StridedTensor, places: _Places) -> StoredLeaf:
    if len(tensor.shape) != len(tensor.strides):
        raise ValueError("a tensor in it has not as many strides as dims")
    if 0 in tensor.shape:
        return in_memory(np.zeros(tensor.shape, np.float32))
    storage, (begin, there) = tensor.storage, places[tensor.storage.key]
    if not isinstance(storage.dtype, np.dtype):
        raise ValueError(f"its tensors are of {storage.dtype.what}, which is not read")
    last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
    size_bytes = storage.size * storage.dtype.itemsize
    if last >= storage.size or size_bytes > there or begin + size_bytes > path.stat().st_size:
        raise ValueError("it is truncated: values lie beyond its end")
    if math.prod(tensor.shape) > max(storage.size, _MOST_REPEATED):
        raise ValueError(f"a tensor in it has {math.prod(tensor.shape):,} values of a storage of {storage.size:,}")
    strides = tuple(step * storage.dtype.itemsize for step in tensor.strides)

    def read(index: Any) -> np.ndarray:
        values = mapped(path, storage.dtype, (storage.size,), begin)[tensor.offset :]
        return np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)[index]

    return StoredLeaf(shape=tensor.shape, dtype=storage.dtype, read=read)
