"""Reading Orbax items: onto devices for training, or as host arrays for start weights and evaluation.

Read next: `layout.py`.
"""

import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from openpi_train.runtime.exits import CheckpointError
from openpi_train.training.layout import Leaves
from openpi_train.training.manifest import find_damage, has_manifest
from openpi_train.training.state import nested_params


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
    return _by_path(_restore(path, arguments))


def restore_params(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The parameters that a checkpoint publishes, by published name, as host arrays in the dtype they were saved in.

    Reads our checkpoints and openpi's (whose leaves carry a last key "value"). Every process must call it.

    Args:
        path: a step's directory, the `best` link, or the `params` directory in one.

    Raises:
        CheckpointError: there are no parameters, or the manifest beside them says that they are damaged.
    """
    directory = pathlib.Path(path).absolute()
    item = directory if (directory / "_METADATA").is_file() else directory / "params"
    if not (item / "_METADATA").is_file():
        raise CheckpointError(
            f"{directory} holds no parameters: give a step's directory (<run>/<step> or <run>/best) "
            "or the params directory in one"
        )
    if has_manifest(item.parent):
        damage = find_damage(item.parent, below="params/")
        if damage:
            raise CheckpointError(f"{item.parent} cannot be used: {damage}")
    stored = ocp.PyTreeCheckpointHandler().metadata(epath.Path(item))
    arguments = ocp.args.PyTreeRestore(
        restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored.tree)
    )
    leaves = _by_path(_restore(item, arguments))
    if all(name.endswith("/value") for name in leaves):
        leaves = {name.removesuffix("/value"): leaf for name, leaf in leaves.items()}
    return {name.removeprefix("params/"): np.asarray(leaf) for name, leaf in leaves.items()}


def _restore(path: pathlib.Path, arguments: ocp.args.PyTreeRestore) -> Any:
    try:
        with ocp.PyTreeCheckpointer() as reader:
            return reader.restore(path, args=arguments)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _by_path(tree: Any) -> Leaves:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
