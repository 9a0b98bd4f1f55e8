"""The parameters of a checkpoint on the devices, to run its model. Read next: `loading.py`, `text_model.py`."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from openpi_train import registry
from openpi_train.checkpoints import checkpoint_formats
from openpi_train.experiment import Experiment
from openpi_train.interop import openpi
from openpi_train.interop.openpi_torch import ModelNeeded
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, place
from openpi_train.interop.trained_with import check_same_training
from openpi_train.models.model_config import ModelConfig
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import Params
from openpi_train.parallel.strategy import Plan
from openpi_train.policy.experiment_json import experiment_of_run
from openpi_train.runtime import agree
from openpi_train.runtime.device_kinds import JaxDevice
from openpi_train.runtime.device_limits import memory_bytes
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

# Fraction of a device's memory up to which each device holds all parameters; the rest is for activations and caches.
_MOST_OF_MEMORY = 0.6
# Smaller arrays are replicated when the others are sharded.
_MIN_SHARD_MIB = 4.0


def open_run(directory: str | Path, experiment: str | Experiment | None = None) -> tuple[Stored, Experiment]:
    """Open a checkpoint and its experiment. Arguments and errors are as in `load_policy`."""
    given = _named(directory, experiment) if isinstance(experiment, str) else experiment
    try:
        stored = checkpoint_formats.open_checkpoint(directory)
    except ModelNeeded:  # LeRobot's and PyTorch's
        given = given or _by_name(directory)
        if given is None:
            raise
        stored = checkpoint_formats.open_checkpoint(directory, given.model)
        check_same_training(stored, given)
        return stored, given
    if stored.experiment is not None:
        return stored, experiment_of_run(stored.experiment, stored.where, given)
    given = given or _by_name(directory)
    if given is None:
        raise UsageError(f"{directory} does not say whose model it is: name its experiment, --experiment NAME (`list`)")
    return stored, given


def _named(directory: str | Path, name: str) -> Experiment | None:
    """The experiment of this name; None for one of the user's, if the checkpoint has recorded that it is of it.

    Raises UnknownName if neither is.
    """
    try:
        return registry.load(name)
    except registry.UnknownName as error:
        if ".py" in name:
            raise
        said = None
        with contextlib.suppress(CheckpointError, UsageError):  # told when it is opened with an experiment
            said = checkpoint_formats.open_checkpoint(directory).experiment
        if said is None:
            raise registry.UnknownName(f"{error}. An experiment of your own is given as FILE.py:NAME") from error
        if said.get("name") != name:
            raise registry.UnknownName(
                f"{error}. {directory} is a run of {said.get('name')}, and knows its experiment: leave --experiment "
                "(openpi's --policy.config) out, or give another as FILE.py:NAME"
            ) from error
        return None


def _by_name(directory: str | Path) -> Experiment | None:
    """The experiment of the folder's name, if there is one."""
    name = Place.of(directory).name
    if name not in registry.entries():
        return None
    logger.info("%s: taken for a checkpoint of the experiment %s, by its name", directory, name)
    return registry.load(name)


def restored(
    model: ModelConfig,
    stored: Stored,
    directory: str,
    *,
    average: bool,
    dtype: str | None,
    merge_lora: bool,
    devices: Sequence[JaxDevice] | None,
) -> tuple[ModelConfig, Params, Plan]:
    """The model to run, its parameters on the devices, and their plan. Arguments: those of `load_policy`.

    Its attention is by XLA, which runs on every device, whatever the run trained with.
    """
    model = model.with_compute(attention="auto")
    leaves = dict(checkpoint_formats.model_params(stored, model))
    if not average:
        leaves |= _not_averaged(checkpoint_formats.open_checkpoint(directory, model), model, leaves)
    plan = _plan(list(devices or jax.local_devices()), leaves)
    merges = merge_lora and any(path.endswith("/lora_a") for path in leaves)
    params: Params = {}
    for path, leaf in leaves.items():
        kept = merges or dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating)
        wanted = leaf.dtype if kept else jnp.dtype(dtype)
        params[path] = place(leaf, wanted, plan.tree("state", {path: leaf})[path])
    size, count = sum(leaf.nbytes for leaf in params.values()), plan.real_mesh.size
    where = "1 device" if count == 1 else f"{count} devices{', cut' if plan.cuts('copy') else ''}"
    logger.info("%s: %.3g GB of parameters on %s", stored.where, size / 1e9, where)
    return (model.without_lora(), _merged(model, params, plan, dtype), plan) if merges else (model, params, plan)


def _not_averaged(stored: Stored, model: ModelConfig, leaves: Leaves) -> dict[str, Any]:
    """The trained parameters themselves, for a checkpoint whose `params` are their average."""
    if stored.train_state is None:
        raise UsageError(f"{stored.where} has no training state, so it has only the published parameters")
    names = openpi.parameter_names(model)
    found = {path: stored.train_state.get(f"params/{names[path]}") for path in leaves}
    return {path: leaf for path, leaf in found.items() if leaf is not None}


def _merged(model: ModelConfig, params: Params, plan: Plan, dtype: str | None) -> Params:
    """The parameters with low-rank factors merged: merged weights in float32, or all weights in `dtype`."""
    adapted = {f"{path.removesuffix('/lora_a')}/weight" for path in params if path.endswith("/lora_a")}

    def merge(params: Params) -> Params:
        wide = {path: leaf.astype(jnp.float32) if path in adapted else leaf for path, leaf in params.items()}
        merged = model.param_rules.merge_lora(wide)
        return {path: leaf.astype(dtype or leaf.dtype) for path, leaf in merged.items()}

    shardings = plan.tree("state", jax.eval_shape(merge, params))
    return jax.jit(merge, out_shardings=shardings)(params)


def _plan(devices: Sequence[JaxDevice], leaves: Leaves) -> Plan:
    """Replicate all parameters if they fit on each device, else shard them over all devices.

    If the devices are those of several processes, all of these must call it.
    """
    size = sum(leaf.size_bytes for leaf in leaves.values())
    available = memory_bytes(next(device for device in devices if device.process_index == jax.process_index()))
    if len({device.process_index for device in devices}) > 1:
        available = min(agree.gather("memory of a device", available))
    if size <= _MOST_OF_MEMORY * available or len(devices) == 1:
        return Plan(mesh=make_mesh(1, devices), strategy="replicated")
    return Plan(mesh=make_mesh(len(devices), devices), strategy="zero3", min_shard_mib=_MIN_SHARD_MIB)
