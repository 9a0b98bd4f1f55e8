"""Reader and writer of LeRobot's policy folders for pi0, pi0.5 and pi0-FAST.

    config.json                            the policy's type and sizes
    model.safetensors                      its tensors, with the prefix "model."
    policy_{pre,post}processor.json        the steps before and after the model, and the files of norm stats

As `lerobot` 0.6.1 writes and reads them (`policies/`, `processor/pipeline.py`). Read next: `lerobot_config.py` (the two
kinds of JSON), `openpi_torch.py` (the tensors).
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.files import write_json
from openpi_train.interop import lerobot_config, safetensors_file
from openpi_train.interop.openpi_torch import needed, read_params, write_params
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, in_memory
from openpi_train.models.model_config import ModelConfig, as_policy
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

PREFIX, ASSET_ID = "model.", "lerobot"
_CONFIG, _PREPROCESSOR = "config.json", "policy_preprocessor.json"
# The folder of the policy in a checkpoint of LeRobot's training.
_PRETRAINED = "pretrained_model"
_FEATURES = {"state": "observation.state", "actions": "action"}
_STATS = ("mean", "std", "q01", "q99")


def recognises(place: Place) -> bool:
    """Whether it is a policy's folder, of any type, or a checkpoint of LeRobot's training that contains one."""
    folder = _folder(place)
    if not folder.has(_CONFIG):
        return False
    config = folder.json(_CONFIG)
    return "type" in config and "input_features" in config


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open the policy's parameters by published name, and its norm stats. Raises CheckpointError if they do not fit."""
    folder = _folder(place)
    config = folder.json(_CONFIG)
    model = needed(model, folder)
    lerobot_config.check(config, as_policy(model), str(folder))
    return Stored(
        where=str(folder),
        format="lerobot",
        params=read_params(folder, model, PREFIX),
        norm_stats=_read_norm_stats(folder),
    )


def write(directory: Path, stored: Stored, model: ModelConfig | None = None) -> None:
    """Write a policy's folder, for `PI0Policy.from_pretrained` and similar. Call it in one process."""
    if model is None:
        raise UsageError("a policy's folder includes the model's sizes: give the experiment")
    if len(stored.norm_stats) > 1:
        raise UsageError(
            f"LeRobot's policies have one set of norm stats, {stored.where} has {', '.join(stored.norm_stats)}: "
            "convert a copy of it with one of these folders in assets/"
        )
    content = next(iter(stored.norm_stats.values()), None)
    stats = _to_lerobot(content["norm_stats"]) if content else {}
    if not stats:
        logger.warning("%s has no norm stats: the policy's processors will not normalise values", stored.where)
    dims = {name: len(stats[f"{feature}.mean"]) for name, feature in _FEATURES.items() if f"{feature}.mean" in stats}
    dtypes = {str(leaf.dtype) for leaf in stored.params.values()}
    policy = lerobot_config.policy_of(as_policy(model))
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    config = lerobot_config.policy_config(policy, as_policy(model), dims, dtype)
    directory.mkdir(parents=True)
    write_params(directory, stored.params, PREFIX)
    for name, pipeline in lerobot_config.processors(policy, config).items():
        for step in pipeline["steps"]:
            if not stats:
                step.pop("state_file", None)
            elif "state_file" in step:
                tensors = {key: in_memory(value) for key, value in stats.items()}
                safetensors_file.write_file(directory / step["state_file"], tensors)
        write_json(directory / f"{name}.json", pipeline)
    write_json(directory / _CONFIG, config)


def _folder(place: Place) -> Place:
    return place / _PRETRAINED if (place / _PRETRAINED).has(_CONFIG) else place


def _read_norm_stats(folder: Place) -> dict[str, Any]:
    """The norm stats of its normaliser, as in openpi's `norm_stats.json`; empty if it has none."""
    if not folder.has(_PREPROCESSOR):
        logger.warning("%s has no %s, so no norm stats", folder, _PREPROCESSOR)
        return {}
    steps = folder.json(_PREPROCESSOR).get("steps", [])
    files = [
        step["state_file"]
        for step in steps
        if step.get("registry_name") == "normalizer_processor" and "state_file" in step
    ]
    if not files:
        return {}
    if not folder.has(files[0]):
        raise CheckpointError(f"{folder} is incomplete: {files[0]}, which {_PREPROCESSOR} names, is missing; fetch it")
    stats = safetensors_file.open_file(folder, files[0])
    found = {name: _entry(stats, feature) for name, feature in _FEATURES.items() if f"{feature}.mean" in stats}
    return {ASSET_ID: {"norm_stats": found}} if found else {}


def _entry(stats: Leaves, feature: str) -> dict[str, list[float]]:
    return {key: stats[f"{feature}.{key}"].whole().tolist() for key in _STATS if f"{feature}.{key}" in stats}


def _to_lerobot(norm_stats: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The norm stats by LeRobot's names, in float64; unknown quantiles are left out."""
    found = {}
    for name, entry in norm_stats.items():
        if name not in _FEATURES:
            raise UsageError(f"LeRobot's policies have no norm stats of {name!r}, only of {list(_FEATURES)}")
        for key in _STATS:
            values = np.asarray(entry[key] if entry.get(key) is not None else [np.nan], np.float64)
            if np.isfinite(values).all():
                found[f"{_FEATURES[name]}.{key}"] = values
    return found
