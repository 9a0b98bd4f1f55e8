"""Reader and writer of openpi's PyTorch models, as written by its converter and PyTorch trainer and read by its server.

    model.safetensors                    the tensors (`torch_names.py`)
    config.json                          sizes, for reference: openpi does not read it
    assets/<asset_id>/norm_stats.json    as beside its JAX checkpoints
    optimizer.pt, metadata.pt            in a step of its trainer: pickles, which are not read

LeRobot's folders hold the same tensors with a prefix, PaliGemma's some of them. Read next: `torch_names.py` (the
table), `lerobot_policy.py`, `paligemma_torch.py`, and `openpi.py` (the JAX checkpoints).
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from openpi_train.data.core.files import write_json
from openpi_train.fields import as_json
from openpi_train.interop import openpi, safetensors_file
from openpi_train.interop.parameter_matching import account
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, StoredLeaf, Writer, in_memory, same_values
from openpi_train.interop.torch_names import (
    EMBEDDING,
    TIED_HEAD,
    UNUSED_HEAD,
    Layout,
    TensorLayout,
    layout_of,
    tensors_of,
)
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

LORA = ".*lora.*"
_TORCH_END = re.compile(r"\.(weight|bias)$")
_ROOT = "paligemma_with_expert."
# The training state of openpi's PyTorch trainer (`scripts/train_pytorch.py`).
_PICKLES = ("optimizer.pt", "metadata.pt")
_FIELDS = ("action_dim", "action_horizon", "paligemma_variant", "action_expert_variant")
# LeRobot before 0.4 kept norm stats among the tensors.
OLD_STATS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
_MIGRATE = (
    "norm stats are among the tensors, as in LeRobot before 0.4: convert the policy to the present format with "
    "`python -m lerobot.processor.migrate_policy_normalization`"
)


def recognises(place: Place) -> bool:
    """Whether the folder holds tensors with openpi's names."""
    return any(name.startswith(_ROOT) for name in safetensors_file.tensor_names(place))


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open the model's parameters by published name. Raises CheckpointError if they do not fit the model."""
    if left := [name for name in _PICKLES if place.has(name)]:
        logger.info("%s: not read, since they are pickles: %s. The optimizer begins anew", place, ", ".join(left))
    params, norm_stats = read_params(place, needed(model, place)), openpi.read_norm_stats(place)
    return Stored(where=str(place), format="openpi_torch", params=params, norm_stats=norm_stats)


def prepare(stored: Stored, model: ModelConfig | None = None) -> Writer:
    """The writer of what `examples/convert_jax_model_to_pytorch.py` writes, for `load_pytorch`. In one process.

    Raises UsageError as `check_params`.
    """
    check_params(stored.params)
    precision = {str(leaf.dtype) for leaf in stored.params.values()}
    said = as_json(model)
    sizes = {field: said[field] for field in _FIELDS if said and field in said}

    def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        write_params(directory, stored.params)
        write_json(directory / "config.json", {**sizes, "precision": "/".join(sorted(precision))})
        openpi.write_norm_stats(directory, stored.norm_stats)

    return write


class ModelNeeded(UsageError):
    """A checkpoint does not say the sizes of its layers, and no model is given that does."""


def needed(model: ModelConfig | None, place: Place) -> ModelConfig:
    """The model. Raises ModelNeeded if none is given, because the sizes of layers are then unknown."""
    if model is None:
        raise ModelNeeded(
            f"{place} does not hold the sizes of its layers: give the experiment of its model, --experiment NAME"
        )
    return model


def read_params(place: Place, model: ModelConfig, prefix: str = "") -> Leaves:
    """The model's parameters by published name, from the tensors of a folder, whose names begin with `prefix`.

    PyTorch's models have no low-rank factors: these are left out, for the caller to allow or refuse.
    Raises CheckpointError if a tensor is missing, unknown, or of another shape.
    """
    found = {name.removeprefix(prefix): leaf for name, leaf in safetensors_file.open_model(place).items()}
    settle_heads(place, found, speaks="logits" in model.provides)
    return joined_params(place, found, layouts_of(model), model)


def joined_params(place: Place, found: Leaves, layouts: Mapping[str, TensorLayout], model: ModelConfig) -> Leaves:
    """The parameters from the tensors `found` in these `layouts`. Raises CheckpointError as `read_params`."""
    published = {tensor: name for name, one in layouts.items() for tensor in one.tensors.values()}
    expected = {
        tensor: jax.ShapeDtypeStruct(layouts[name].tensor_shape, np.float32) for tensor, name in published.items()
    }

    def explain(*names: list[str]) -> list[str]:
        known = ([published.get(name) or _TORCH_END.sub(r"/\1", name) for name in kind] for kind in names)
        old = any(name.startswith(OLD_STATS) for name in names[1])
        return [*([_MIGRATE] if old else []), *model.param_rules.explain(*known)]

    account(found, expected, where=str(place), explain=explain)
    return {name: one.joined(found) for name, one in layouts.items()}


def check_params(params: Leaves) -> None:
    """Raise UsageError if PyTorch's models lack one of these parameters, or they are low-rank factors."""
    refuse_factors(params)
    try:
        for name, leaf in params.items():
            layout_of(name, leaf.shape)
    except KeyError as error:
        raise UsageError(f"this model cannot be written for PyTorch: {error.args[0]}") from error


def write_params(folder: Path, params: Leaves, prefix: str = "") -> None:
    """Write `model.safetensors`, for strict loading by PyTorch's models. Raises UsageError as `check_params`."""
    check_params(params)
    with tensors_of(params, folder) as tensors:
        if (output := params.get("PaliGemma/llm/layers/attn/attn_vec_einsum_1/w")) is not None:
            head = tensors[TIED_HEAD]
            shape = (head.shape[0], output.shape[-1])
            tensors[UNUSED_HEAD] = in_memory(np.broadcast_to(np.zeros((), head.dtype), shape))
        safetensors_file.write_file(
            folder / safetensors_file.FILE,
            {f"{prefix}{name}": tensor for name, tensor in tensors.items()},
            metadata={"format": "pt"},
        )


def refuse_factors(params: Leaves) -> None:
    """Raise UsageError if low-rank factors are among the parameters: formats of plain weights have none."""
    if factors := [name for name in params if "lora" in name]:
        raise UsageError(
            f"the weights have {len(factors)} low-rank factors beside them: fold them in with --merge-lora, since "
            "this format has none"
        )


def layouts_of(model: ModelConfig, layout: Layout = layout_of, without: str = LORA) -> dict[str, TensorLayout]:
    """The layout of each of the model's parameters, by published name, without those that fully match `without`.

    Raises CheckpointError if there is no such parameter in PyTorch.
    """
    shapes = {name: leaf.shape for name, leaf in openpi.published_params(model).items()}
    try:
        return {name: layout(name, shape) for name, shape in shapes.items() if not re.fullmatch(without, name)}
    except KeyError as error:
        raise CheckpointError(f"{type(model).__name__} has no PyTorch equivalent: {error.args[0]}") from error


def settle_heads(place: Place, found: dict[str, StoredLeaf], *, speaks: bool) -> None:
    """Keep one embedding, under the expected name, and remove the unused head."""
    if UNUSED_HEAD in found:
        del found[UNUSED_HEAD]
        logger.info("%s: %s is used by no model and left out", place, UNUSED_HEAD)
    if EMBEDDING not in found:
        return
    embedding, head = found.pop(EMBEDDING), found.get(TIED_HEAD)
    if speaks and head is not None and not same_values(embedding, head):
        raise CheckpointError(
            f"{place}: {TIED_HEAD} and {EMBEDDING} differ. The model has tied embeddings; this checkpoint was trained "
            "with two separate ones, which is not supported"
        )
    found[TIED_HEAD] = embedding
