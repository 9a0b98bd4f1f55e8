"""The Hydra command line of RoboTwin's diffusion policy (`policy/DP`), key by key as an experiment and its flags.

    --config-name robot_dp_14 task.dataset.zarr_path=data/six_tasks.zarr training.seed=0

Read next: `config_file.py`, `configs/robot_dp.py`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from openpi_train.interop.config_file import ConfigFile, words
from openpi_train.runtime.exits import UsageError

_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_READ = {"count": ConfigFile.count, "number": ConfigFile.number, "text": ConfigFile.text}
# Keys that are one flag: how they are read, and the flag.
_FLAGS = {
    "exp_name": ("text", "exp-name"),
    "task.dataset.zarr_path": ("text", "dataset"),
    "task.dataset.val_ratio": ("number", "data.validation-fraction"),
    "training.seed": ("number", "seed"),
    "training.num_epochs": ("count", "num-epochs"),
    "training.gradient_accumulate_every": ("count", "grad-accum"),
    "training.lr_warmup_steps": ("number", "lr-schedule.warmup-steps"),
    "dataloader.batch_size": ("count", "batch-size"),
    "dataloader.num_workers": ("number", "num-workers"),
    "optimizer.lr": ("number", "lr-schedule.peak-lr"),
    "optimizer.weight_decay": ("number", "optimizer.weight-decay"),
    "optimizer.eps": ("number", "optimizer.eps"),
    "ema.power": ("number", "ema-warmup.power"),
    "ema.max_value": ("number", "ema-decay"),
    "horizon": ("count", "model.action-horizon"),
    "n_obs_steps": ("count", "model.n-obs-steps"),
    "n_action_steps": ("count", "model.n-action-steps"),
    "policy.num_inference_steps": ("count", "eval.num-sample-steps"),
    "policy.noise_scheduler.num_train_timesteps": ("count", "objective.noise-schedule.num-train-timesteps"),
    "policy.noise_scheduler.beta_schedule": ("text", "objective.noise-schedule.beta-schedule"),
    "policy.noise_scheduler.prediction_type": ("text", "objective.noise-schedule.prediction-type"),
    "logging.project": ("text", "project-name"),
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
    "training.use_ema": "an average is always kept; --ema-decay None keeps none",
    "training.checkpoint_every": "epochs there; here steps: --save-interval",
    "training.val_every": "epochs there; here steps: --eval.interval",
    "training.sample_every": "epochs there; here steps: --eval.interval",
    "training.debug": "--num-train-steps 4 --log-interval 1 is a short run",
    "hydra": "the run directory is <checkpoint_base_dir>/<experiment>/<exp_name>",
    "logging.name": "the run is called --exp-name",
    "logging.tags": "no such field",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraCommand:
    """A translated command: the experiment, its flags, a line per key, and the number of its GPU; None: all."""

    experiment: str
    flags: tuple[str, ...]
    lines: tuple[str, ...]
    gpu: str | None

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
    for key, (kind, flag) in _FLAGS.items():
        if file.values.get(key) is not None:
            file.becomes(key, flag, _READ[kind])
    file.note("null: the experiment's own", *(key for key in _FLAGS if file.values.get(key) is None))
    _betas(file)
    gpu = _device(file)
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
    flags = tuple(word for flag, value in file.flags.items() for word in words(flag, value))
    return HydraCommand(experiment=name, flags=flags, lines=lines, gpu=gpu), given


def _config_name(argv: list[str]) -> tuple[str, list[str]]:
    """The config's name without its ending, and the words behind it."""
    _, equals, name = argv[0].partition("=")
    rest = argv[1:] if equals else argv[2:]
    name = name if equals else "".join(argv[1:2])
    if not name:
        raise UsageError("--config-name needs a name: robot_dp_10, robot_dp_14, robot_dp_16, or robot_dp for any")
    return name.removesuffix(".yaml"), rest


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


def _betas(file: ConfigFile) -> None:
    key = "optimizer.betas"
    if file.values.get(key) is not None:
        b1, b2 = file.pair(key, (0.95, 0.999))
        file.flag("optimizer.b1", b1, key)
        file.flag("optimizer.b2", b2, key)


def _device(file: ConfigFile) -> str | None:
    """The number of the GPU in `training.device`."""
    key = "training.device"
    device = file.text(key)
    if device is None:
        return None
    kind, _, number = device.partition(":")
    if kind == "cpu":
        file.note("JAX_PLATFORMS=cpu", key)
        return None
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise UsageError(f"{key} is {device}; allowed: cuda:NUMBER, cuda or cpu")
    file.note(f"CUDA_VISIBLE_DEVICES={number}, unless it is set" if number else "every GPU that is visible", key)
    return number or None
