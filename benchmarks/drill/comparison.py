"""The end of a drill: the disturbed run beside an undisturbed one of as many steps, bit by bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.drill.experiments import Drilled
from benchmarks.drill.laboratory import Laboratory
from benchmarks.drill.running import Running

_START_S, _STEP_S = 300.0, 2.0
Metrics = Mapping[int, Mapping[str, Any]]


def differences(lab: Laboratory, disturbed: Running, drilled: Drilled, num_hosts: int) -> str:
    """Train the same number of steps without faults; returns the differences, or an empty string."""
    found = disturbed.metrics()
    last = max(found)
    undisturbed = Running(lab, drilled, num_hosts, "undisturbed")
    undisturbed.start("--num-train-steps", str(last))
    try:
        if (code := undisturbed.launched.end(_START_S + _STEP_S * last)) != 0:
            return f"the undisturbed run ended with code {code}\n{undisturbed.said()}"
    finally:
        undisturbed.close()
    return compare((found, disturbed.files()), (undisturbed.metrics(), undisturbed.files()))


def compare(disturbed: tuple[Metrics, Path], undisturbed: tuple[Metrics, Path]) -> str:
    """The differences of two runs, each with its metrics by step and its directory, or an empty string."""
    (found, one), (expected, other) = disturbed, undisturbed
    last = max(found)
    if wrong := [step for step in expected if found.get(step) != expected[step]]:
        return (
            f"the metrics of {len(wrong)} of {last} steps differ from the undisturbed run's, first at {wrong[0]}: "
            f"{found.get(wrong[0])} instead of {expected[wrong[0]]}"
        )
    ours, theirs = (_arrays(directory / str(last)) for directory in (one, other))
    different = [name for name in theirs if name not in ours or ours[name].tobytes() != theirs[name].tobytes()]
    if different or len(ours) != len(theirs):
        return f"{len(different)} of {len(theirs)} arrays of checkpoint {last} differ, first {different[:1]}"
    return ""


def _arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by item and path: the published parameters and the training state."""
    arrays = {}
    with ocp.PyTreeCheckpointer() as reader:
        for item in ("params", "train_state"):
            stored: Any = reader.metadata(checkpoint / item)
            tree = getattr(stored, "item_metadata", stored).tree
            wanted = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), tree)
            values = reader.restore(checkpoint / item, ocp.args.PyTreeRestore(item=tree, restore_args=wanted))
            flat, _ = jax.tree_util.tree_flatten_with_path(values)
            arrays |= {item + jax.tree_util.keystr(path): np.asarray(value) for path, value in flat}
    return arrays
