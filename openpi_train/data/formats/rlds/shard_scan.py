"""Scans one shard of an RLDS split into small arrays: episode lengths, digests, columns, prompts, image offsets.

Read next: `example.py` (the wire format of one record), `rlds_index.py` (joins the shards).
"""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from openpi_train.data.core.instructions import is_blank
from openpi_train.data.formats.rlds.example import Feature, read_example
from openpi_train.data.formats.rlds.schema import FEATURES_FILE, INFO_FILE, OF_EPISODE, Schema, ShardFile
from openpi_train.data.formats.rlds.tfrecord import read_records
from openpi_train.json_object import JsonObject


def scan_shard(
    directory: Path, shard: ShardFile, schema: Schema, check_crc: bool, keep_going: Callable[[int], None]
) -> dict[str, np.ndarray]:
    """The index entries of one shard. Damaged records are left out and listed under `dropped`.

    Args:
        keep_going: Called with the number of bytes of each record read; raises to stop.
    """
    episodes, dropped, seen = [], [], 0
    for record in read_records(directory / shard.name, check_crc=check_crc):
        seen = shard.num_episodes if record.lost else record.number + 1
        keep_going(len(record.payload))
        problem = record.problem
        if not problem:
            try:
                episodes.append(_parse_episode(record.payload, record.offset, record.number, schema))
            except ValueError as error:
                problem = str(error)
        if problem:
            lost = max(shard.num_episodes - record.number, 1) if record.lost else 1
            dropped.append({"file": shard.name, "record": record.number, "episodes": lost, "why": problem})
    if seen < shard.num_episodes:
        why = f"the file ends after {seen} records; {INFO_FILE} says {shard.num_episodes}"
        dropped.append({"file": shard.name, "record": seen, "episodes": shard.num_episodes - seen, "why": why})
    return _pack_part(episodes, dropped, schema)


def _parse_episode(payload: bytes, offset: int, number: int, schema: Schema) -> dict[str, Any]:
    """One record as arrays. Raises ValueError if it does not match features.json."""
    features = read_example(payload)
    digest = hashlib.sha256()
    arrays: dict[str, Any] = {"records": number}
    lengths = {}
    for name in schema.cameras:
        feature = _feature(features, f"steps/{name}", "bytes")
        arrays[f"spans/{name}"] = np.array([(offset + start, end - start) for start, end in feature.spans], np.int64)
        lengths[name] = len(feature.spans)
        for start, end in feature.spans:
            digest.update((end - start).to_bytes(8, "little"))
            digest.update(memoryview(payload)[start:end])
    for name, (dtype, shape) in schema.columns.items():
        if name.startswith(OF_EPISODE):
            continue
        values = _feature(features, f"steps/{name}", "float" if dtype == "float32" else "int").numbers()
        width = math.prod(shape)
        if len(values) % width:
            raise ValueError(f"steps/{name} holds {len(values)} numbers, not a multiple of {width}")
        lengths[name] = len(values) // width
        values = values.view(np.uint64) if dtype == "uint64" else values.astype(dtype)
        arrays[f"columns/{name}"] = values.reshape(-1, *shape)
        if name in schema.identity:
            digest.update(f"{name} {dtype} {shape}".encode())
            digest.update(values.tobytes())
    num_steps = max(lengths.values(), default=0)
    if num_steps == 0 or set(lengths.values()) != {num_steps}:
        raise ValueError(f"the episode has no steps, or its features have different lengths: {lengths}")
    for name, (dtype, _) in schema.columns.items():
        if name.startswith(OF_EPISODE):
            values = _feature(features, name, "float" if dtype == "float32" else "int").numbers()
            if len(values) != 1:
                raise ValueError(f"{name} holds {len(values)} numbers, expected 1")
            arrays[f"columns/{name}"] = np.repeat(values.astype(dtype), num_steps)
    prompts = _episode_prompts(features, schema.prompt, num_steps)
    for key in schema.alternatives if any(map(is_blank, prompts)) else ():
        others = _episode_prompts(features, key, num_steps)
        prompts = [other if is_blank(text) else text for text, other in zip(prompts, others, strict=True)]
    arrays["prompts"] = prompts
    arrays["num_steps"], arrays["id"] = num_steps, digest.hexdigest()[:32]
    return arrays


def _feature(features: dict[str, Feature], key: str, kind: str) -> Feature:
    if key not in features:
        raise ValueError(f"it lacks {key}, which {FEATURES_FILE} lists")
    if features[key].kind not in (kind, "empty"):
        raise ValueError(f"{key} holds {features[key].kind} values, expected {kind}")
    return features[key]


def _episode_prompts(features: dict[str, Feature], key: str, num_steps: int) -> list[str]:
    """The instruction at every step; a text given once per episode is repeated."""
    if not key:
        return [""] * num_steps
    texts = [text.decode("utf-8", errors="replace").strip() for text in _feature(features, key, "bytes").values()]
    if key.startswith(OF_EPISODE) and len(texts) == 1:
        texts *= num_steps
    if len(texts) != num_steps:
        raise ValueError(f"{key} holds {len(texts)} texts for {num_steps} steps")
    return texts


def _pack_part(episodes: list[JsonObject], dropped: list[JsonObject], schema: Schema) -> dict[str, np.ndarray]:
    texts: dict[str, int] = {}
    prompt_index = [texts.setdefault(text, len(texts)) for episode in episodes for text in episode["prompts"]]

    def column(key: str, dtype: DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([np.empty((0, *shape), dtype), *(episode[key] for episode in episodes)])

    return {
        "lengths": np.array([episode["num_steps"] for episode in episodes], np.int64),
        "ids": np.array([episode["id"] for episode in episodes], "<U32"),
        "records": np.array([episode["records"] for episode in episodes], np.int64),
        "prompt_index": np.array(prompt_index, np.int32),
        "texts": np.frombuffer(json.dumps([list(texts), dropped]).encode(), np.uint8),
        **{f"spans/{name}": column(f"spans/{name}", np.int64, (2,)) for name in schema.cameras},
        **{f"columns/{name}": column(f"columns/{name}", *detail) for name, detail in schema.columns.items()},
    }
