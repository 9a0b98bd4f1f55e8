"""What a checkpoint's Orbax items hold, for tests that compare two of them."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp


def stored_arrays(step_dir: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of every array, by item and path, read as inference reads them."""
    found = {}
    for item in ("params", "train_state"):
        with ocp.PyTreeCheckpointer() as reader:
            stored = reader.metadata(step_dir / item)
            tree = getattr(stored, "item_metadata", stored).tree
            arguments = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), tree)
            arrays = reader.restore(step_dir / item, ocp.args.PyTreeRestore(restore_args=arguments))
        for path, array in jax.tree_util.tree_flatten_with_path(arrays)[0]:
            found[item + jax.tree_util.keystr(path)] = (array.dtype.name, array.shape, array.tobytes())
    return found
