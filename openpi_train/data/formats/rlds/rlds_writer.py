"""Writer of RLDS dataset directories: TFRecord shards, dataset_info.json and features.json.

Read next: `rlds_source.py` (reads it back), `tfrecord.py` (framing).

tensorflow-datasets encodes the episodes and writes its own metadata, so its readers accept the result; TensorFlow is
not needed. Everything is written under a temporary name and renamed at the end, so an interrupted write is never taken
for a dataset. Episodes are streamed, one in memory at a time.
"""

import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from openpi_train.data.core import files, image, tables
from openpi_train.data.core.source import About
from openpi_train.data.formats.rlds.schema import ABOUT_FILE, FEATURES_FILE
from openpi_train.data.formats.rlds.tfrecord import write_record

logger = logging.getLogger(__name__)

Episode = Mapping[str, Any]
_REPORT_S = 5.0


def write_rlds(
    directory: str | Path,
    *,
    name: str,
    version: str,
    features: Any,
    splits: Mapping[str, Iterable[Episode]],
    description: str = "",
    about: About | None = None,
    shard_size_mb: float = 128.0,
    jpeg_quality: int = 95,
) -> Path:
    """Write `<directory>/<name>/<version>`; returns that path.

    Args:
        features: A `tfds.features.FeaturesDict` with `steps` (a `Dataset` feature) and optionally `episode_metadata`.
            No other entries; every image feature needs an `encoding_format`.
        splits: The episodes of each split. An episode is a mapping that fits `features`; its `steps` are an iterable of
            step mappings, or one mapping of arrays whose first axis is the step. Images are uint8 arrays, or bytes
            that are already encoded, which are stored unchanged.
        about: The result of `Source.about` for the new dataset, stored beside it.
        shard_size_mb: Size at which a shard is closed; shards hold whole episodes.

    Raises:
        FileExistsError: The version exists; nothing is ever overwritten.
        ValueError: An episode does not fit `features` (names split, episode and feature), or a split is empty.
        OSError: The disk is full or not writable.
    """
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    final = Path(directory).expanduser() / name / version
    if final.exists():
        raise FileExistsError(f"{final} exists already; choose another version, or move it aside first")
    temporary = final.with_name(f".{version}.incomplete.{os.getpid()}")
    serializer = ExampleSerializer(features.get_serialized_info())
    with tables.explain_cache_errors(final.parent, "the dataset's directory"):
        try:
            temporary.mkdir(parents=True)
            written = {}
            for split, episodes in splits.items():
                payloads = (
                    _serialize(episode, features, serializer, jpeg_quality, f"split {split!r}, episode {number}")
                    for number, episode in enumerate(episodes)
                )
                written[split] = _write_split(temporary, f"{name}-{split}.tfrecord", payloads, shard_size_mb * 1e6)
            _write_metadata(temporary, name, version, features, written, description)
            if about is not None:
                files.write_json(temporary / ABOUT_FILE, about.as_json())
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _write_split(directory: Path, prefix: str, payloads: Iterator[bytes], shard_bytes: float) -> tuple[list[int], int]:
    """Write one split's shards; returns the number of episodes in each shard, and the payload bytes."""
    lengths: list[int] = []
    total, last_report = 0, time.monotonic()
    file: BinaryIO | None = None
    try:
        for payload in payloads:
            if file is None or file.tell() >= shard_bytes:
                _close(file)
                file = open(directory / f"{prefix}-{len(lengths):05d}", "wb")  # noqa: SIM115 (closed below)
                lengths.append(0)
            write_record(file, payload)
            lengths[-1] += 1
            total += len(payload)
            if time.monotonic() - last_report > _REPORT_S:
                last_report = time.monotonic()
                logger.info("%s: %.1f MB written, %d episodes so far", prefix, total / 1e6, sum(lengths))
    finally:
        _close(file)
    if not lengths:
        raise ValueError(f"{prefix} has no episodes; leave an empty split out")
    # Every shard's name includes the number of shards, which is known only now.
    for index in range(len(lengths)):
        path = directory / f"{prefix}-{index:05d}"
        path.rename(f"{path}-of-{len(lengths):05d}")
    logger.info("%s: %d episodes in %d shards, %.1f MB", prefix, sum(lengths), len(lengths), total / 1e6)
    return lengths, total


def _close(file: BinaryIO | None) -> None:
    if file is not None:
        file.flush()
        os.fsync(file.fileno())
        file.close()


def _serialize(episode: Episode, features: Any, serializer: Any, jpeg_quality: int, where: str) -> bytes:
    steps = list(_iterate_steps(episode["steps"], where)) if "steps" in episode else []
    if not steps:
        raise ValueError(f"{where} has no steps")
    try:
        _check_names(episode, features, "")
        for index, step in enumerate(steps):
            _check_names(step, features["steps"].feature, f"steps[{index}]/")
        encoded_steps = [_encode_images(step, features["steps"].feature, jpeg_quality) for step in steps]
        example = features.encode_example({**episode, "steps": encoded_steps})
        # Protobuf writes maps in random order by default; equal episodes must give equal bytes.
        return serializer.get_tf_example(example).SerializeToString(deterministic=True)
    except Exception as error:
        raise ValueError(f"{where} does not fit {FEATURES_FILE}: {error}") from error


def _iterate_steps(steps: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Step mappings, also from one mapping of arrays whose first axis is the step."""
    if not isinstance(steps, Mapping):
        yield from steps
        return
    lengths = {path: len(column) for path, column in _flatten(steps)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: the columns of `steps` differ in length: {lengths}")
    for index in range(next(iter(lengths.values()), 0)):
        yield _pick(steps, index)


def _pick(tree: Any, index: int) -> Any:
    if isinstance(tree, Mapping):
        return {name: _pick(child, index) for name, child in tree.items()}
    return tree[index]


def _flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in tree.items():
        if isinstance(child, Mapping):
            yield from _flatten(child, f"{prefix}{name}/")
        else:
            yield prefix + name, child


def _check_names(example: Mapping[str, Any], features: Any, prefix: str) -> None:
    """Compare an example's names with the features', recursively. Raises ValueError for missing or unknown names."""
    missing, unknown = sorted(set(features) - set(example)), sorted(set(example) - set(features))
    if missing or unknown:
        raise ValueError(f"{prefix or 'the episode'}: missing features {missing}, unknown features {unknown}")
    for name, child in features.items():
        if _is_branch(child):
            _check_names(example[name], child, f"{prefix}{name}/")


def _is_branch(feature: object) -> bool:
    import tensorflow_datasets as tfds

    return isinstance(feature, tfds.features.FeaturesDict)


def _encode_images(example: Any, features: Any, jpeg_quality: int) -> Any:
    """The example with image arrays replaced by encoded bytes, in their features' formats."""
    encoded = {}
    for name, value in example.items():
        feature = features[name]
        if _is_branch(feature):
            encoded[name] = _encode_images(value, feature, jpeg_quality)
        elif hasattr(feature, "encoding_format") and not isinstance(value, bytes):
            shape = tuple(np.shape(value))
            if len(shape) != 3 or any(
                want not in (None, have) for want, have in zip(feature.shape, shape, strict=True)
            ):
                raise ValueError(f"{name} has shape {shape}, expected {feature.shape}")
            encoded[name] = image.encode(np.asarray(value), feature.encoding_format or "png", jpeg_quality)
        else:
            encoded[name] = value
    return encoded


def _write_metadata(
    directory: Path,
    name: str,
    version: str,
    features: Any,
    written: Mapping[str, tuple[list[int], int]],
    description: str,
) -> None:
    """Write dataset_info.json and features.json, both with tensorflow-datasets."""
    import tensorflow_datasets as tfds
    from etils import epath
    from tensorflow_datasets.core import dataset_info, naming, splits

    def split_info(split: str, lengths: list[int], size_bytes: int) -> tfds.core.SplitInfo:
        template = naming.ShardedFileTemplate(
            data_dir=epath.Path(directory), dataset_name=name, split=split, filetype_suffix="tfrecord"
        )
        return tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=size_bytes, filename_template=template)

    identity = dataset_info.DatasetIdentity(
        name=name, version=tfds.core.Version(version), data_dir=str(directory), module_name=__name__
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        description=description or f"{name}, written by openpi_train.",
        features=features,
        split_dict=splits.SplitDict([split_info(split, *result) for split, result in written.items()]),
        disable_shuffling=True,  # tfds then reads the episodes in the order in which they were given
    )
    info.set_file_format("tfrecord")
    info.write_to_directory(directory)
