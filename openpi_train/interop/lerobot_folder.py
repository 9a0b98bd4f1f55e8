"""What the folders of all LeRobot policies have in common: places, norm stats, and the steps around the model.

    config.json                            the policy's type and sizes
    model.safetensors                      its tensors, with the prefix "model."
    policy_{pre,post}processor.json        the steps before and after the model, and the files of norm stats

As `lerobot` 0.6.1 writes and reads them (`processor/pipeline.py`, `processor/normalize_processor.py`). Read next:
`lerobot_policy.py`.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.files import write_json
from openpi_train.interop import safetensors_file
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, in_memory
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

PREFIX, ASSET_ID = "model.", "lerobot"
CONFIG, _PREPROCESSOR = "config.json", "policy_preprocessor.json"
# The folder of the policy in a checkpoint of LeRobot's training.
_PRETRAINED = "pretrained_model"
FEATURES = {"state": "observation.state", "actions": "action"}
_STATS = ("mean", "std", "q01", "q99")
# openpi's, with which models are trained here, not LeRobot's 1e-8: it is added to every divisor.
EPSILON = 1e-6

# Names of steps.
RENAME, BATCH, DEVICE = "rename_observations_processor", "to_batch_processor", "device_processor"
NORMALIZE, UNNORMALIZE = "normalizer_processor", "unnormalizer_processor"
TOKENIZE = "tokenizer_processor"


def policy_folder(place: Place) -> Place:
    """The policy's own folder: the place, or the one in a checkpoint of LeRobot's training."""
    return place / _PRETRAINED if (place / _PRETRAINED).has(CONFIG) else place


def read_stats(folder: Place) -> Leaves:
    """The statistics of its normaliser, by names such as "action.mean"; empty if it has none."""
    if not folder.has(_PREPROCESSOR):
        logger.warning("%s has no %s, so no norm stats", folder, _PREPROCESSOR)
        return {}
    steps = folder.json(_PREPROCESSOR).get("steps", [])
    files = [step["state_file"] for step in steps if step.get("registry_name") == NORMALIZE and "state_file" in step]
    if not files:
        return {}
    if not folder.has(files[0]):
        raise CheckpointError(f"{folder} is incomplete: {files[0]}, which {_PREPROCESSOR} names, is missing; fetch it")
    return safetensors_file.open_file(folder, files[0])


def norm_stats_of(stats: Leaves) -> dict[str, Any]:
    """The norm stats of states and actions, as in openpi's `norm_stats.json`, by asset id; empty if there are none."""
    found = {name: _entry(stats, feature) for name, feature in FEATURES.items() if f"{feature}.mean" in stats}
    return {ASSET_ID: {"norm_stats": found}} if found else {}


def _entry(stats: Leaves, feature: str) -> dict[str, list[float]]:
    return {key: stats[f"{feature}.{key}"].whole().tolist() for key in _STATS if f"{feature}.{key}" in stats}


def to_lerobot(norm_stats: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The norm stats by LeRobot's names, in float64; unknown quantiles are left out."""
    found = {}
    for name, entry in norm_stats.items():
        if name not in FEATURES:
            raise UsageError(f"LeRobot's policies have no norm stats of {name!r}, only of {list(FEATURES)}")
        for key in _STATS:
            values = np.asarray(entry[key] if entry.get(key) is not None else [np.nan], np.float64)
            if np.isfinite(values).all():
                found[f"{FEATURES[name]}.{key}"] = values
    return found


def feature(kind: str, *shape: int) -> dict[str, Any]:
    """The entry of an input or output in `config.json`."""
    return {"type": kind, "shape": list(shape)}


def flag_of(field: str, value: Any) -> str:
    """The flag that gives a field of the model this value."""
    name = field.replace("_", "-")
    return f"--model.{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--model.{name} {value}"


def differences(
    config: Mapping[str, Any], model: Any, fixed: Mapping[str, Any], equal: Mapping[str, str], name: str
) -> list[str]:
    """What a folder's policy says otherwise than the model, and what to do about each.

    Args: `fixed` are values that policies of this `name` have here, by LeRobot's field; `equal` are the model's fields
    by LeRobot's. An absent field is as here.
    """
    problems = [
        f"{field} is {config[field]!r}: {name} here has {value!r}, choose another policy"
        for field, value in fixed.items()
        if config.get(field, value) != value
    ]
    for field, ours in equal.items():
        value, own = config.get(field), getattr(model, ours)
        if value is not None and value != own:
            problems.append(f"{field} is {value}: give {flag_of(ours, value)} (here {own})")
    return problems


def write_processors(
    directory: Path,
    config: Mapping[str, Any],
    steps: tuple[Sequence[str], Sequence[str]],
    settings: Mapping[str, Mapping[str, Any]],
    stats: Mapping[str, np.ndarray],
) -> None:
    """Write the pipelines before and after the model, whose `steps` are given by name, and their norm stats.

    `settings` are those of steps that are not the same for all policies.
    """
    # The norms of LeRobot's `config.json`, which its own processors copy.
    norm = {"eps": EPSILON, "norm_map": config["normalization_mapping"]}
    known: dict[str, Mapping[str, Any]] = {
        RENAME: {"rename_map": {}},
        DEVICE: {"device": "cpu", "float_dtype": None},
        NORMALIZE: {**norm, "features": {**config["input_features"], **config["output_features"]}},
        UNNORMALIZE: {**norm, "features": config["output_features"]},
        **settings,
    }
    tensors = {key: in_memory(value) for key, value in stats.items()}
    for name, these in zip(("policy_preprocessor", "policy_postprocessor"), steps, strict=True):
        made: list[dict[str, Any]] = [{"registry_name": step, "config": dict(known.get(step, {}))} for step in these]
        for place, step in enumerate(made):
            if step["registry_name"] in (NORMALIZE, UNNORMALIZE) and tensors:
                step["state_file"] = f"{name}_step_{place}_{step['registry_name']}.safetensors"
                safetensors_file.write_file(directory / step["state_file"], tensors)
        write_json(directory / f"{name}.json", {"name": name, "steps": made})
