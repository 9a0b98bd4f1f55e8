"""A LeRobot dataset's features: their check, their entries in `info.json`, and their columns in parquet files.

Read next: `lerobot_writer.py`. The format is that of `LeRobotDataset.create`'s `features`, taken from lerobot 0.4.4
(`datasets/utils.py`) and the datasets that it wrote (`tests/data/formats/lerobot/fixtures`).
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from openpi_train.data.formats.lerobot.lerobot_metadata import require
from openpi_train.json_object import JsonObject

Version = Literal["v2.1", "v3.0"]
# Columns that every dataset has besides its own features.
NUMBERING = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
_PICTURES = ("video", "image")
_NUMBERS = ("bool", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_FIELDS = ("dtype", "shape", "names")
# The name of a fixed-length list in the `datasets` package that each format's lerobot uses.
_LIST = {"v2.1": "Sequence", "v3.0": "List"}


def complete(features: Mapping[str, JsonObject]) -> dict[str, dict[str, Any]]:
    """The features as in `info.json`, including those that every dataset has. Raises ValueError, naming the feature.

    Args: `features` by name, each with `dtype` ("float32", "bool", ..., or "video" or "image" for a camera), `shape`
    per step (for a camera height, width, 3; for a single number (1,)) and `names`, one per number, or None.
    """
    result: dict[str, dict[str, Any]] = {}
    for name, feature in features.items():
        if "/" in name or name in NUMBERING:
            raise ValueError(f"a feature cannot be named {name!r}: no slashes, and none of {', '.join(NUMBERING)}")
        if set(feature) - {*_FIELDS, "info"} or not {"dtype", "shape"} <= set(feature):
            raise ValueError(f"feature {name!r} has {', '.join(feature)}; it must have {', '.join(_FIELDS)}")
        dtype, shape, names = feature["dtype"], [int(size) for size in feature["shape"]], feature.get("names")
        if dtype in _PICTURES:
            names = names or ["height", "width", "channels"]
            if len(shape) != 3 or shape[-1] != 3:
                raise ValueError(f"camera {name!r} has shape {shape}; pictures are height, width, 3")
        elif not isinstance(dtype, str) or dtype not in _NUMBERS:
            raise ValueError(f"feature {name!r} has dtype {dtype!r}; allowed are {', '.join(_NUMBERS)}, video, image")
        elif not shape or (len(shape) == 1 and names is not None and len(names) != shape[0]):
            raise ValueError(f"feature {name!r} has shape {shape} and names {names}: give one name per number, or None")
        result[name] = {"dtype": dtype, "shape": shape, "names": list(names) if names is not None else None}
    if not set(cameras(result)) < set(result):
        raise ValueError("the features have no numeric column; a dataset needs at least `action`")
    return result | {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in NUMBERING.items()}


def cameras(features: Mapping[str, JsonObject], dtype: str | None = None) -> list[str]:
    """The names of the cameras, or of those with this `dtype`, in order."""
    return [name for name, feature in features.items() if feature["dtype"] in ((dtype,) if dtype else _PICTURES)]


def numbers(features: Mapping[str, JsonObject]) -> list[str]:
    """The names of the numeric features, in order."""
    return [name for name, feature in features.items() if feature["dtype"] not in _PICTURES]


def schema(features: Mapping[str, JsonObject], version: Version) -> Any:
    """The arrow schema of the parquet files, with the metadata that the `datasets` package reads."""
    pa = require("pyarrow")
    fields, described = [], {}
    for name, feature in features.items():
        dtype, shape = feature["dtype"], feature["shape"]
        if dtype == "video":
            continue
        if dtype == "image":
            fields.append(pa.field(name, pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
            described[name] = {"_type": "Image"}
            continue
        kind, value = pa.from_numpy_dtype(np.dtype(dtype)), {"dtype": dtype, "_type": "Value"}
        if shape == [1]:
            described[name] = value
        elif len(shape) == 1:
            kind = pa.list_(kind, shape[0])
            described[name] = {"feature": value, "length": shape[0], "_type": _LIST[version]}
        else:
            for _ in shape:
                kind = pa.list_(kind)
            described[name] = {"shape": shape, "dtype": dtype, "_type": f"Array{len(shape)}D"}
        fields.append(pa.field(name, kind))
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": described}})})


def table(columns: Mapping[str, np.ndarray], pictures: Mapping[str, list[bytes]], described: Any) -> Any:
    """An episode's rows. `columns` [n, ...] by feature, `pictures` encoded; `described` is the result of `schema`."""
    pa = require("pyarrow")
    arrays = []
    for field in described:
        if field.name in pictures:
            # The file names that lerobot stores beside the bytes.
            rows = [{"bytes": data, "path": f"frame-{row:06d}.png"} for row, data in enumerate(pictures[field.name])]
            arrays.append(pa.array(rows, type=field.type))
            continue
        values = columns[field.name]
        nested = values.ndim > 1
        arrays.append(pa.array(list(values) if values.ndim == 2 else values.tolist() if nested else values, field.type))
    return pa.Table.from_arrays(arrays, schema=described)
