"""big_vision's `.npz` files, in which PaliGemma was published (`pt_224.npz`, `.f16`, `.bf16`), read and written.

Such a file is a ZIP of uncompressed arrays, so each can be memory-mapped. bfloat16, which numpy's format does not
support, is stored as two untyped bytes ("V2", or "u2"). Names are openpi's, below `params/`.
Read next: `paligemma_torch.py`, for the same model in Hugging Face's format.
"""

import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from openpi_train.data.core.files import replacing
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, StoredLeaf, Writer, at_hand, bytes_in_order, in_file
from openpi_train.interop.zip_entry import values_offset
from openpi_train.models.model_config import ModelConfig, as_policy
from openpi_train.models.paligemma.paligemma_torch import TABLE, backbone_of, without_filling
from openpi_train.runtime.exits import CheckpointError

# The file in a folder that was converted to this format.
FILE = "paligemma.npz"
_SUFFIX, _ROOT, _PUBLISHED = ".npz", "params/", "PaliGemma/"
# How numpy describes bfloat16 in a file: two untyped bytes.
_UNTYPED = "|V2"


def recognises(place: Place) -> bool:
    """Whether the place is an `.npz` file, or a folder with the one that `write` writes."""
    return _file(place) is not None


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open PaliGemma's parameters by published name; vocabulary rows beyond the model's are left out.

    Raises CheckpointError if the file is in a bucket, is damaged, or has another format.
    """
    file = (_file(place) or place).local
    if file is None:
        raise CheckpointError(f"{place}: .npz files are read from a disk; copy it to one that all hosts share first")
    leaves = open_npz(file)
    if others := [name for name in leaves if not name.startswith(_ROOT)]:
        raise CheckpointError(
            f"{place} is not in big_vision's format: names must begin with {_ROOT}, unlike {others[0]}"
        )
    params = {f"{_PUBLISHED}{name.removeprefix(_ROOT)}": leaf for name, leaf in leaves.items()}
    if model is not None and TABLE in params:
        params[TABLE] = without_filling(params[TABLE], as_policy(model).vocab_size, place)
    return Stored(where=str(place), format="big_vision", params=params)


def prepare(stored: Stored, model: ModelConfig | None = None) -> Writer:
    """The writer of `paligemma.npz` with the arrays that a published file has. In one process.

    Raises UsageError as `backbone_of`.
    """
    del model  # its names are the published ones
    params = backbone_of(stored.params)

    def write(directory: Path) -> None:
        with replacing(directory / FILE) as file, zipfile.ZipFile(file, "w") as archive:
            for name, leaf in params.items():
                entry = f"{_ROOT}{name.removeprefix(_PUBLISHED)}.npy"
                with archive.open(entry, "w", force_zip64=True) as member, at_hand(leaf, directory) as near:
                    _write_array(member, near)

    return write


def _write_array(file: Any, leaf: StoredLeaf) -> None:
    """Write the array as numpy does; bfloat16, which it has not, as plain bytes."""
    described = _UNTYPED if leaf.dtype == ml_dtypes.bfloat16 else np.lib.format.dtype_to_descr(leaf.dtype)
    header = {"descr": described, "fortran_order": False, "shape": leaf.shape}
    np.lib.format.write_array_header_1_0(file, header)
    for piece in bytes_in_order(leaf):
        file.write(piece)


def _file(place: Place) -> Place | None:
    if place.url.endswith(_SUFFIX) and (place.local is None or place.local.is_file()):
        return place
    return place / FILE if place.local is not None and place.has(FILE) else None


def open_npz(path: Path) -> Leaves:
    """The arrays of an `.npz` file by name. Raises CheckpointError if it is damaged or compressed."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return {entry.filename.removesuffix(".npy"): _leaf(path, file, entry) for entry in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, OSError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error


def _leaf(path: Path, file, entry: zipfile.ZipInfo) -> StoredLeaf:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{path}: {entry.filename} is compressed, so parts of it cannot be read; "
            "write the file again with numpy.savez"
        )
    file.seek(values_offset(file, entry))
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, stored = read_header(file)
    if entry.header_offset + entry.file_size > path.stat().st_size or stored.hasobject:
        raise ValueError(f"{entry.filename} does not fit in the file" if not stored.hasobject else "it holds objects")
    narrow = stored.itemsize == 2 and stored.kind in "Vu"
    dtype = np.dtype(ml_dtypes.bfloat16) if narrow else stored
    return in_file(path, dtype, shape, file.tell(), "F" if fortran_order else "C")
