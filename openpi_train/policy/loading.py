"""`load_policy`: loads a run's checkpoint, or another one with its experiment, as a `Policy`.

The optimizer state is not read, and each device reads only the parameters that it holds. Read next: `policy.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.data.robot.config import Dataset
from openpi_train.data.robot.normalize import NormStats, parse_norm_stats
from openpi_train.data.robot.tokens import open_tokenizer, tokens_fingerprint
from openpi_train.data.robot.transforms import Normalize
from openpi_train.data.robot.translation import Translation
from openpi_train.experiment import Experiment
from openpi_train.interop.checkpoint_tokenizer import check_tokenizer, on_disk, with_files
from openpi_train.interop.robot_actions import check_action_dims
from openpi_train.interop.stored_leaves import Stored
from openpi_train.models.model_config import as_policy
from openpi_train.policy.observation import ObservationForm
from openpi_train.policy.policy import Policy
from openpi_train.policy.restore import open_run, restored
from openpi_train.policy.sampler import Sampler
from openpi_train.runtime.device_kinds import JaxDevice
from openpi_train.runtime.exits import CheckpointError, UsageError

BATCH_SIZES = (1, 4, 16)


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
    guidance: float | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seed: int | None = None,
    tokenizer: str | None = None,
    cut_prompts: bool = False,
    devices: Sequence[JaxDevice] | None = None,
) -> Policy:
    """Load a trained policy: `load_policy(run).infer(observation)["actions"]`.

    Args:
        directory: a run's directory (its newest checkpoint is used), the directory of a step in it, or its `best`; or a
            checkpoint in another format of `docs/howto/convert.md`, with its `experiment`. May be a bucket's address.
        experiment: the run's experiment, by name or `file.py:name`: needed if it uses classes of your own and their
            file was moved, and for a checkpoint that does not record its experiment.
        dataset: number or asset id of the dataset whose robot and norm stats are used, if there are several.
        prompt: the instruction for observations without one; None: the dataset's own, if it has a fixed one.
        average: use the averaged parameters (EMA), if the run kept an average.
        dtype: the dtype of the parameters in memory; None: as stored.
        merge_lora: merge low-rank factors into the weights, for speed.
        num_sample_steps: denoising steps; None: as in the run's evaluation.
        guidance: guidance towards what is better than expected, of a policy that has an indicator (`IndicatorFlow`);
            None: as in the run's evaluation.
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
    check_action_dims(stored, chosen.robot)
    config, model = run.demonstrations, run.policy
    if stored.token_files is not None:
        folder = on_disk(stored.token_files)
        model, tokenizer = with_files(model, folder), tokenizer or str(folder)
    pieces = open_tokenizer(model, tokenizer or config.tokenizer, offline=config.offline)
    check_tokenizer(stored.tokenizer, tokens_fingerprint(model, pieces), where=stored.where)
    lengths, longest = None, model.rows.text_length(pieces, ())
    if longest is not None:
        lengths = tuple(sorted({stored.text_length or longest, longest}))
    stats, form = _norm_stats(stored, chosen.asset), config.normalization or model.rows.normalization
    restored_model, params, plan = restored(
        model, stored, str(directory), average=average, dtype=dtype, merge_lora=merge_lora, devices=devices
    )
    model = as_policy(restored_model)
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
        guidance=guidance,
    )
    _ = sampler.action_sampler  # an invalid guidance is refused now
    return Policy(
        sampler=sampler,
        form=ObservationForm(
            robot=chosen.robot,
            window=run.policy.rows.window,
            image_size=sampler.image_size,
            reads_prompt=lengths is not None,
            prompt=chosen.prompt if prompt is None else prompt,
        ),
        translation=Translation(
            robot=chosen.robot,
            normalize=Normalize(stats, form),
            transforms=model.rows.transforms(pieces if cut_prompts else pieces.without_cuts(), longest),
            spec=sampler.row_spec(),
            window=run.policy.rows.window,
        ),
        experiment=run.name,
        # The resolved path, which names the step of `best`.
        checkpoint=stored.where if "://" in stored.where else str(Path(stored.where).resolve()),
    )


def choose_dataset(run: Experiment, wanted: int | str | None) -> Dataset:
    """The dataset whose robot and norm stats are used. Raises UsageError if that is ambiguous."""
    datasets = run.demonstrations.datasets
    if not datasets:
        raise UsageError(
            f"{run.name} has no dataset, and so no robot, in whose units it would act: give the run's directory, or "
            "`--experiment` with one that has the robot"
        )
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
    # Forms whose only norm stats have no name of a robot's.
    names = {form.asset_id for form in checkpoint_formats.formats()}
    unnamed = [name for name in stored.norm_stats if name in names]
    asset = unnamed[0] if unnamed and asset not in stored.norm_stats else asset
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
