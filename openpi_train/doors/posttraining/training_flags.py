"""Translates a YAML config of the PyTorch post-training tool to our flags. Read next: `without_flag.py`.

The keys are those of `TrainingArguments` of transformers, as far as the tool has them, with a DeepSpeed file beside
them. Absent keys keep the values of `posttrain.py`.
"""

import dataclasses
import os
from pathlib import Path

from openpi_train.doors.config_file import Translated, contradiction, keys_by_flag
from openpi_train.doors.own_checkpoint import own_checkpoint
from openpi_train.doors.posttraining.beside_deepspeed import BesideDeepSpeed, translate_strategy
from openpi_train.doors.posttraining.model_keys import MODEL_KEY, start_model
from openpi_train.doors.posttraining.reward_keys import rewards_of
from openpi_train.doors.posttraining.rl_flags import rl_flags
from openpi_train.doors.posttraining.text_sources import NoSourcesError, TextSource, text_sources
from openpi_train.doors.posttraining.without_flag import NOT_DONE
from openpi_train.doors.posttraining.yaml_config import Algorithm, YamlConfig
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "no": "float32"}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_WRITERS = ("tensorboard", "wandb")
# Rows of a device if neither file says how many.
DEFAULT_ROWS = 4
# Steps between checkpoints, if no key says how many.
DEFAULT_SAVE = 500
# Parent of the runs.
DEFAULT_OUTPUT = "./output"
_NAME = "experiment_name"
# Flags that are one value each: how it is read, and all spellings of its key.
_PLAIN = {
    "exp-name": f"text {_NAME}",
    "checkpoint-base-dir": "text output_dir",
    "seed": "whole seed",
    "num-workers": "whole dataloader_num_workers dataloader.num_workers",
    "optimizer.clip-gradient-norm": "bound max_grad_norm",
    "optimizer.weight-decay": "number weight_decay",
    "optimizer.b1": "number adam_beta1",
    "optimizer.b2": "number adam_beta2",
    "optimizer.eps": "number adam_epsilon",
    "model.remat": "recomputes gradient_checkpointing",
    "keep-last": "count save_total_limit",
    "log-interval": "count logging_steps",
    "data.cache-dir": "text data.cache_dir",
}
# The keys that our errors are about, by the flag that they name.
KEYS = {
    **keys_by_flag(_PLAIN),
    "--batch-size": "per_device_train_batch_size x gradient_accumulation_steps x devices",
    "--micro-batch-size": "per_device_train_batch_size",
    "--grad-accum": "gradient_accumulation_steps",
    "--model.remat": "gradient_checkpointing: true",
    "--model.dtype": "bf16: true",
    "--sharding.strategy": "distributed_strategy: deepspeed with deepspeed_zero_stage: 1, 2 or 3",
    "--sharding.offload": "deepspeed_cpu_offload: true",
    "--data.max-length": "data.max_length",
    "--num-train-steps": "max_steps",
    "--rl.group-size": "num_generations",
    "--rl.max-new-tokens": "max_new_tokens",
    "--rl.completions-per-device": "local_rollout_forward_batch_size",
    "--rl.epochs": "ppo_epochs, or num_iterations of grpo",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedConfig(Translated):
    """With what is trained on what.

    `model` is a folder or an address; flags of the model are those of the language model itself. `rewards` are the name
    and the weight of each; `with_reference` says whether own completions are compared with the start weights. `resumed`
    is this run's folder if the file names it, or a checkpoint in it, to continue from.
    """

    algorithm: Algorithm
    model: str
    sources: tuple[TextSource, ...]
    rewards: tuple[tuple[str, float], ...] = ()
    with_reference: bool = False
    resumed: Path | None = None


def translate_config(
    config: JsonObject, algorithm: Algorithm, given: JsonObject | None = None, name: str | None = None
) -> TranslatedConfig:
    """Translate a YAML config for an algorithm.

    Args: `given` are values by key that replace the file's; `name` is the run's if neither has one.

    Reads the DeepSpeed file that it names. Raises UsageError for unknown keys (with the closest ones), invalid values,
    and values that contradict each other; NoSourcesError if it has no data for the algorithm.
    """
    file = YamlConfig(config, algorithm, given or {})
    if name is not None:
        file.values.setdefault(_NAME, name)
    file.note(f"this run is {algorithm}", "algorithm")
    deepspeed = translate_strategy(file)
    file.plain(_PLAIN)
    file.plain_own({"lr-schedule.peak-lr": "number learning_rate"})
    _batch(file, deepspeed)
    _schedule(file)
    with_reference = file.learns_from_rollouts and _rl(file, deepspeed)
    _length(file)
    _precision(file)
    _saving(file)
    _logging(file)
    _evaluation(file)
    _data(file)
    _objective(file)
    sources, model = text_sources(file), start_model(file)
    rewards = rewards_of(file) if file.learns_from_rollouts else ()
    resumed = _resume(file)
    file.leave_others()
    lines = file.lines()
    if model is None:
        raise UsageError(f"no model: give {MODEL_KEY}, a folder or a name on the hub")
    if not sources:
        raise NoSourcesError(algorithm)
    flags, lines = deepspeed.joined(file), (*lines, *deepspeed.lines)
    return TranslatedConfig(
        not_done=file.not_done(NOT_DONE),
        algorithm=algorithm,
        model=model,
        sources=sources,
        flags=flags,
        lines=lines,
        rewards=rewards,
        with_reference=with_reference,
        resumed=resumed,
    )


def _length(file: YamlConfig) -> None:
    epochs, steps = ("num_epochs", "num_train_epochs"), "max_steps"
    num_steps = file.number(steps)
    if num_steps is not None and num_steps > 0:
        if num_epochs := file.agreed(YamlConfig.count, *epochs):
            raise contradiction(f"{steps} is {num_steps} and num_epochs is {num_epochs}")
        file.spelled("num-train-steps", YamlConfig.steps, steps)
        return
    file.note("not above 0: the length is in epochs", steps)
    file.spelled("num-epochs", YamlConfig.count, *epochs)


def _batch(file: YamlConfig, deepspeed: BesideDeepSpeed) -> None:
    rows_keys, accum_key = ("per_device_train_batch_size", "dataloader.batch_size"), "gradient_accumulation_steps"
    if file.learns_from_rollouts:
        rows_keys += file.in_section("mini_batch_size")
    rows = file.spelled("micro-batch-size", YamlConfig.count, *rows_keys)
    accum = file.spelled("grad-accum", YamlConfig.count, accum_key)
    if (rows or accum) and not deepspeed.has_total:
        # Of one device: the number of devices is not known yet.
        rows, accum = rows or deepspeed.rows or DEFAULT_ROWS, accum or deepspeed.accum or 1
        file.flag("batch-size", rows * accum, *rows_keys, accum_key)
        file.flag("keep-effective-batch-size", False, *rows_keys, accum_key)


def _rl(file: YamlConfig, deepspeed: BesideDeepSpeed) -> bool:
    """The keys of ppo and grpo. Returns whether there is a reference."""
    rate = deepspeed.flags.get("lr-schedule.peak-lr")
    return rl_flags(
        file,
        rows=file.flags.get("batch-size") or deepspeed.batch or DEFAULT_ROWS,
        accum=file.flags.get("grad-accum") or deepspeed.accum or 1,
        of_all=deepspeed.has_total,
        rate=file.flags.get("lr-schedule.peak-lr") or (float(rate[1]) if rate else None),
    )


def _schedule(file: YamlConfig) -> None:
    kind = file.word("lr_scheduler_type", tuple(_SCHEDULES))
    steps, ratio = file.whole("warmup_steps"), file.number("warmup_ratio")
    if steps and ratio:
        raise contradiction(f"warmup_steps is {steps} and warmup_ratio is {ratio}")
    if kind == "constant" and (steps or ratio):
        raise UsageError(
            f"lr_scheduler_type constant has no warm-up, and {'warmup_steps' if steps else 'warmup_ratio'} is "
            f"{steps or ratio}: use constant_with_warmup, or remove it"
        )
    file.flag("lr-schedule.kind", None if kind is None else _SCHEDULES[kind], "lr_scheduler_type")
    if ratio:
        file.flag("lr-schedule.warmup-ratio", ratio, "warmup_ratio")
        file.note("warmup_ratio is used", "warmup_steps")
    else:
        file.flag("lr-schedule.warmup-steps", steps if ratio is None else steps or 0, "warmup_steps", "warmup_ratio")


def _precision(file: YamlConfig) -> None:
    mixed = file.word("mixed_precision", tuple(_DTYPES))
    switches = {name: file.boolean(name) for name in ("fp16", "bf16")}
    on = [name for name, value in switches.items() if value]
    if len(on) > 1:
        raise contradiction("fp16 is true and bf16 is true", "keep one of them")
    for name, value in switches.items():
        if mixed is not None and value is not None and value != (mixed == name):
            raise contradiction(f"mixed_precision is {mixed!r} and {name} is {str(value).lower()}")
    chosen = mixed or next(iter(on), "no")
    if mixed is not None or any(value is not None for value in switches.values()):
        file.flag("model.dtype", _DTYPES[chosen], "mixed_precision", *switches)


def _saving(file: YamlConfig) -> None:
    interval = file.spelled("save-interval", YamlConfig.steps, "save_steps")
    if interval is None and DEFAULT_SAVE % file.iteration_steps:
        file.flag("save-interval", file.whole_iterations(DEFAULT_SAVE))
    file.word("save_strategy", ("steps",))
    file.note("every save_steps, and at the end", "save_strategy")


def _logging(file: YamlConfig) -> None:
    asked, own = "report_to", "logging.tensorboard"
    value, tensorboard = file.values.get(asked), file.boolean(own)
    if value is not None:
        names = [value] if isinstance(value, str) else file.entries(asked)
        allowed = (*_WRITERS, "all", "none")
        for name in names:
            if name not in allowed:
                raise UsageError(f"{asked} has {name!r}; allowed: {', '.join(allowed)}")
        written = set(_WRITERS) if "all" in names else set(names) & set(_WRITERS)
        if tensorboard is not None and tensorboard != ("tensorboard" in written):
            raise contradiction(f"{asked} is {names} and {own} is {str(tensorboard).lower()}")
        tensorboard = "tensorboard" in written
        file.flag("wandb-enabled", "wandb" in written, asked)
    file.flag("tensorboard", tensorboard, asked, own)


def _evaluation(file: YamlConfig) -> None:
    strategies = ("eval_strategy", "evaluation_strategy")
    strategy = file.agreed(YamlConfig.word, *strategies, allowed=("steps", "no"))
    if strategy == "no":
        file.flag("eval.interval", 0, *strategies)
        file.note("eval_strategy is no", "eval_steps")
        return
    file.note("every eval_steps", *strategies)
    file.spelled("eval.interval", YamlConfig.count, "eval_steps")


def _data(file: YamlConfig) -> None:
    if file.learns_from_rollouts:
        return  # its prompts and completions have lengths of their own
    file.spelled("data.max-length", YamlConfig.count, "data.max_length", *file.own("max_length"))
    sides = file.own("truncation_side")
    side = file.agreed(YamlConfig.word, *sides, allowed=("left", "right"))
    kept = {None: None, "left": "keep_end", "right": "keep_start"}
    file.flag("data.truncation", kept[side], *sides)
    if file.algorithm == "sft":
        file.spelled("data.packing", YamlConfig.boolean, *file.own("packing"))


def _objective(file: YamlConfig) -> None:
    if file.algorithm == "dpo":
        file.spelled("objective.beta", YamlConfig.number, *file.own("beta"))
        kinds = ("sigmoid", "hinge", "ipo")
        file.spelled("objective.variant", YamlConfig.word, *file.own("loss_type"), allowed=kinds)
        file.spelled("objective.label-smoothing", YamlConfig.number, *file.own("label_smoothing"))
        free = file.own("reference_free")
        if file.agreed(YamlConfig.boolean, *free):
            raise UsageError(
                "reference_free is true: losses without a reference are --objective.variant simpo and orpo; remove it"
            )
        file.note("the reference is the start weights", *free)
    if file.algorithm == "rm":
        for name, only in (("loss_type", "ranking"), ("ranking_loss_type", "log_sigmoid")):
            keys = file.own(name)
            file.agreed(YamlConfig.word, *keys, allowed=(only,))
            file.note("-log sigmoid of the difference of rewards", *keys)
        for name, instead in (("margin", "margins are a column `margin` of the pairs"), ("label_smoothing", "none")):
            keys = file.own(name)
            if value := file.agreed(YamlConfig.number, *keys):
                raise UsageError(f"{name} is {value}; allowed: 0 ({instead})")
            file.note("0: no effect", *keys)
        freezes = file.own("freeze_base_model")
        if file.agreed(YamlConfig.boolean, *freezes):
            file.flag("freeze", "decoder/.*", *freezes)
        file.note("the score head trains", *freezes)


def _resume(file: YamlConfig) -> Path | None:
    """Continue the run itself from one of its checkpoints, or start a new run from the state of another one.

    Returns the run's folder if a path says that it is continued. Raises UsageError for another path in it.
    """
    key = "resume_from_checkpoint"
    value = file.values.get(key)
    if value in (None, False, ""):
        file.note("a new run", key)
        return None
    if value in (True, "true", "latest", "auto"):
        file.flag("resume", True, key)
        return None
    path, folders = file.text(key), _own_folders(file)
    if (point := own_checkpoint(path, folders)) is not None:
        if point == "latest":
            file.flag("resume", True, key)
        else:
            file.flag("resume-from", point, key)
        return folders[0]
    start = Path(path)
    if any(folder in Path(os.path.abspath(start.expanduser())).parents for folder in folders):
        raise UsageError(
            f"{key} is {path}, in this run's folder, and no checkpoint of it: give {folders[0]}/STEP, or best "
            "or latest in place of the step"
        )
    while start.name in ("latest", "checkpoints"):
        start = start.parent
    file.flag("weight-loader.params-path", str(start), key)
    file.flag("weight-loader.continue-training", True, key)
    return None


def _own_folders(file: YamlConfig) -> list[Path]:
    """The run's folder, as it is here and as the tool has it."""
    base, name = file.flags.get("checkpoint-base-dir", DEFAULT_OUTPUT), file.flags.get("exp-name")
    folders = (Path(base, file.algorithm, name), Path(base, name)) if name else ()
    return [Path(os.path.abspath(folder.expanduser())) for folder in folders]
