"""Metadata of an RLDS dataset directory: its location, its shards, and the features of its steps.

Read next: `rlds_index.py` (builds the index from it).

tensorflow-datasets reads its own metadata here, without TensorFlow. It is imported inside the functions, since opening
a dataset whose index exists needs none of this.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import cache_folders, files
from openpi_train.data.core.source import WIDEST_COLUMN, About

logger = logging.getLogger(__name__)

INFO_FILE = "dataset_info.json"
FEATURES_FILE = "features.json"
# File that `data convert` adds, with `About.as_json`, for which the other files have no place.
ABOUT_FILE = "openpi_train.json"
# What the keys of features that are given once for an episode begin with, and those of them that become columns.
OF_EPISODE = "episode_metadata/"
_SUCCESS = ("success", "is_success")
# Relabelling changes these but not observations and actions, so they are not part of an episode's identity.
_RELABELLED = ("reward", "discount")


@dataclasses.dataclass(frozen=True)
class Schema:
    """The features of a dataset's steps that an index holds.

    Attributes:
        columns: dtype name and shape per step of each numeric feature, by name (`observation/state`), and of flags that
            are given once for an episode, by their key (`episode_metadata/success`).
        cameras: Height and width of each image feature; 0 if the dataset does not specify them.
        prompt: The key of the instruction text in a record (`steps/language_instruction`); empty if there is none.
        alternatives: Keys of the texts that stand in where it is blank, in order (`steps/language_instruction_2`, ...).
        identity: The columns that are hashed into an episode's digest, with the images.
        skipped: Features left out, each with the reason.
    """

    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    cameras: Mapping[str, tuple[int, int]]
    prompt: str
    alternatives: tuple[str, ...]
    identity: tuple[str, ...]
    skipped: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """One TFRecord file of a split, and its number of episodes according to dataset_info.json."""

    name: str
    num_episodes: int


def find_version(path: str) -> Path:
    """The directory with `dataset_info.json` at or below `path`: itself, or its newest version.

    Raises FileNotFoundError if there is none.
    """
    directory = Path(path).expanduser()
    if (directory / INFO_FILE).is_file():
        return directory
    folders = [info.parent for info in directory.glob(f"*/{INFO_FILE}")]
    versions = {tuple(map(int, f.name.split("."))): f for f in folders if re.fullmatch(r"\d+\.\d+\.\d+", f.name)}
    if not versions:
        raise FileNotFoundError(
            f"{directory} holds no RLDS dataset: neither {INFO_FILE} nor a version folder such as 1.0.0 with one. "
            "Give <data_dir>/<name>/<version> of a dataset that tensorflow-datasets wrote (local or mounted); "
            f"a dataset of another format with --dataset PATH.{cache_folders.how_to_write(directory)}"
        )
    newest = versions[max(versions)]
    if len(versions) > 1:
        others = ", ".join(sorted(folder.name for folder in versions.values() if folder != newest))
        logger.info("%s has several versions: reading %s (also there: %s)", directory, newest.name, others)
    return newest


def load_builder(directory: Path) -> Any:
    """The tensorflow-datasets builder of a dataset directory. Raises ValueError if its metadata cannot be parsed."""
    import tensorflow_datasets as tfds

    if not (directory / FEATURES_FILE).is_file():
        raise FileNotFoundError(
            f"{directory} has {INFO_FILE} but no {FEATURES_FILE}; copy it from the original dataset"
        )
    try:
        return tfds.builder_from_directory(directory)
    except Exception as error:
        raise ValueError(
            f"tensorflow-datasets cannot read the metadata of {directory}: {type(error).__name__}: {error}. "
            f"Compare {INFO_FILE} and {FEATURES_FILE} with the original dataset's."
        ) from error


def list_shards(builder: Any, split: str) -> list[ShardFile]:
    """The shards of a split ("train", or joined: "train+val") in order. Raises ValueError for an unknown one."""
    if builder.info.as_proto.file_format not in ("", "tfrecord"):
        raise ValueError(
            f"{builder.data_dir} has fileFormat {builder.info.as_proto.file_format!r}; only tfrecord is read"
        )
    splits = builder.info.splits
    shards = []
    for name in (part.strip() for part in split.split("+")):
        if name not in set(splits.keys()):
            allowed = ", ".join(f"{key} ({info.num_examples} episodes)" for key, info in splits.items())
            raise ValueError(f"split {name!r} is not in {builder.data_dir}; it has {allowed}. Join splits as 'a+b'.")
        info = splits[name]
        shards += [ShardFile(file, count) for file, count in zip(info.filenames, info.shard_lengths, strict=True)]
    return shards


def read_schema(builder: Any, prompt_feature: str, wide_columns: tuple[str, ...]) -> Schema:
    """Sort the features of a dataset's steps into columns, cameras and the instruction.

    Args:
        builder: From `load_builder`.
        prompt_feature: A text feature's name, "auto" (the one `*instruction*`) or "none".
        wide_columns: Columns to keep although they are wider than `WIDEST_COLUMN`.

    Raises ValueError for a dataset without steps, or if a named feature does not exist.
    """
    import tensorflow_datasets as tfds

    features = builder.info.features
    if "steps" not in features or not hasattr(features["steps"], "feature"):
        raise ValueError(f"{builder.data_dir} is not an RLDS dataset: {FEATURES_FILE} has no `steps` dataset feature")
    columns, cameras, texts, skipped, wide = {}, {}, [], {}, []
    for name, leaf in _leaves(features["steps"].feature, tfds.features.FeaturesDict):
        kind, detail = _classify(leaf, tfds.features)
        if kind == "camera":
            cameras[name] = detail
        elif kind == "text":
            texts.append(name)
        elif kind == "skipped":
            skipped[name] = detail
        elif math.prod(detail[1]) > WIDEST_COLUMN and name not in wide_columns:
            wide.append(name)
            skipped[name] = f"{math.prod(detail[1])} numbers wide; name it in wide_columns to keep it"
        else:
            columns[name] = detail
    unknown = sorted(set(wide_columns) - set(columns))
    if unknown:
        raise ValueError(
            f"wide_columns {unknown} are not numeric features of {builder.data_dir}; it has {sorted(columns)}"
        )
    prompt = _choose_prompt(prompt_feature, texts, _metadata_texts(features, tfds.features), builder.data_dir)
    alternatives = _alternatives(prompt, [f"steps/{name}" for name in texts])
    identity = tuple(name for name, detail in sorted(columns.items()) if _is_identity(name, *detail))
    columns |= _flags_of_episode(features, tfds.features)
    return Schema(dict(sorted(columns.items())), dict(sorted(cameras.items())), prompt, alternatives, identity, skipped)


def read_about(directory: Path, prompt: str, skipped: Mapping[str, str]) -> About:
    """The description of a dataset directory; `prompt` is the key of the instruction in a record."""
    import tensorflow_datasets as tfds

    features = load_builder(directory).info.features
    left_out = dict(skipped)
    for name, leaf in _leaves(features["steps"].feature, tfds.features.FeaturesDict):
        if _classify(leaf, tfds.features)[0] == "text" and f"steps/{name}" != prompt:
            other = bool(_alternatives(prompt, [f"steps/{name}"]))
            left_out[name] = "used where the instruction is blank" if other else "a text that is not the instruction"
    if "episode_metadata" in features:
        names = (
            f"episode_metadata/{name}" for name, _ in _leaves(features["episode_metadata"], tfds.features.FeaturesDict)
        )
        kept = _flags_of_episode(features, tfds.features)
        left_out |= {
            name: "given once per episode, not per step" for name in names if name != prompt and name not in kept
        }
    kept = directory / ABOUT_FILE
    return About.from_json(files.read_json(kept) if kept.is_file() else {}, left_out)


def _is_identity(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    return dtype != "bool" and math.prod(shape) <= WIDEST_COLUMN and name not in _RELABELLED


def _leaves(feature: Any, branch: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    # Sorted: tfds returns features in the order of a protobuf map, which differs between processes.
    for name, child in sorted(feature.items()):
        if isinstance(child, branch):
            yield from _leaves(child, branch, f"{prefix}{name}/")
        else:
            yield prefix + name, child


def _classify(leaf: Any, kinds: Any) -> tuple[str, Any]:
    """("camera", size), ("column", (dtype, shape)), ("text", None) or ("skipped", why)."""
    if isinstance(leaf, kinds.Image):
        if leaf.shape[-1] == 3 and np.dtype(leaf.np_dtype) == np.uint8:
            return "camera", (leaf.shape[0] or 0, leaf.shape[1] or 0)
        return "skipped", f"an image of {leaf.shape[-1]} channels, {np.dtype(leaf.np_dtype)}; cameras are RGB uint8"
    info = leaf.get_serialized_info()
    if not hasattr(info, "np_dtype") or None in info.shape:
        return "skipped", f"a {type(leaf).__name__} of variable or nested shape"
    dtype = np.dtype(info.np_dtype)
    if dtype.kind in "OSU":
        return ("text", None) if _is_text(leaf) else ("skipped", "bytes, neither a text nor an image")
    return "column", ("float32" if dtype.kind not in "biu" else dtype.name, tuple(info.shape))


def _is_text(leaf: Any) -> bool:
    """Whether a feature is a string; compressed numbers, which are stored as a string, do not count."""
    return leaf.shape == () and np.dtype(leaf.np_dtype).kind in "OSU"


def _metadata_texts(features: Any, kinds: Any) -> list[str]:
    if "episode_metadata" not in features:
        return []
    return [
        f"episode_metadata/{name}"
        for name, leaf in _leaves(features["episode_metadata"], kinds.FeaturesDict)
        if _is_text(leaf)
    ]


def _flags_of_episode(features: Any, kinds: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The numbers that say once for an episode whether it succeeded; they become columns with a value in each step."""
    if "episode_metadata" not in features:
        return {}
    leaves = _leaves(features["episode_metadata"], kinds.FeaturesDict)
    found = {f"{OF_EPISODE}{name}": _classify(leaf, kinds) for name, leaf in leaves if name in _SUCCESS}
    return {name: detail for name, (kind, detail) in found.items() if kind == "column" and detail[1] == ()}


def _alternatives(prompt: str, texts: list[str]) -> tuple[str, ...]:
    """The texts of the instruction's name and a number, as DROID has two beside `language_instruction`, in order."""
    numbers = {text: re.fullmatch(rf"{re.escape(prompt)}_(\d+)", text) for text in texts} if prompt else {}
    found = {text: int(match[1]) for text, match in numbers.items() if match is not None}
    return tuple(sorted(found, key=found.__getitem__))


def _choose_prompt(wanted: str, texts: list[str], of_episode: list[str], where: object) -> str:
    """The key of the instruction feature in a record; empty for "none". Raises ValueError if it is ambiguous."""
    if wanted == "none":
        return ""
    every = [*(f"steps/{name}" for name in texts), *of_episode]
    if wanted != "auto":
        for key in (f"steps/{wanted}", wanted):
            if key in every:
                return key
        raise ValueError(f"prompt_feature {wanted!r} is not in {where}; its text features are {[*texts, *of_episode]}")
    candidates = [name for name in texts if "instruction" in name.rsplit("/", 1)[-1]]
    exact = [name for name in candidates if name.rsplit("/", 1)[-1] == "language_instruction"]
    if len(exact) == 1 or len(candidates) == 1:
        return f"steps/{(exact or candidates)[0]}"
    found = f"several instruction features {candidates}" if candidates else "no `*instruction*` text feature"
    raise ValueError(
        f"{where} has {found}; set prompt_feature to one of its text features {[*texts, *of_episode]}, "
        "or to 'none' for empty prompts"
    )
