"""What the folders of all LeRobot policies have in common: places, norm stats, and the steps around the model.

    config.json                            the policy's type and sizes
    model.safetensors                      its tensors, with the prefix "model."
    policy_{pre,post}processor.json        the steps before and after the model, and the files of norm stats

As `lerobot` 0.6.1 writes and reads them (`processor/pipeline.py`, `processor/normalize_processor.py`). Read next:
`lerobot_policy.py`.
"""

import logging
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.files import write_json
from openpi_train.data.robot.normalize import CONSTANT_RANGE
from openpi_train.interop import safetensors_file
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, StoredLeaf, in_memory
from openpi_train.json_object import JsonObject
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

PREFIX, ASSET_ID = "model.", "lerobot"
CONFIG, PREPROCESSOR, POSTPROCESSOR = "config.json", "policy_preprocessor.json", "policy_postprocessor.json"
# The folder of the policy in a checkpoint of LeRobot's training.
_PRETRAINED = "pretrained_model"
# Our forms of normalisation, and LeRobot's.
FORMS = {"z_score": "MEAN_STD", "quantile": "QUANTILES", "min_max": "MIN_MAX"}
FEATURES = {"state": "observation.state", "actions": "action"}
CAMERA = "observation.images."
_STATS = ("mean", "std", "q01", "q99", "min", "max")
# openpi's, with which models are trained here, not LeRobot's 1e-8: it is added to every divisor.
EPSILON = 1e-6

# Names of steps.
RENAME, BATCH, DEVICE = "rename_observations_processor", "to_batch_processor", "device_processor"
NORMALIZE, UNNORMALIZE = "normalizer_processor", "unnormalizer_processor"
TOKENIZE = "tokenizer_processor"
RELATIVE, ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"


def policy_folder(place: Place) -> Place:
    """The policy's own folder: the place, or the one in a checkpoint of LeRobot's training."""
    return place / _PRETRAINED if (place / _PRETRAINED).has(CONFIG) else place


def read_stats(folder: Place) -> Leaves:
    """The statistics of its normaliser, by names such as "action.mean"; empty if it has none."""
    if not folder.has(PREPROCESSOR):
        logger.warning("%s has no %s, so no norm stats", folder, PREPROCESSOR)
        return {}
    steps = folder.json(PREPROCESSOR).get("steps", [])
    files = [step["state_file"] for step in steps if step.get("registry_name") == NORMALIZE and "state_file" in step]
    if not files:
        return {}
    if not folder.has(files[0]):
        raise CheckpointError(f"{folder} is incomplete: {files[0]}, which {PREPROCESSOR} names, is missing; fetch it")
    return safetensors_file.open_file(folder, files[0])


def old_stats(found: Leaves, config: JsonObject) -> dict[str, StoredLeaf]:
    """The statistics by their present names, of policies that LeRobot saved before 0.4, which kept them as tensors.

    `found` are the tensors, without the prefix.
    """
    stats = {}
    for name in (*config["input_features"], *config["output_features"]):
        part = "unnormalize_outputs" if name in config["output_features"] else "normalize_inputs"
        for key in _STATS:
            leaf = found.get(f"{part}.buffer_{name.replace('.', '_')}.{key}")
            if leaf is not None and np.isfinite(leaf.whole()).all():  # infinite: never set
                stats[f"{name}.{key}"] = leaf
    return stats


def image_problems(model: Any, stats: Leaves) -> list[str]:
    """Why the images of a policy with these statistics are normalised in another way than the model's, and what to do.

    The model has `image_mean` and `image_std`.
    """
    ours = {"mean": model.image_mean, "std": model.image_std}
    found = {key: {} for key in ours}
    for name, leaf in stats.items():
        camera, _, key = name.rpartition(".")
        if camera.startswith("observation.image") and key in found:
            found[key][camera] = tuple(float(value) for value in leaf.whole().reshape(-1))
    problems = []
    for key, own in ours.items():
        if all(np.allclose(values, own, rtol=1e-4) for values in found[key].values()):
            continue
        if len(set(found[key].values())) == 1:
            values = next(iter(found[key].values()))
            problems.append(
                f"its images have the {key} {_spaced(values)}: give {flag_of(f'model.image_{key}', values)}"
            )
        else:
            problems.append(f"its cameras are normalised each in its own way ({found[key]}), here all in one")
    return problems


def image_stats(model: Any) -> dict[str, np.ndarray]:
    """The statistics with which LeRobot's normaliser treats images as the model does, which adds nothing to `std`."""
    found = {}
    for slot in model.cameras:
        found[f"{CAMERA}{slot}.mean"] = np.reshape(model.image_mean, (3, 1, 1)).astype(np.float32)
        found[f"{CAMERA}{slot}.std"] = (np.reshape(model.image_std, (3, 1, 1)) - EPSILON).astype(np.float32)
    return found


def norm_stats_of(stats: Leaves) -> dict[str, Any]:
    """The norm stats of states and actions, as in openpi's `norm_stats.json`, by asset id; empty if there are none."""
    found = {name: _entry(stats, feature) for name, feature in FEATURES.items() if f"{feature}.mean" in stats}
    return {ASSET_ID: {"norm_stats": found}} if found else {}


def _entry(stats: Leaves, feature: str) -> dict[str, list[float]]:
    return {key: stats[f"{feature}.{key}"].whole().tolist() for key in _STATS if f"{feature}.{key}" in stats}


def to_lerobot(norm_stats: Mapping[str, JsonObject]) -> dict[str, np.ndarray]:
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


def ranges_there(stats: Mapping[str, np.ndarray], form: str) -> dict[str, np.ndarray]:
    """The statistics under which LeRobot normalises dims that never move as it is done here: to 0."""
    changed = dict(stats)
    if form == "QUANTILES" and (
        missing := [name for name in FEATURES.values() if f"{name}.mean" in stats and f"{name}.q01" not in stats]
    ):
        raise UsageError(
            f"the norm stats of {', '.join(missing)} have no q01 and q99, by which LeRobot normalises: give such with "
            "--norm-stats and --asset-id"
        )
    for name in FEATURES.values() if form == "MIN_MAX" else ():
        if f"{name}.mean" not in stats:
            continue
        if f"{name}.min" not in stats:
            raise UsageError(
                f"the norm stats of {name} have no min and max, by which LeRobot normalises: give such with "
                "--norm-stats and --asset-id"
            )
        low, high = stats[f"{name}.min"], stats[f"{name}.max"]
        still = high - low < CONSTANT_RANGE
        changed |= {f"{name}.min": np.where(still, low - 1, low), f"{name}.max": np.where(still, low + 1, high)}
    return changed


def feature(kind: str, *shape: int) -> dict[str, Any]:
    """The entry of an input or output in `config.json`."""
    return {"type": kind, "shape": list(shape)}


def flag_of(field: str, value: object) -> str:
    """The flag that gives a field of an experiment (`model.unet.widths`) this value."""
    *parts, name = field.replace("_", "-").split(".")
    flag = "--" + ".".join([*parts, f"no-{name}" if value is False else name])
    return flag if isinstance(value, bool) else f"{flag} {_spaced(value)}"


def _spaced(value: object) -> str:
    """A value as in a command; numbers of a tuple with six digits."""
    return " ".join(f"{one:.6g}" for one in value) if isinstance(value, list | tuple) else str(value)


def differences(
    config: JsonObject, model: ModelConfig, fixed: Mapping[str, object], equal: Mapping[str, str], name: str
) -> list[str]:
    """What a folder's policy says otherwise than the model, and what to do about each.

    Args: `fixed` are values that policies of this `name` have here, by LeRobot's field; `equal` are the model's fields
    by LeRobot's, dotted if they lie in another. An absent field is as here.
    """
    problems = [
        f"{field} is {config[field]!r}: {name} here has {value!r}, choose another policy"
        for field, value in fixed.items()
        if config.get(field, value) != value
    ]
    for field, ours in equal.items():
        value, own = config.get(field), operator.attrgetter(ours)(model)
        value = tuple(value) if isinstance(value, list) else value
        if value is not None and value != own:
            problems.append(f"{field} is {value}: give {flag_of(f'model.{ours}', value)} (here {own})")
    return problems


def write_processors(
    directory: Path,
    config: JsonObject,
    steps: tuple[Sequence[str], Sequence[str]],
    settings: Mapping[str, JsonObject],
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
