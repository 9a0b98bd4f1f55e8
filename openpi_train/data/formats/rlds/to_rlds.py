"""Writes any source as an RLDS dataset. Read next: `rlds_writer.py`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.formats.conversion import Conversion
from openpi_train.data.formats.rlds.rlds_writer import write_rlds

PROMPT = "language_instruction"
_PNG_MAGIC = b"\x89PNG"
# Fields that RLDS requires for every step.
BOUNDARIES = ("is_first", "is_last")


def write(conversion: Conversion, out: Path, *, split: str = "train") -> Path:
    """Write the conversion to `out`: `<data_dir>/<name>/<version>`, or `<data_dir>/<name>` for version 1.0.0.

    Returns the dataset's folder. Raises FileExistsError, ValueError if names cannot be nested as in RLDS, OSError.
    """
    import tensorflow_datasets as tfds

    out = Path(out)
    versioned = re.fullmatch(r"\d+\.\d+\.\d+", out.name)
    folder, version = (out.parent, out.name) if versioned else (out, "1.0.0")
    leaves: dict[str, Any] = {
        name: tfds.features.Tensor(shape=column.shape[1:], dtype=column.dtype)
        for name, column in conversion.columns.items()
    }
    leaves |= {name: tfds.features.Scalar(dtype=np.bool_) for name in BOUNDARIES if name not in leaves}
    for camera, size in conversion.sizes.items():
        first = next(conversion.encoded(range(1), camera))
        kind = "png" if first.startswith(_PNG_MAGIC) else "jpeg"
        leaves[camera] = tfds.features.Image(shape=(*size, 3), dtype=np.uint8, encoding_format=kind)
    if PROMPT in leaves:
        raise ValueError(
            f"the dataset has a column {PROMPT!r}, which RLDS needs for the instruction: --leave-out {PROMPT}"
        )
    leaves[PROMPT] = tfds.features.Text()
    return write_rlds(
        folder.parent,
        name=folder.name,
        version=version,
        features=tfds.features.FeaturesDict({"steps": tfds.features.Dataset(_nested(leaves))}),
        splits={split: ({"steps": _steps(conversion, steps)} for steps in conversion.episodes())},
        about=conversion.about,
    )


def _steps(conversion: Conversion, steps: range) -> Iterator[Mapping[str, Any]]:
    """An episode's steps, one by one."""
    pictures = {camera: conversion.encoded(steps, camera) for camera in conversion.source.cameras}
    boundaries = {"is_first": steps.start, "is_last": steps.stop - 1}
    for step, prompt in zip(steps, conversion.prompts(steps), strict=True):
        leaves: dict[str, Any] = {name: step == at for name, at in boundaries.items()}
        leaves |= {name: column[step] for name, column in conversion.columns.items()}
        leaves |= {camera: next(frames) for camera, frames in pictures.items()}
        yield _nested({**leaves, PROMPT: prompt})


def _nested(leaves: Mapping[str, object]) -> dict[str, Any]:
    """Nested mappings from names with slashes. Raises ValueError if a name is both a value and a group of values."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        branch, (*groups, name) = tree, path.split("/")
        for group in groups:
            branch = branch.setdefault(group, {})
        if not isinstance(branch, dict) or name in branch:
            raise ValueError(
                f"{path!r} and another name cannot both be in RLDS, as one is a prefix of the other: --leave-out one"
            )
        branch[name] = leaf
    return tree
