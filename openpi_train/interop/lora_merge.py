"""Merging of low-rank factors into a checkpoint's weights, layer by layer: no host holds more than one layer.

Read next: `nn/lora.py` (the sum), `tools/convert_checkpoint.py` (`--merge-lora`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from openpi_train.interop.stored_leaves import Index, Leaves, Piece, StoredLeaf, at_hand
from openpi_train.models.model_config import ModelConfig

_FACTORS = ("/lora_a", "/lora_b")


def merged_lora(model: ModelConfig, params: Leaves, folder: Path | None = None) -> dict[str, StoredLeaf]:
    """The parameters of `model.without_lora()` by path; each is merged when it is read.

    `folder` is for temporary files of leaves whose layers cannot be read one by one (None: TMPDIR).
    """
    merged = {path: leaf for path, leaf in params.items() if not path.endswith(_FACTORS)}
    for name in (path.removesuffix("/lora_a") for path in params if path.endswith("/lora_a")):
        paths = [f"{name}/{part}" for part in ("weight", "lora_a", "lora_b")]
        merged[paths[0]] = _folded(model, {path: params[path] for path in paths}, folder)
    return merged


def _folded(model: ModelConfig, parts: Leaves, folder: Path | None) -> StoredLeaf:
    """The weight, first of `parts`, with the factors added; all are stacks of the same layers."""
    path, weight = next(iter(parts.items()))

    def stream(index: Index) -> Iterator[Piece]:
        with contextlib.ExitStack() as stack:
            near = {name: stack.enter_context(at_hand(leaf, folder)) for name, leaf in parts.items()}
            for layer in range(index[0].start, index[0].stop):
                row = slice(layer, layer + 1)
                values = {
                    name: jnp.asarray(leaf.read((row, *(slice(0, size) for size in leaf.shape[1:]))))
                    for name, leaf in near.items()
                }
                folded = np.asarray(model.merge_lora(values)[path])
                yield (row, *index[1:]), folded[(slice(0, 1), *index[1:])]

    return StoredLeaf.streamed(weight.shape, weight.dtype, (1, *weight.shape[1:]), stream)
