"""Folders of openpi's PyTorch models, both ways: what its converter and PyTorch trainer write, and its server reads.

    model.safetensors                    the tensors (`torch_names.py`)
    config.json                          sizes, for reference: openpi reads none of it
    assets/<asset_id>/norm_stats.json    as beside its JAX checkpoints

Read next: `torch_policy.py` (the tensors), `openpi.py` (the JAX checkpoints).
"""

from pathlib import Path
from typing import Any

from openpi_train.data.files import write_json
from openpi_train.interop import openpi, safetensors_file
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored
from openpi_train.interop.torch_policy import read_params, write_params
from openpi_train.models.base import ModelConfig
from openpi_train.runtime.exits import UsageError

_ROOT = "paligemma_with_expert."
_FIELDS = ("action_dim", "action_horizon", "paligemma_variant", "action_expert_variant")


def recognises(place: Place) -> bool:
    """Whether the folder holds tensors of openpi's names."""
    return safetensors_file.has_model(place) and any(
        name.startswith(_ROOT) for name in safetensors_file.open_model(place)
    )


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """The model's parameters by published name. Raises CheckpointError where they are not the model's."""
    if model is None:
        raise UsageError(
            f"{place} does not say the sizes of its layers: name the experiment whose model it is "
            "(convert: --experiment NAME)"
        )
    return Stored(
        where=str(place),
        format="openpi_torch",
        params=read_params(place, model),
        norm_stats=openpi.read_norm_stats(place),
    )


def write(directory: Path, stored: Stored, model: ModelConfig | None = None) -> None:
    """Write what `examples/convert_jax_model_to_pytorch.py` writes, for openpi's `load_pytorch`. In one process."""
    directory.mkdir(parents=True)
    write_params(directory, stored.params)
    precision = {str(leaf.dtype) for leaf in stored.params.values()}
    sizes: dict[str, Any] = {field: getattr(model, field) for field in _FIELDS if hasattr(model, field)}
    write_json(directory / "config.json", {**sizes, "precision": "/".join(sorted(precision))})
    openpi.write_norm_stats(directory, stored.norm_stats)
