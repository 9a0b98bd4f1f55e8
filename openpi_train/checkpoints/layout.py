"""The layout of a training state in a checkpoint: the item and name of every leaf.

    params/       for inference: {"params": nested tree} under the published names. The leaves are the EMA if
                  there is one, else the trained parameters, and the frozen ones in both cases.
    train_state/  step, optimizer state, the loss scale if there is one, and the trained parameters only if
                  `params/` holds their EMA.

So no array is stored twice. Every leaf is named by its path, also inside the optimizer's tuples: restoring needs
only names, and the structure is that of the running program. Read next: `checkpoint_store.py`.
"""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from openpi_train.parallel.state import TrainState
from openpi_train.runtime.exits import CheckpointError

Leaves = dict[str, Any]
PublicName = Callable[[str], str]
_LISTED = 8  # differences of one kind that an error lists
_TREES = ("opt_state", "scale")  # fields that train_state/ holds leaf by leaf; `scale` has none where it is None


def leaves_by_item(state: TrainState, public_name: PublicName) -> dict[str, Leaves]:
    """The state's leaves (arrays or shapes) by item and path."""
    published = {**(state.params if state.ema is None else state.ema), **state.frozen}
    names = _public_names(published, public_name)
    training = {"step": state.step}
    for field in _TREES:
        training |= {f"{field}/{path}": leaf for path, leaf in _leaves(getattr(state, field)).items()}
    if state.ema is not None:
        training |= {f"params/{path}": leaf for path, leaf in state.params.items()}
    return {
        "params": {f"params/{names[path]}": leaf for path, leaf in published.items()},
        "train_state": training,
    }


def state_from_items(items: Mapping[str, Leaves], like: TrainState, public_name: PublicName) -> TrainState:
    """The state with the structure of `like` and the leaves of `items` (inverse of `leaves_by_item`)."""
    training = items["train_state"]

    def published(paths):
        return {path: items["params"][f"params/{public_name(path)}"] for path in paths}

    if like.ema is None:
        params, ema = published(like.params), None
    else:
        params, ema = {path: training[f"params/{path}"] for path in like.params}, published(like.ema)

    def tree(field):
        leaves = [training[f"{field}/{path}"] for path in _leaves(getattr(like, field))]
        return jax.tree.unflatten(jax.tree.structure(getattr(like, field)), leaves)

    return TrainState(
        step=training["step"],
        params=params,
        frozen=published(like.frozen),
        ema=ema,
        **{field: tree(field) for field in _TREES},
    )


def describe(items: Mapping[str, Leaves]) -> dict[str, str]:
    """dtype and shape of every leaf, as `float32[2, 3]`, by item and path."""
    return {
        f"{item}/{path}": f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for item, leaves in items.items()
        for path, leaf in leaves.items()
    }


def size_bytes(items: Mapping[str, Leaves]) -> int:
    """Bytes of all leaves, over all devices and processes, without replicas."""
    return sum(
        math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaves in items.values() for leaf in leaves.values()
    )


def check_same_leaves(saved: Mapping[str, str], wanted: Mapping[str, str], *, where: str, cast: bool) -> None:
    """Raise one CheckpointError that lists all differences between the saved leaves and those of this run.

    Args:
        saved, wanted: results of `describe` for the checkpoint and this run.
        cast: whether another dtype is allowed.
    """
    changed = sorted(path for path in saved.keys() & wanted.keys() if saved[path] != wanted[path])
    if cast:
        changed = [path for path in changed if _shape(saved[path]) != _shape(wanted[path])]
    groups = {
        "this run needs, the checkpoint lacks": sorted(wanted.keys() - saved.keys()),
        "the checkpoint has, this run does not": sorted(saved.keys() - wanted.keys()),
        "differ (checkpoint -> this run)": [f"{path}: {saved[path]} -> {wanted[path]}" for path in changed],
    }
    if not any(groups.values()):
        return
    lines = [f"{where} was saved by a run with another model, optimizer, EMA or dtype:"]
    for title, paths in groups.items():
        if paths:
            shown = paths[:_LISTED] + ([f"... and {len(paths) - _LISTED} more"] if len(paths) > _LISTED else [])
            lines += [f"  {len(paths)} leaves {title}:", *(f"    {path}" for path in shown)]
    lines.append(
        "  Resume with the flags that the run was started with (experiment.json), or choose another --exp-name."
    )
    raise CheckpointError("\n".join(lines))


def _shape(description: str) -> str:
    return description[description.index("[") :]


def _public_names(leaves: Leaves, public_name: PublicName) -> dict[str, str]:
    names = {path: public_name(path) for path in leaves}
    twice = [name for name, count in collections.Counter(names.values()).items() if count > 1]
    if twice:
        sources = [path for path, name in names.items() if name == twice[0]]
        raise CheckpointError(f"parameters {sources} would be published under one name, {twice[0]!r}")
    return names


def _leaves(tree: object) -> Leaves:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
