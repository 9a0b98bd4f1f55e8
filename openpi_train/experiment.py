"""`Experiment`: the one frozen dataclass that is a run, and the checks across its fields.

Field names are openpi's (`TrainConfig` at 15a9616) where openpi has the field, so its command lines paste over.
Read next: `registry.py` (where experiments come from), `training/run.py` (what becomes of one).
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from openpi_train.data.base import Data, OpenedData, OpeningRequest
from openpi_train.data.config import DataConfig
from openpi_train.evaluation.base import Evaluations
from openpi_train.evaluation.robot import EvalConfig
from openpi_train.fields import at_least, too_small
from openpi_train.interop.weights import CheckpointWeightLoader, WeightLoader
from openpi_train.models.base import ModelConfig, PolicyConfig, as_policy
from openpi_train.objectives.base import Objective
from openpi_train.optim import AdamW, EmaWarmup, LossScaling, LRSchedule, OptimizerConfig
from openpi_train.runtime.exits import DataError, IndivisibleError, UsageError, reported_as
from openpi_train.runtime.waiting import Timeouts
from openpi_train.sharding.mesh import does_not_divide
from openpi_train.sharding.strategy import ShardingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCheckpoints:
    """More frequent checkpoints on a fast disk in each host; those of the run directory are copied from there."""

    # A directory on a disk of each host's own, the same path on all; None saves in the run directory alone.
    dir: str | None = None
    # Steps between them.
    interval: int = at_least(1, 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A run. Every field is a flag: `--batch-size 64`, `--model.action-horizon 16`, `--data.datasets.0.source.path`."""

    # Set by the registry: the name in configs/.
    name: Annotated[str, tyro.conf.Suppress] = ""
    # The run's name (required): its directory is <checkpoint_base_dir>/<experiment>/<exp_name>.
    exp_name: str = ""

    # Which model, and its sizes.
    model: ModelConfig
    # What is minimised.
    objective: Objective
    # What it is trained on.
    data: Data
    # Where the first parameters come from.
    weight_loader: WeightLoader = dataclasses.field(default_factory=CheckpointWeightLoader)
    # The learning rate, by optimizer step.
    lr_schedule: LRSchedule = dataclasses.field(default_factory=LRSchedule)
    # How gradients become updates.
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamW)
    # The scale of the loss, where the model computes in float16.
    loss_scaling: LossScaling = dataclasses.field(default_factory=LossScaling)
    # Decay of the exponential moving average of the trainable parameters; None keeps none.
    ema_decay: float | None = 0.99
    # How that decay is reached.
    ema_warmup: EmaWarmup = dataclasses.field(default_factory=EmaWarmup)
    # What to keep fixed, beside what the model keeps fixed itself (LoRA): a regex of parameter paths, or a name of the
    # model's own: `vision`, `language`, or `backbone`, which is both and leaves the action expert to train.
    freeze: str | None = None

    # Of initial parameters, row order, noise, times and augmentation.
    seed: int = 42
    # Rows per optimizer step, over all devices.
    batch_size: int = at_least(1, 32)
    # Micro-batches per optimizer step: less memory, same result.
    grad_accum: int = at_least(1, 1)
    # Rows on one device at a time: a grad_accum of 1 then follows from it, another must agree. None: as it comes.
    micro_batch_size: int | None = at_least(1, None)
    # If not, batch_size is meant for each device, so that the effective one grows with their number.
    keep_effective_batch_size: bool = True
    # Where a run continues on other devices, fit grad_accum and fsdp_devices to them: same rows, same memory on each.
    elastic: bool = True
    # How the learning rate goes with the effective batch size, against reference_batch_size.
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    # The batch that lr_schedule was made for.
    reference_batch_size: int | None = at_least(1, None)
    # Optimizer steps of the whole run.
    num_train_steps: int = at_least(1, 30_000)
    # Passes over the training samples in place of num_train_steps, which follows from it; None: as many as those make.
    num_epochs: int | None = at_least(1, None)
    # Data worker processes per training process; 0 reads in threads, auto begins there and adds what is waited for.
    num_workers: int | Literal["auto"] = at_least(0, "auto")

    # Devices that share one copy of the state, the rest are replicas; None: as many as the strategy asks for.
    fsdp_devices: int | None = at_least(1, None)
    # What is cut over the devices that share one copy.
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)

    # Steps between lines of metrics.jsonl.
    log_interval: int = at_least(1, 100)
    # Steps to write a profiler trace of, shortly after the start, into the run directory; 0 writes none.
    profile: int = at_least(0, 0)
    # Steps between checkpoints.
    save_interval: int = at_least(1, 1_000)
    # Checkpoints at multiples of this step are kept for good; None keeps only the newest and the best.
    keep_period: int | None = at_least(1, 5_000)
    # How many of the newest checkpoints are kept.
    keep_last: int = at_least(1, 2)
    # Checkpoints on a disk in each host, too.
    local_checkpoints: LocalCheckpoints = dataclasses.field(default_factory=LocalCheckpoints)
    # Held-out evaluation during training.
    eval: Evaluations = dataclasses.field(default_factory=EvalConfig)
    # What to do with a NaN or Inf update (it is never applied): stop the run with exit code 5, or go on.
    on_nan: Literal["stop", "skip"] = "stop"

    # Continue the run of this name from its newest good checkpoint.
    resume: bool = False
    # Move an existing run of this name aside and start anew.
    overwrite: bool = False
    # Also log to Weights & Biases (offline without an API key).
    wandb_enabled: bool = False
    # Also write TensorBoard event files.
    tensorboard: bool = True
    # Also write logs.json.txt, with diffusion_policy's names.
    logs_json: bool = False
    # How long the processes of the run wait for each other.
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts)
    # The project at Weights & Biases.
    project_name: str = "openpi"
    # Run directories lie below it; shared by all hosts.
    checkpoint_base_dir: str = "./checkpoints"
    # Norm stats lie below it; shared by all hosts.
    assets_base_dir: str = "./assets"

    @property
    def assets_dir(self) -> Path:
        """Where the norm stats of this experiment's datasets lie."""
        return Path(self.assets_base_dir) / self.name

    def open_data(self) -> OpenedData:
        """The run's data, open. Raises DataError with what to do."""
        request = OpeningRequest(
            model=self.model,
            seed=self.seed,
            batch_size=self.batch_size,
            draws_per_row=self.objective.draws_per_row,
            assets_dir=self.assets_dir,
            prompts=self.eval.prompts(),
        )
        with reported_as(DataError):
            return self.data.open(request)

    @property
    def demonstrations(self) -> DataConfig:
        """`data`, for what is done with robots' demonstrations alone. Raises UsageError where it is of another kind."""
        if not isinstance(self.data, DataConfig):
            raise UsageError(
                f"{self.name}: this is for robots' demonstrations; its data are {type(self.data).__name__}"
            )
        return self.data

    @property
    def policy(self) -> PolicyConfig:
        """`model`, for what is done with robot policies alone. Raises UsageError where it is of another kind."""
        return as_policy(self.model)

    @property
    def robot_eval(self) -> EvalConfig:
        """`eval`, for what is done with robot policies alone. Raises UsageError where it is of another kind."""
        if not isinstance(self.eval, EvalConfig):
            raise UsageError(f"{self.name}: this is for robot policies; its evaluation is {type(self.eval).__name__}")
        return self.eval

    def is_frozen(self, path: str) -> bool:
        """Whether training leaves the parameter alone."""
        return self.model.frozen(path) or self.freezes(path)

    def freezes(self, path: str) -> bool:
        """Whether `freeze` matches the whole of our path, or of the published name; or names a group with the path."""
        if self.freeze is None:
            return False
        pattern = self.model.parameter_groups.get(self.freeze, self.freeze)
        return any(re.fullmatch(pattern, name) for name in (path, self.model.public_name(path)))

    def check(self, num_devices: int) -> None:
        """Raise UsageError with every conflict between the fields at once, each with the flag to change."""
        # Where a number is out of range, the others cannot be divided by it.
        wrong_numbers = too_small(self)
        indivisible = [] if wrong_numbers else self._check_batch_size(num_devices)
        problems = wrong_numbers or [*self._check_devices(num_devices), *indivisible]
        problems += [*self.lr_schedule.check(self.num_train_steps), *self.optimizer.check(), *self.loss_scaling.check()]
        problems += [*self._check_flags(), *self.data.check(), *self.eval.check()]
        problems += self.model.check_objective(type(self.objective).__name__, self.objective.needs)
        if problems:
            kind = IndivisibleError if problems == indivisible else UsageError
            raise kind("\n".join(problems))

    @property
    def numbers_are_in_range(self) -> bool:
        """Whether every number is one that its field can have."""
        return not too_small(self)

    def _check_devices(self, num_devices: int) -> list[str]:
        tensor_devices = self.sharding.tensor_devices
        problems = self.model.check_tensor(tensor_devices)
        if problem := does_not_divide(num_devices, tensor_devices, self.fsdp_devices or 1):
            problems.append(problem)
        return problems

    def _check_batch_size(self, num_devices: int) -> list[str]:
        """What keeps the batch from being shared by so many devices."""
        tensor_devices = self.sharding.tensor_devices
        # Devices of a tensor group hold the same rows: for them they are one.
        of_them = "devices" if tensor_devices == 1 else f"groups of {tensor_devices} devices"
        num_devices = max(num_devices // tensor_devices, 1)
        unit = num_devices * self.grad_accum
        if self.batch_size < 1 or self.batch_size % unit:
            below, above = self.batch_size // unit * unit, math.ceil(max(self.batch_size, 1) / unit) * unit
            choice = f"{below} or {above}" if below else f"{above}"
            times = f" x --grad-accum {self.grad_accum}" if self.grad_accum > 1 else ""
            return [
                f"--batch-size {self.batch_size} is not a multiple of the {num_devices} {of_them}{times}; try {choice}"
            ]
        if self.micro_batch_size is not None and self.micro_batch_size * unit != self.batch_size:
            return [
                f"--micro-batch-size {self.micro_batch_size} x {num_devices} {of_them} x "
                f"--grad-accum {self.grad_accum} is {self.micro_batch_size * unit} rows, not "
                f"--batch-size {self.batch_size}; change one of them"
            ]
        return []

    def _check_flags(self) -> list[str]:
        problems = []
        if not self.exp_name:
            problems.append("--exp-name NAME is missing: the run's directory is named after it")
        if (self.lr_scaling == "none") != (self.reference_batch_size is None):
            problems.append(
                f"--lr-scaling {self.lr_scaling} with --reference-batch-size {self.reference_batch_size}: "
                "give both, the second being the batch that the learning rate was made for, or neither"
            )
        local = self.local_checkpoints.dir
        if local is not None and not Path(local).is_absolute():
            problems.append(
                f"--local-checkpoints.dir {local!r} must be an absolute path on a disk of each host's own, such as "
                "/local/checkpoints"
            )
        elif local is not None and _are_nested(Path(local), Path(self.checkpoint_base_dir).absolute()):
            problems.append(
                f"--local-checkpoints.dir {local!r} and --checkpoint-base-dir {self.checkpoint_base_dir!r} lie in each "
                "other: the first is for a disk of each host's own, the second for one that all hosts share"
            )
        if self.resume and self.overwrite:
            problems.append("--resume and --overwrite exclude each other: continue the run, or move it aside?")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            problems.append(f"--ema-decay {self.ema_decay} must lie in [0, 1); None keeps no average")
        problems += self.ema_warmup.check(self.ema_decay)
        if self.sharding.strategy == "replicated" and (self.fsdp_devices or 1) > 1:
            problems.append(
                f"--sharding.strategy replicated cuts nothing over --fsdp-devices {self.fsdp_devices}: give zero1, "
                "zero2, zero3 or hsdp, or leave --fsdp-devices out"
            )
        if self.ema_decay is None and self.sharding.offload == "optimizer+ema":
            problems.append(
                "--sharding.offload optimizer+ema with --ema-decay None: there is no average; use optimizer"
            )
        if self.freeze is not None:
            try:
                re.compile(self.freeze)
            except re.error as error:
                problems.append(f"--freeze {self.freeze!r} is no regular expression: {error}")
        return problems


def of_one_length(experiment: Experiment, argv: Sequence[str]) -> Experiment:
    """The experiment without its `num_epochs` where the command line has steps. Raises UsageError where it has both."""
    flags = {word.split("=", 1)[0].replace("_", "-") for word in argv}
    if flags >= {"--num-train-steps", "--num-epochs"}:
        raise UsageError("--num-train-steps and --num-epochs both say how long the run is: give one of them")
    return dataclasses.replace(experiment, num_epochs=None) if "--num-train-steps" in flags else experiment


def _are_nested(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)
