"""openpi's checkpoints, both ways: its `params` item to parameters under our paths, and ours to where it reads them.

A checkpoint is a directory `<step>/params` that Orbax wrote, holding the tree {"params": {...}}; checkpoints of its
training end every path in "value", released ones do not. Nothing is guessed: every parameter must be there, with its
shape, and none may be left over. Read next: `models/pi0_names.py` for the names.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from openpi_train.interop.manifest import find_damage, has_manifest
from openpi_train.models.base import ModelConfig
from openpi_train.nn.params import flat_params, module_params, nested_params
from openpi_train.runtime.exits import CheckpointError

# How many names an error message lists before it only counts.
_MAX_LISTED = 8


def load_params(directory: str | Path, model: ModelConfig, allow_missing: str | None = None) -> dict[str, np.ndarray]:
    """The checkpoint's parameters under `model`'s paths, float32 whatever type is stored.

    Args:
        directory: a step's directory, or the `params` directory in it.
        model: says which parameters there must be.
        allow_missing: a regular expression; parameters whose published name it matches may be absent.

    Raises:
        FileNotFoundError: there is no checkpoint at `directory`.
        ValueError: a parameter is missing, left over, or has another shape; all of them are named.
        CheckpointError: the manifest beside it (where it is one of ours) says that it is damaged.
    """
    item = find_params_item(directory)
    if has_manifest(item.parent) and (damage := find_damage(item.parent, below="params/")):
        raise CheckpointError(f"{item.parent} cannot be used: {damage}")
    stored = read_params_item(item)
    expected = {model.public_name(path): (path, shape) for path, shape in parameter_shapes(model).items()}
    may_miss = re.compile(allow_missing) if allow_missing else None
    missing = [name for name in expected if name not in stored and not (may_miss and may_miss.fullmatch(name))]
    unexpected = [name for name in stored if name not in expected]
    misshapen = [
        f"{name} is {stored[name].shape}, the model wants {shape}"
        for name, (_, shape) in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    if missing or unexpected or misshapen:
        raise ValueError(_mismatch(item, missing, unexpected, misshapen))
    return {path: stored[name] for name, (path, _) in expected.items() if name in stored}


def save_params(directory: str | Path, params: Mapping[str, Any], public_name: Callable[[str], str]) -> Path:
    """Write `params` (by our paths) as `<directory>/params` in openpi's form; the item's path comes back.

    Call it in one process. Raises FileExistsError rather than overwrite, ValueError where two paths share a name.
    """
    import orbax.checkpoint as ocp

    item = Path(directory).resolve() / "params"
    if item.exists():
        raise FileExistsError(f"{item} exists already; choose another directory or move it away")
    published = {public_name(path): np.asarray(value) for path, value in params.items()}
    if len(published) < len(params):
        raise ValueError(f"{len(params)} parameters are published under {len(published)} names; each needs its own")
    tree = nested_params(published)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(item, {"params": tree})
    return item


def find_params_item(directory: str | Path) -> Path:
    """The `params` item in a checkpoint's step directory, or `directory` where that is the item itself."""
    given = Path(directory).expanduser().resolve()
    for item in (given / "params", given):
        if (item / "_METADATA").is_file():
            return item
    raise FileNotFoundError(
        f"no checkpoint at {given}: neither it nor its `params` folder holds Orbax's _METADATA; "
        f"give a step's directory (.../<step>) or the params directory in it"
    )


def read_params_item(item: Path) -> dict[str, np.ndarray]:
    """Every parameter of an item by published name, as float32 numpy arrays, on this host only.

    Raises ValueError where the item is damaged or of another form.
    """
    import orbax.checkpoint as ocp

    # To numpy, explicitly: the stored shardings name devices of the machine that wrote them.
    restore = ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype(np.float32))
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(item).item_metadata
        if metadata is None:
            raise ValueError(f"{item} is damaged: Orbax cannot read what it holds; fetch it again")
        stored = metadata.tree
        if "params" not in stored:
            raise ValueError(f"{item} is not in openpi's form: its top level holds {list(stored)}, not 'params'")
        tree = {"params": stored["params"]}
        restore_args = jax.tree.map(lambda _: restore, tree)
        try:
            tree = checkpointer.restore(item, args=ocp.args.PyTreeRestore(item=tree, restore_args=restore_args))
        except Exception as error:  # Orbax and tensorstore have many kinds
            raise ValueError(f"{item} cannot be read, fetch it again: {type(error).__name__}: {error}") from error
    flat = {name: np.asarray(leaf) for name, leaf in flat_params(tree["params"]).items()}
    if all(name.endswith("/value") for name in flat):
        flat = {name.removesuffix("/value"): leaf for name, leaf in flat.items()}
    return flat


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of `model` by our path; nothing is allocated."""
    module = nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))
    return {path: tuple(leaf.shape) for path, leaf in module_params(module).items()}


def _mismatch(item: Path, missing: list[str], unexpected: list[str], misshapen: list[str]) -> str:
    def listed(title: str, names: list[str]) -> list[str]:
        if not names:
            return []
        more = [f"  ... and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
        return [f"{title} ({len(names)}):", *(f"  {name}" for name in names[:_MAX_LISTED]), *more]

    def with_closest(name: str) -> str:
        closest = difflib.get_close_matches(name, unexpected, n=1)
        return f"{name} (closest in the checkpoint: {closest[0]})" if closest else name

    lines = [
        f"{item} does not fit the model; check the model's variants and sizes against the checkpoint's",
        *listed("missing in the checkpoint", [with_closest(name) for name in missing]),
        *listed("in the checkpoint, unknown to the model", unexpected),
        *listed("of another shape", misshapen),
    ]
    return "\n".join(lines)
