"""Reader of the files that `torch.save` writes (.pth, .pt), without torch, and without running what is pickled in them.

Such a file is a pickle that names tensors, and their values: a zip file with one entry per storage, or (before torch
1.6, and torchvision's older weights) the values behind the pickle. Only the names of tensors and what torch itself
needs to rebuild them are read; any other object, such as a trainer's config beside the tensors, is a blank in its
place. Read next: `torchvision_resnet.py`, `diffusion_policy_checkpoint.py`, `torch_save.py` (the writer).
"""

import collections
import contextlib
import dataclasses
import io
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import ml_dtypes
import numpy as np

from openpi_train.interop.big_vision import values_offset
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, StoredLeaf, in_memory, mapped
from openpi_train.runtime.exits import CheckpointError

_DTYPES: Mapping[str, np.dtype] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
# The first pickle of a file without zip (`torch/serialization.py: MAGIC_NUMBER`), and how many precede the tensors'.
_MAGIC, _BEFORE = 0x1950A86A20F9469CFC6C, 3
_COUNT_BYTES = 8
_SUFFIXES = (".pth", ".pt", ".pth.tar")


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    dtype: Any  # a np.dtype; of a type that is not read, its blank
    size: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Blank:
    """Stands for an object that is none of the tensors. It takes what a pickle gives it, and keeps its state.

    What is called with one argument, as `OmegaConf.create` with a dict, keeps that.
    """

    what: ClassVar[str] = "an object"
    held: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        del args, kwargs

    def __call__(self, *args: Any) -> "_Blank":
        self.held = {"_content": args[0]} if len(args) == 1 else None
        return self

    def __setstate__(self, state: Any) -> None:
        self.held = state

    def __setitem__(self, key: Any, value: Any) -> None:
        del key, value

    def append(self, value: Any) -> None:
        del value

    def extend(self, values: Any) -> None:
        del values


class _Names(pickle.Unpickler):
    """Reads the names of tensors, with blanks for all other objects: none of their code is imported.

    `storages` are those that it met, `others` the names of the other classes and functions.
    """

    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self.storages: dict[str, _Storage] = {}
        self.others: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, strides, *_: _Tensor(
                storage, offset, tuple(shape), tuple(strides)
            ),
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
            ("torch", "Size"): tuple,
        }
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in known:
            self.others.append(f"{module}.{name}")
            # A class of its own, since a pickle may set attributes of what it is given.
            return type("Blank", (_Blank,), {"what": self.others[-1]})
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, size, *_ = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"it refers to a {kind}, not to a storage")
        return self.storages.setdefault(str(key), _Storage(str(key), dtype, int(size)))


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
            if isinstance(one, dict) and any(isinstance(value, _Tensor) for value in one.values())
        }
        return models, _plain(found.get("cfg"))


def _plain(value: Any) -> Any:
    """The numbers, words, lists and dicts that a pickled OmegaConf holds; None in place of anything else."""
    if isinstance(value, _Blank):
        held = value.held if isinstance(value.held, dict) else {}
        return _plain(held.get("_content", held.get("_val")))
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float) else None


def _tensors(path: Path, found: Any, places: Mapping[str, int]) -> Leaves:
    if not isinstance(found, dict):
        raise _no_tensor(found)
    for one in found.values():
        if not isinstance(one, _Tensor):
            raise _no_tensor(one)
    return {str(name): _leaf(path, tensor, places) for name, tensor in found.items()}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[Any, Mapping[str, int]]]:
    """What is pickled in the file, and where its values begin; errors of reading as CheckpointErrors."""
    try:
        with path.open("rb") as file:
            found, places = _of_zip(path, file) if zipfile.is_zipfile(path) else _of_pickles(file)
        yield found, places
    except (pickle.UnpicklingError, ValueError, KeyError, TypeError, EOFError, OSError, struct.error) as error:
        raise CheckpointError(f"{path} is no file of tensors that torch.save wrote, or damaged: {error}") from error
    except (AttributeError, IndexError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error


def _no_tensor(found: Any) -> ValueError:
    if isinstance(found, _Blank):
        return ValueError(f"it holds {found.what}, which is not needed for tensors: it is not read")
    return ValueError("it is no dictionary of tensors by name")


def _of_zip(path: Path, file: BinaryIO) -> tuple[Any, Mapping[str, int]]:
    """What is pickled in a zip file, and where the values of each storage begin."""
    with zipfile.ZipFile(path) as archive:
        root = next(name for name in archive.namelist() if name.endswith("data.pkl")).removesuffix("data.pkl")
        places = {}
        for entry in archive.infolist():
            if entry.filename.startswith(f"{root}data/"):
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{entry.filename} is compressed")
                places[entry.filename.removeprefix(f"{root}data/")] = values_offset(file, entry)
        return _Names(io.BytesIO(archive.read(f"{root}data.pkl"))).load(), places


def _of_pickles(file: BinaryIO) -> tuple[Any, Mapping[str, int]]:
    """The same of a file without zip: pickles, and behind them for each storage its length and its values."""
    first = _Names(file)
    if first.load() != _MAGIC:
        if first.others:
            raise ValueError(f"it holds {first.others[0]}, which is not needed for tensors: it is not read")
        raise ValueError("its first bytes are not those of such a file")
    for _ in range(_BEFORE - 1):
        _Names(file).load()
    names = _Names(file)
    found, order = names.load(), _Names(file).load()
    places, at = {}, file.tell()
    for key in order:
        storage = names.storages[str(key)]
        places[storage.key] = at + _COUNT_BYTES
        at += _COUNT_BYTES + storage.size * storage.dtype.itemsize
    return found, places


def _leaf(path: Path, tensor: _Tensor, places: Mapping[str, int]) -> StoredLeaf:
    if 0 in tensor.shape:
        return in_memory(np.zeros(tensor.shape, np.float32))
    storage, begin = tensor.storage, places[tensor.storage.key]
    if not isinstance(storage.dtype, np.dtype):
        raise ValueError(f"its tensors are of {storage.dtype.what}, which is not read")
    last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
    if min(tensor.offset, *tensor.shape, *tensor.strides, 0) < 0:
        raise ValueError("values of a tensor lie before its beginning")
    if last >= storage.size or begin + storage.size * storage.dtype.itemsize > path.stat().st_size:
        raise ValueError("it is truncated: values lie beyond its end")
    strides = tuple(step * storage.dtype.itemsize for step in tensor.strides)

    def read(index: Any) -> np.ndarray:
        values = mapped(path, storage.dtype, (storage.size,), begin)[tensor.offset :]
        return np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)[index]

    return StoredLeaf(shape=tensor.shape, dtype=storage.dtype, read=read)
