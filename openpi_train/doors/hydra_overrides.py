"""The Hydra command line of RoboTwin's diffusion policy (`policy/DP`), key by key as an experiment and its flags.

    --config-name robot_dp_14 task.dataset.zarr_path=data/six_tasks.zarr training.seed=0

Read next: `config_file.py`, `configs/robot_dp.py`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from openpi_train.doors.config_file import ConfigFile
from openpi_train.doors.torch_optimizer import translate_betas
from openpi_train.runtime.exits import UsageError

# The option that names a config.
_OPTION = ("--config-name", "-cn")
_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
# What --num-train-steps and --log-interval are with training.debug: two epochs of three steps.
_DEBUG_STEPS = 6
# Keys that can have one value only, and why.
_ONLY = {
    "n_latency_steps": (0, "--model.n-action-steps counts the actions that are executed"),
    "obs_as_global_cond": (True, "observations condition the whole chunk"),
    "policy.obs_as_global_cond": (True, "observations condition the whole chunk"),
    "past_action_visible": (False, "the policy sees no actions"),
    "policy.cond_predict_scale": (True, "the condition also scales"),
    "policy.noise_scheduler.variance_type": ("fixed_small", "the variance of DDPM's posterior"),
}
# Flags that are one key each: how it is read, and the key.
_PLAIN = {
    "exp-name": "text exp_name",
    "dataset": "text task.dataset.zarr_path",
    "data.validation-fraction": "number task.dataset.val_ratio",
    "seed": "number training.seed",
    "num-epochs": "count training.num_epochs",
    "grad-accum": "count training.gradient_accumulate_every",
    "lr-schedule.warmup-steps": "number training.lr_warmup_steps",
    "batch-size": "count dataloader.batch_size",
    "num-workers": "number dataloader.num_workers",
    "lr-schedule.peak-lr": "number optimizer.lr",
    "optimizer.weight-decay": "number optimizer.weight_decay",
    "optimizer.eps": "number optimizer.eps",
    "ema-warmup.power": "number ema.power",
    "ema-warmup.inv-gamma": "number ema.inv_gamma",
    "ema-warmup.update-after-step": "number ema.update_after_step",
    "ema-warmup.min-decay": "number ema.min_value",
    "ema-decay": "number ema.max_value",
    "model.action-horizon": "count horizon",
    "model.n-obs-steps": "count n_obs_steps",
    "model.n-action-steps": "count n_action_steps",
    "eval.num-sample-steps": "count policy.num_inference_steps",
    "objective.noise-schedule.num-train-timesteps": "count policy.noise_scheduler.num_train_timesteps",
    "objective.noise-schedule.beta-schedule": "text policy.noise_scheduler.beta_schedule",
    "objective.noise-schedule.prediction-type": "text policy.noise_scheduler.prediction_type",
    "objective.noise-schedule.beta-start": "number policy.noise_scheduler.beta_start",
    "objective.noise-schedule.beta-end": "number policy.noise_scheduler.beta_end",
    "objective.noise-schedule.clip-sample": "boolean policy.noise_scheduler.clip_sample",
    "model.diffusion-step-embed-dim": "count policy.diffusion_step_embed_dim",
    "model.unet.kernel-size": "count policy.kernel_size",
    "model.unet.num-groups": "count policy.n_groups",
    "model.share-encoder": "boolean policy.obs_encoder.share_rgb_model",
    "project-name": "text logging.project",
}
_NO_EFFECT = {
    "task.name": "a part of the run's name",
    "setting": "a part of the run's name",
    "expert_data_num": "a part of the run's name",
    "head_camera_type": "the store has the pictures at their size",
    "val_dataloader": "held-out rows are read like the others",
    "dataloader.shuffle": "rows are always in a random order",
    "dataloader.pin_memory": "jax copies batches to the devices by itself",
    "dataloader.persistent_workers": "workers live as long as the run",
    "training.checkpoint_every": "epochs there; here steps: --save-interval",
    "training.val_every": "epochs there; here steps: --eval.interval",
    "training.sample_every": "epochs there; here steps: --eval.interval",
    "training.rollout_every": "epochs there; here steps: --eval.closed-loop.interval",
    "training.max_val_steps": "--eval.num-rows counts the held-out rows",
    "training.tqdm_interval_sec": "a line every --log-interval steps",
    "hydra": "the run directory is <checkpoint_base_dir>/<experiment>/<exp_name>",
    "multi_run": "the run directory is <checkpoint_base_dir>/<experiment>/<exp_name>",
    "name": "the run is called --exp-name",
    "task_name": "the run is called --exp-name",
    "logging.name": "the run is called --exp-name",
    "logging.resume": "a run that goes on keeps its page",
    "logging.id": "a run that goes on keeps its page",
    "logging.group": "no such field",
    "logging.tags": "no such field",
    "checkpoint": "the newest (--keep-last) and the best of the held-out loss are kept",
    "dataset_obs_steps": "--model.n-obs-steps",
    "keypoint_visible_rate": "for observations of keypoints",
    "shape_meta": "shapes are those of the store",
    "task.shape_meta": "shapes are those of the store",
    "task.image_shape": "shapes are those of the store",
    "task.dataset.seed": "held-out episodes are chosen by their content: --data.validation-fraction",
    "policy.obs_encoder": "images: --objective.augmentation, --model.encoder-widths, --model.pooling",
}
# Keys that ask for what is not done, and what to give instead.
_EVALUATED = "--eval.interval STEPS"
_NOT_DONE = {
    "training.checkpoint_every": "--save-interval STEPS",
    "training.val_every": _EVALUATED,
    "training.sample_every": _EVALUATED,
    "training.rollout_every": "--eval.closed-loop.interval STEPS",
    "training.max_val_steps": "--eval.num-rows ROWS",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraCommand:
    """A translated command: the experiment, its flags, a line per key, and what is not done, and what to give
    instead.
    """

    experiment: str
    flags: tuple[str, ...]
    lines: tuple[str, ...]
    not_done: Mapping[str, str]

    def report(self) -> str:
        """Every key and its result, and the equivalent command."""
        same = f"the same as: python -m openpi_train {self.experiment} {' '.join(self.flags)}"
        batch = (
            "each GPU takes the batch size, as there, and the learning rate stays: --keep-effective-batch-size counts "
        )
        return "\n".join([*self.lines, f"{batch}the rows of all GPUs", same])


def translate(argv: Sequence[str]) -> tuple[HydraCommand, list[str]]:
    """The command, and the words that are flags of ours. Raises UsageError for a key that is not there."""
    name, rest = _config_name(list(argv))
    first_flag = next((index for index, word in enumerate(rest) if word.startswith("--")), len(rest))
    given = rest[first_flag:]
    file = ConfigFile(_nested(rest[:first_flag]), _NO_EFFECT, "RoboTwin's diffusion policy", None)
    keys = {flag: row.split()[1] for flag, row in _PLAIN.items()}
    absent = {flag: key for flag, key in keys.items() if file.values.get(key) is None}
    file.note("null: the experiment's own", *absent.values())
    file.plain({flag: row for flag, row in _PLAIN.items() if flag not in absent})
    translate_betas(file)
    _training(file)
    _widths(file)
    for key, (only, why) in _ONLY.items():
        file.only(key, only, why)
    _device(file)
    mode = file.text("logging.mode")
    file.note("Weights & Biases is off without --wandb-enabled", "logging.mode")
    if mode == "online":
        file.flag("wandb-enabled", True, "logging.mode")
    if file.boolean("training.resume", True):
        file.flag("resume", True, "training.resume")
    file.note("a new run", "training.resume")
    # As there, each GPU takes the batch size; one GPU is the same either way.
    file.flag("keep-effective-batch-size", False, "dataloader.batch_size")
    lines = file.lines()
    if "exp-name" not in file.flags:
        parts = [str(file.values[key]) for key in ("task.name", "setting", "expert_data_num") if key in file.values]
        file.flags["exp-name"] = f"{'-'.join(parts) or name}_seed{file.values.get('training.seed', 0)}"
    flags = tuple(word for flag in file.words for word in flag)
    return HydraCommand(experiment=name, flags=flags, lines=lines, not_done=file.not_done(_NOT_DONE)), given


def _config_name(argv: list[str]) -> tuple[str, list[str]]:
    """The config's name without its ending, and the words besides; Hydra takes it at any place."""
    place = next(index for index, word in enumerate(argv) if word.partition("=")[0] in _OPTION)
    _, equals, name = argv[place].partition("=")
    name = name if equals else "".join(argv[place + 1 : place + 2])
    if not name:
        raise UsageError("--config-name needs a name: robot_dp_10, robot_dp_14, robot_dp_16, or robot_dp for any")
    return name.removesuffix(".yaml"), [*argv[:place], *argv[place + (1 if equals else 2) :]]


def _nested(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Overrides by dotted key, their values read as YAML, as Hydra does. Raises UsageError for other words."""
    found: dict[str, Any] = {}
    for word in overrides:
        key, equals, value = word.partition("=")
        key = key.lstrip("+")
        if not equals or not key:
            raise UsageError(f"{word} is no override: after --config-name NAME come KEY=VALUE, then flags of ours")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"{key}: {value} is not YAML ({error})") from error
        if isinstance(found[key], str) and _SCIENTIFIC.fullmatch(found[key]):
            found[key] = float(value)  # 1e-4 is a word in YAML 1.1, and a number for Hydra
    return found


def _training(file: ConfigFile) -> None:
    """Keys of `training` that are several flags, or none. Raises UsageError for values that have no counterpart."""
    kind, warms_up = "training.lr_scheduler", "training.lr_warmup_steps"
    name = file.text(kind)
    if name is not None and name not in _SCHEDULES:
        raise UsageError(f"{kind} is {name}; allowed: {', '.join(_SCHEDULES)}")
    file.flag("lr-schedule.kind", None if name is None else _SCHEDULES[name], kind)
    if name == "constant":  # without a warm-up, whatever its steps
        file.flag("lr-schedule.warmup-steps", 0, kind, warms_up)
    averages, freezes, debug = "training.use_ema", "training.freeze_encoder", "training.debug"
    if file.boolean(averages, True) is False:
        file.flag("ema-decay", "None", averages)
        for flag in [flag for flag in file.flags if flag.startswith("ema-warmup.")]:
            del file.flags[flag]
        file.flag("ema-warmup.power", "None", averages)
    file.note("an average is kept", averages)
    if file.boolean(freezes, False):
        file.flag("freeze", "encoders/.*", freezes)
    file.note("the image encoder trains", freezes)
    if file.boolean(debug, False):
        file.flags.pop("num-epochs", None)
        file.flag("num-train-steps", _DEBUG_STEPS, debug)
        file.flag("log-interval", 1, debug)
    file.note("a whole run", debug)
    if (steps := file.number("training.max_train_steps")) is not None:
        raise UsageError(f"training.max_train_steps is {steps}, of an epoch: --num-train-steps sets those of the run")
    file.note("whole epochs", "training.max_train_steps")


def _widths(file: ConfigFile) -> None:
    key = "policy.down_dims"
    widths = file.values.get(key)
    file.expect(key)
    if widths is None:
        file.note("null: the experiment's own", key)
    else:
        if not isinstance(widths, list) or not all(type(width) is int and width > 0 for width in widths):
            raise UsageError(f"{key} is {widths}; it must be a list of whole numbers")
        file.flag("model.unet.widths", tuple(widths), key)


def _device(file: ConfigFile) -> None:
    """Where the run is. Raises UsageError for another kind of device."""
    key = "training.device"
    device = file.text(key)
    if device is None:
        return
    kind, _, number = device.partition(":")
    if kind == "cpu":
        file.note("JAX_PLATFORMS=cpu", key)
    elif kind != "cuda" or not (number.isdecimal() or not number):
        raise UsageError(f"{key} is {device}; allowed: cuda:NUMBER, cuda or cpu")
    else:  # whatever its number: the tool counts the GPUs, and starts a process on each
        file.note("every visible GPU takes part, as there; CUDA_VISIBLE_DEVICES chooses", key)
