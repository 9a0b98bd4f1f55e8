"""Parameters of the family out of PyTorch's tensors and into them, every tensor accounted for.

What openpi's and LeRobot's folders have in common; each says in its own file what lies around the tensors. Read next:
`torch_names.py` (the table), `lerobot_policy.py` and `openpi_torch.py`.
"""

import logging
import re
from pathlib import Path

import jax
import numpy as np

from openpi_train.interop import safetensors_file
from openpi_train.interop.accounting import account
from openpi_train.interop.openpi import abstract_params
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Index, Leaves, StoredLeaf
from openpi_train.interop.torch_names import EMBEDDING, TIED_HEAD, UNUSED_HEAD, TensorLayout, layout_of, tensors_of
from openpi_train.models.base import ModelConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 4096
# LeRobot before 0.4 kept norm stats among the tensors.
_OLD_STATS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
_MIGRATE = (
    "norm stats lie among the tensors, as LeRobot before 0.4 kept them: bring the policy to its present form with "
    "`python -m lerobot.processor.migrate_policy_normalization`"
)


def read_params(place: Place, model: ModelConfig, prefix: str = "") -> Leaves:
    """The model's parameters by published name, from the tensors of a folder, whose names begin with `prefix`.

    Low-rank factors are none of PyTorch's: they are left out, for the caller to allow or refuse.
    Raises CheckpointError where a tensor is missing, unknown, or of another shape.
    """
    layouts = layouts_of(model)
    expected = {
        tensor: jax.ShapeDtypeStruct(one.tensor_shape, np.float32)
        for one in layouts.values()
        for tensor in one.tensors.values()
    }
    found = {name.removeprefix(prefix): leaf for name, leaf in safetensors_file.open_model(place).items()}
    settle_heads(place, found, speaks="logits" in model.provides)
    published = {tensor: name for name, one in layouts.items() for tensor in one.tensors.values()}

    def explain(*names: list[str]) -> list[str]:
        known = ([published.get(name) or _like_published(name) for name in kind] for kind in names)
        old = any(name.startswith(_OLD_STATS) for name in names[1])
        return [*([_MIGRATE] if old else []), *model.explain(*known)]

    account(found, expected, where=str(place), explain=explain)
    return {name: one.joined(found) for name, one in layouts.items()}


def write_params(folder: Path, params: Leaves, prefix: str = "") -> None:
    """Write `model.safetensors`, for strict loading by PyTorch's models. Raises UsageError where none has these."""
    if factors := [name for name in params if "lora" in name]:
        raise UsageError(
            f"PyTorch's models have no low-rank factors, here are {len(factors)}: fold them into the weights with "
            "--merge-lora"
        )
    try:
        for name, leaf in params.items():
            layout_of(name, leaf.shape)
    except KeyError as error:
        raise UsageError(f"this model cannot be written for PyTorch: {error.args[0]}") from error
    with tensors_of(params, folder) as tensors:
        if (expert := _expert_width(params)) is not None:
            vocabulary = tensors[TIED_HEAD].shape[0]
            tensors[UNUSED_HEAD] = _zeros((vocabulary, expert), tensors[TIED_HEAD].dtype)
        safetensors_file.write_file(
            folder / safetensors_file.FILE,
            {f"{prefix}{name}": tensor for name, tensor in tensors.items()},
            metadata={"format": "pt"},
        )


def layouts_of(model: ModelConfig) -> dict[str, TensorLayout]:
    """Where each of the model's parameters lies, by published name; its low-rank factors are left out.

    Raises CheckpointError where PyTorch's models have no such parameter.
    """
    shapes = {model.public_name(path): leaf.shape for path, leaf in abstract_params(model).items()}
    try:
        return {name: layout_of(name, shape) for name, shape in shapes.items() if "lora" not in name}
    except KeyError as error:
        raise CheckpointError(f"{type(model).__name__} has no form in PyTorch: {error.args[0]}") from error


def settle_heads(place: Place, found: dict[str, StoredLeaf], *, speaks: bool) -> None:
    """Leave one embedding, under the name that is expected, and no head that nothing uses."""
    if UNUSED_HEAD in found:
        del found[UNUSED_HEAD]
        logger.info("%s: %s is used by no model and left out", place, UNUSED_HEAD)
    if EMBEDDING not in found:
        return
    embedding, head = found.pop(EMBEDDING), found.get(TIED_HEAD)
    if speaks and head is not None and not _same(embedding, head):
        raise CheckpointError(
            f"{place}: {TIED_HEAD} and {EMBEDDING} differ. The model reads words and gives logits with one embedding; "
            "this one was trained with two and cannot be had here"
        )
    found[TIED_HEAD] = embedding


def _same(one: StoredLeaf, other: StoredLeaf) -> bool:
    rows = range(0, one.shape[0], _ROWS_AT_ONCE)
    parts = ((slice(row, row + _ROWS_AT_ONCE), slice(None)) for row in rows)
    return one.shape == other.shape and all(np.array_equal(one.read(part), other.read(part)) for part in parts)


def _like_published(tensor: str) -> str:
    return re.sub(r"\.(weight|bias)$", r"/\1", tensor)


def _expert_width(params: Leaves) -> int | None:
    output = params.get("PaliGemma/llm/layers/attn/attn_vec_einsum_1/w")
    return None if output is None else output.shape[-1]


def _zeros(shape: tuple[int, int], dtype: np.dtype) -> StoredLeaf:
    def read(index: Index) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)[index]

    return StoredLeaf(shape=shape, dtype=dtype, read=read)
