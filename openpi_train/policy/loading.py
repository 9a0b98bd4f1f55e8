"""`load_policy`: loads a run's checkpoint, or another one with its experiment, as a `Policy`.

The optimizer state is not read, and each device reads only the parameters that it holds. Read next: `policy.py`.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from openpi_train import registry
from openpi_train.data.config import Dataset
from openpi_train.data.normalize import NormStats, parse_norm_stats
from openpi_train.data.tokenizer import FILE
from openpi_train.data.tokens import open_tokenizer, tokens_fingerprint
from openpi_train.data.transforms import Normalize
from openpi_train.data.translation import Translation
from openpi_train.experiment import Experiment
from openpi_train.interop import checkpoint_formats, openpi
from openpi_train.interop.checkpoint_tokenizer import check_tokenizer, on_disk, with_files
from openpi_train.interop.stored_leaves import Leaves, Stored, place
from openpi_train.models.model_config import PolicyConfig, as_policy
from openpi_train.nn.params import Params
from openpi_train.planning.device_limits import memory_bytes
from openpi_train.policy.experiment_json import experiment_from_json
from openpi_train.policy.observation import ObservationForm
from openpi_train.policy.policy import Policy
from openpi_train.policy.sampler import Sampler
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.sharding.mesh import make_mesh
from openpi_train.sharding.strategy import Plan

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 4, 16)
# Fraction of a device's memory up to which each device holds all parameters; the rest is for activations and caches.
_MOST_OF_MEMORY = 0.6
# Smaller arrays are replicated when the others are sharded.
_MIN_SHARD_MIB = 4.0


def load_policy(
    directory: str | Path,
    *,
    experiment: str | Experiment | None = None,
    dataset: int | str | None = None,
    prompt: str | None = None,
    average: bool = True,
    dtype: Literal["float32", "bfloat16"] | None = None,
    merge_lora: bool = True,
    num_sample_steps: int | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seed: int | None = None,
    tokenizer: str | None = None,
    cut_prompts: bool = False,
    devices: Sequence[Any] | None = None,
) -> Policy:
    """Load a trained policy: `load_policy(run).infer(observation)["actions"]`.

    Args:
        directory: a run's directory (its newest checkpoint is used), the directory of a step in it, or its `best`; or a
            checkpoint in another format of `docs/exchange.md`, with its `experiment`. May be a bucket's address.
        experiment: the run's experiment, by name or `file.py:name`: needed if it uses classes of your own, and for a
            checkpoint that does not record its experiment.
        dataset: number or asset id of the dataset whose robot and norm stats are used, if there are several.
        prompt: the instruction for observations without one; None: the dataset's own, if it has a fixed one.
        average: use the averaged parameters (EMA), if the run kept an average.
        dtype: the dtype of the parameters in memory; None: as stored.
        merge_lora: merge low-rank factors into the weights, for speed.
        num_sample_steps: denoising steps; None: as in the run's evaluation.
        batch_sizes: batch sizes to compile; a batch is padded to the next one.
        seed: seed of all noise; None: the run's.
        tokenizer: another path of the run's tokenizer; None: the checkpoint's own, or the experiment's.
        cut_prompts: truncate prompts that are too long, with a warning, as in training; otherwise they are errors.
        devices: the devices to use; None: all of this process.

    Raises:
        CheckpointError: there is no complete checkpoint, or it does not fit the experiment.
        UsageError: an argument is missing or invalid; the message names the valid ones.
    """
    if num_sample_steps is not None and num_sample_steps < 1:
        raise UsageError(f"{num_sample_steps} denoising steps are too few; give 1 or more")
    stored, run = open_run(directory, experiment)
    chosen = choose_dataset(run, dataset)
    config, model = run.demonstrations, run.policy
    if stored.token_files is not None:
        folder = on_disk(stored.token_files)
        model, tokenizer = with_files(model, folder), tokenizer or str(folder / FILE)
    pieces = open_tokenizer(model, tokenizer or config.tokenizer, offline=config.offline)
    check_tokenizer(stored.tokenizer, tokens_fingerprint(model, pieces), where=stored.where)
    lengths, longest = None, model.text_length(pieces, ())
    if longest is not None:
        lengths = tuple(sorted({stored.text_length or longest, longest}))
    stats, form = _norm_stats(stored, chosen.asset), config.normalization or model.normalization
    model, params, plan = _restored(model, stored, str(directory), average, dtype, merge_lora, devices)
    sampler = Sampler(
        model=model,
        objective=run.objective,
        params=params,
        plan=plan,
        cameras=config.cameras,
        seed=run.seed if seed is None else seed,
        num_steps=num_sample_steps or run.robot_eval.num_sample_steps,
        batch_sizes=tuple(batch_sizes),
        text_lengths=lengths,
    )
    return Policy(
        sampler=sampler,
        form=ObservationForm(
            robot=chosen.robot,
            window=run.policy.window,
            image_size=sampler.image_size,
            reads_prompt=lengths is not None,
            prompt=chosen.prompt if prompt is None else prompt,
        ),
        translation=Translation(
            robot=chosen.robot,
            normalize=Normalize(stats, form),
            transforms=model.transforms(pieces if cut_prompts else pieces.without_cuts(), longest),
            spec=sampler.row_spec(),
            window=run.policy.window,
        ),
        experiment=run.name,
        # The resolved path, which names the step of `best`.
        checkpoint=stored.where if "://" in stored.where else str(Path(stored.where).resolve()),
    )


def open_run(directory: str | Path, experiment: str | Experiment | None = None) -> tuple[Stored, Experiment]:
    """Open a checkpoint and its experiment. Arguments and errors are as in `load_policy`."""
    given = registry.load(experiment) if isinstance(experiment, str) else experiment
    stored = checkpoint_formats.open_checkpoint(directory)
    if stored.experiment is not None:
        return stored, experiment_from_json(stored.experiment, given)
    if given is None:
        raise UsageError(f"{directory} does not say whose model it is: name an experiment (see `list`)")
    return stored, given


def choose_dataset(run: Experiment, wanted: int | str | None) -> Dataset:
    """The dataset whose robot and norm stats are used. Raises UsageError if that is ambiguous."""
    datasets = run.demonstrations.datasets
    listing = ", ".join(f"{n} ({one.asset}, {type(one.robot).__name__})" for n, one in enumerate(datasets))
    if isinstance(wanted, str):
        found = [one for one in datasets if one.asset == wanted]
    else:
        found = [one for n, one in enumerate(datasets) if wanted in (None, n)]
    if len({(repr(one.robot), one.asset) for one in found}) != 1:
        problem = "was trained on several datasets" if wanted is None else f"has no dataset {wanted!r}"
        raise UsageError(f"the run {problem}; choose the one whose robot is used with `dataset`: {listing}")
    return found[0]


def _norm_stats(stored: Stored, asset: str) -> Mapping[str, NormStats]:
    if asset not in stored.norm_stats:
        raise CheckpointError(
            f"{stored.where} holds no norm stats for {asset!r}, only for {sorted(stored.norm_stats) or 'nothing'}; add "
            "them with `convert --norm-stats FILE --asset-id ...`"
        )
    try:
        stats = parse_norm_stats(stored.norm_stats[asset], f"the norm stats {asset!r} of {stored.where}")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if missing := {"state", "actions"} - stats.keys():
        raise CheckpointError(f"the norm stats {asset!r} of {stored.where} lack {', '.join(sorted(missing))}")
    return stats


def _restored(
    model: PolicyConfig,
    stored: Stored,
    directory: str,
    average: bool,
    dtype: str | None,
    merge_lora: bool,
    devices: Sequence[Any] | None,
) -> tuple[PolicyConfig, Params, Plan]:
    """The model to run, its parameters on the devices, and their plan."""
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
    size = sum(leaf.nbytes for leaf in params.values())
    count, where = plan.real_mesh.size, f"{plan.real_mesh.size} devices" if plan.real_mesh.size > 1 else "1 device"
    logger.info(
        "%s: %.3g GB of parameters on %s%s",
        stored.where,
        size / 1e9,
        where,
        ", cut" if count > 1 and plan.cuts("copy") else "",
    )
    return (
        (as_policy(model.without_lora()), _merged(model, params, plan, dtype), plan)
        if merges
        else (model, params, plan)
    )


def _not_averaged(stored: Stored, model: PolicyConfig, leaves: Leaves) -> dict[str, Any]:
    """The trained parameters themselves, for a checkpoint whose `params` are their average."""
    if stored.train_state is None:
        raise UsageError(f"{stored.where} has no training state, so it has only the published parameters")
    names = openpi.parameter_names(model)
    found = {path: stored.train_state.get(f"params/{names[path]}") for path in leaves}
    return {path: leaf for path, leaf in found.items() if leaf is not None}


def _merged(model: PolicyConfig, params: Params, plan: Plan, dtype: str | None) -> Params:
    """The parameters with low-rank factors merged: merged weights in float32, or all weights in `dtype`."""
    adapted = {f"{path.removesuffix('/lora_a')}/weight" for path in params if path.endswith("/lora_a")}

    def merge(params: Params) -> Params:
        wide = {path: leaf.astype(jnp.float32) if path in adapted else leaf for path, leaf in params.items()}
        merged = model.merge_lora(wide)
        return {path: leaf.astype(dtype or leaf.dtype) for path, leaf in merged.items()}

    shardings = plan.tree("state", jax.eval_shape(merge, params))
    return jax.jit(merge, out_shardings=shardings)(params)


def _plan(devices: list[Any], leaves: Leaves) -> Plan:
    """Replicate all parameters if they fit on each device, else shard them over all devices."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    fits = size <= _MOST_OF_MEMORY * memory_bytes(devices[0])
    if fits or len(devices) == 1:
        return Plan(mesh=make_mesh(1, devices), strategy="replicated")
    return Plan(mesh=make_mesh(len(devices), devices), strategy="zero3", min_shard_mib=_MIN_SHARD_MIB)
