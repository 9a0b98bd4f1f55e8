"""Reading Orbax items: onto devices for training, or as host arrays for start weights and evaluation.

Read next: `layout.py`.
"""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from openpi_train.nn.params import flat_params, nested_params
from openpi_train.runtime.exits import CheckpointError
from openpi_train.training.checkpoints.layout import Leaves


def read_item(path: pathlib.Path, leaves: Leaves) -> Leaves:
    """The item's arrays, with the shapes, dtypes and shardings of `leaves` (by path). Every process must call it."""
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in leaves.items()
    }
    without = [name for name, shape in shapes.items() if shape.sharding is None]
    if without:
        raise ValueError(f"cannot restore {without[0]} (and {len(without) - 1} more): its shape carries no sharding")
    tree = nested_params(shapes)
    arguments = ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    return flat_params(_restore(path, arguments))


def _restore(path: pathlib.Path, arguments: ocp.args.PyTreeRestore) -> Any:
    try:
        with ocp.PyTreeCheckpointer() as reader:
            return reader.restore(path, args=arguments)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
