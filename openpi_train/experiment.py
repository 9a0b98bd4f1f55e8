"""`Experiment`: the frozen dataclass that configures a run, and the checks across its fields.

Fields that openpi also has keep openpi's names (`TrainConfig` at 15a9616), so its command lines work unchanged.
Read next: `registry.py` (where experiments come from), `training/run.py` (how one is run).
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from openpi_train.checkpoints.weights import CheckpointWeightLoader, WeightLoader
from openpi_train.data.core.interface import Data, OpenedData, OpeningRequest
from openpi_train.data.robot.config import DataConfig
from openpi_train.evaluation.eval_config import EvalConfig
from openpi_train.evaluation.measure import Evaluations
from openpi_train.fields import at_least, setting, too_small
from openpi_train.generation.generation_size import GenerationSize
from openpi_train.models.model_config import ModelConfig, PolicyConfig, as_policy
from openpi_train.objectives.objective import Objective
from openpi_train.optim import AdamW, EmaWarmup, LossScaling, LRSchedule, OptimizerConfig
from openpi_train.parallel.mesh import does_not_divide
from openpi_train.parallel.strategy import ShardingConfig
from openpi_train.rl.rollouts import RLConfig
from openpi_train.runtime.exits import DataError, IndivisibleError, UsageError, reported_as
from openpi_train.runtime.waiting import Timeouts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCheckpoints:
    """More frequent checkpoints on a fast local disk of each host; those of the run directory are copied from there."""

    # A directory on each host's local disk, the same path on all hosts; None saves in the run directory only.
    dir: str | None = None
    # Steps between them.
    interval: int = at_least(1, 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """The configuration of a run. Every field is a flag, such as `--batch-size 64` or `--model.action-horizon 16`."""

    # Set by the registry: the name in configs/.
    name: Annotated[str, tyro.conf.Suppress] = ""
    # The run's name (required): its directory is <checkpoint_base_dir>/<experiment>/<exp_name>.
    exp_name: str = setting("", on_resume="accept")

    # The model and its sizes.
    model: ModelConfig = setting(on_resume="refuse")
    # The loss.
    objective: Objective
    # The training data.
    data: Data
    # How the run makes rollouts and learns from them; None: it learns from the data.
    rl: Annotated[RLConfig | None, tyro.conf.AvoidSubcommands] = None
    # Start weights.
    weight_loader: WeightLoader = setting(default_factory=CheckpointWeightLoader, on_resume="accept")
    # The learning rate, by optimizer step.
    lr_schedule: LRSchedule = dataclasses.field(default_factory=LRSchedule)
    # The optimizer.
    optimizer: OptimizerConfig = setting(default_factory=AdamW, on_resume="refuse_class")
    # The scale of the loss, if the model computes in float16.
    loss_scaling: LossScaling = setting(default_factory=LossScaling, on_resume="accept")
    # Decay of the exponential moving average of the trainable parameters; None keeps no average.
    ema_decay: float | None = setting(0.99, on_resume="refuse_switch")
    # How the decay grows to that value at the start.
    ema_warmup: EmaWarmup = dataclasses.field(default_factory=EmaWarmup)
    # Frozen parameters, in addition to those that the model itself freezes (LoRA's base weights): a regex of
    # parameter paths, or the name of a group: `vision`, `language`, or `backbone` (both).
    freeze: str | None = setting(None, on_resume="refuse")

    # Seed of initial parameters, row order, noise, times and augmentation.
    seed: int = 42
    # Rows per optimizer step, over all devices.
    batch_size: int = at_least(1, 32)
    # Micro-batches per optimizer step: less memory, same result.
    grad_accum: int = at_least(1, 1, on_resume="accept")
    # Rows of one micro-batch on one device. Sets grad_accum; if grad_accum is also given, both must agree.
    micro_batch_size: int | None = at_least(1, None, on_resume="accept")
    # False: batch_size counts the rows of one device, and rl.num_groups its groups; with the number of devices
    # the effective batch size grows, and so does an iteration of RL.
    keep_effective_batch_size: bool = True
    # Adapt grad_accum and fsdp_devices when a run continues on another number of devices, keeping the rows per step and
    # the memory per device.
    elastic: bool = True
    # How the learning rate scales with the effective batch size, relative to reference_batch_size.
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    # The batch size that lr_schedule was chosen for.
    reference_batch_size: int | None = at_least(1, None)
    # Optimizer steps of the whole run.
    num_train_steps: int = at_least(1, 30_000, on_resume="accept")
    # Length of the run as passes over the training samples, instead of num_train_steps; None: num_train_steps is used.
    num_epochs: int | None = at_least(1, None)
    # Data worker processes per training process; 0 reads in threads. auto begins with 0 and adds workers while training
    # waits for data.
    num_workers: int | Literal["auto"] = at_least(0, "auto", on_resume="accept")

    # Devices that share one copy of the state; other groups hold replicas. None: chosen by the strategy.
    fsdp_devices: int | None = at_least(1, None, on_resume="accept")
    # Sharding strategy, tensor parallelism and offload.
    sharding: ShardingConfig = setting(default_factory=ShardingConfig, on_resume="accept")
    # Compile a step's layers one after the other instead of a loop over them: GPUs copy less between layers, and
    # compiling takes two to four times as long. auto: on GPUs, without tensor groups.
    unroll_layers: bool | Literal["auto"] = setting("auto", on_resume="accept")

    # Steps between lines of metrics.jsonl.
    log_interval: int = at_least(1, 100, on_resume="accept")
    # Number of steps to trace shortly after the start, into the run directory; 0: no trace.
    profile: int = at_least(0, 0, on_resume="accept")
    # Steps between checkpoints.
    save_interval: int = at_least(1, 1_000, on_resume="accept")
    # Checkpoints at multiples of this step are kept permanently; None keeps only the newest and the best.
    keep_period: int | None = at_least(1, 5_000, on_resume="accept")
    # Also save after an evaluation whose held-out loss is the lowest so far.
    save_best: bool = setting(False, on_resume="accept")
    # Number of newest checkpoints to keep.
    keep_last: int = at_least(1, 2, on_resume="accept")
    # Additional checkpoints on a local disk of each host.
    local_checkpoints: LocalCheckpoints = setting(default_factory=LocalCheckpoints, on_resume="accept")
    # Held-out evaluation during training.
    eval: Evaluations = setting(default_factory=EvalConfig, on_resume="accept")
    # What to do on a NaN or Inf update (it is never applied): stop the run with exit code 5, or skip the update.
    on_nan: Literal["stop", "skip"] = setting("stop", on_resume="accept")

    # Continue the run of this name from its newest good checkpoint.
    resume: bool = setting(False, on_resume="accept")
    # Continue the run of this name from this checkpoint: a step, `best` or `latest`; later ones are set aside. Or start
    # it from the training state of another run: the path of that run, or of a checkpoint in it. Includes --resume.
    resume_from: str | None = setting(None, on_resume="accept")
    # Move an existing run of this name aside and start a new one.
    overwrite: bool = setting(False, on_resume="accept")
    # Also log to Weights & Biases (offline without an API key).
    wandb_enabled: bool = setting(False, on_resume="accept")
    # Also write TensorBoard event files.
    tensorboard: bool = setting(True, on_resume="accept")
    # Also write logs.json.txt, with diffusion_policy's names.
    logs_json: bool = setting(False, on_resume="accept")
    # How long the processes of the run wait for each other.
    timeouts: Timeouts = setting(default_factory=Timeouts, on_resume="accept")
    # The project at Weights & Biases.
    project_name: str = setting("openpi", on_resume="accept")
    # Parent of the run directories; shared by all hosts.
    checkpoint_base_dir: str = setting("./checkpoints", on_resume="accept")
    # Parent of the norm stats; shared by all hosts.
    assets_base_dir: str = setting("./assets", on_resume="accept")

    def __post_init__(self) -> None:
        if self.resume_from is not None:
            object.__setattr__(self, "resume", True)

    @property
    def run_dir(self) -> Path:
        """The run's directory, absolute."""
        return Path(self.checkpoint_base_dir).absolute() / self.name / self.exp_name

    @property
    def assets_dir(self) -> Path:
        """The folder of the norm stats of this experiment's datasets."""
        return Path(self.assets_base_dir) / self.name

    def open_data(self) -> OpenedData:
        """Open the run's data. Raises DataError with what to do."""
        with reported_as(DataError):
            return self.data.open(self._opening_request())

    def data_are_ready(self) -> bool:
        """Whether `open_data` would write nothing and read nothing at length."""
        try:
            return self.data.is_ready(self._opening_request())
        except (DataError, UsageError, ValueError, OSError):
            return False  # `examine` says why

    def _opening_request(self) -> OpeningRequest:
        return OpeningRequest(
            model=self.model,
            seed=self.seed,
            batch_size=self.batch_size,
            draws_per_row=self.objective.draws_per_row,
            uses_margins=self.objective.uses_margins,
            assets_dir=self.assets_dir,
            prompts=self.eval.prompts(),
        )

    @property
    def demonstrations(self) -> DataConfig:
        """`data`, for code that needs robot demonstrations. Raises UsageError if it is of another kind."""
        if not isinstance(self.data, DataConfig):
            raise UsageError(
                f"{self.name}: this is for robots' demonstrations; its data are {type(self.data).__name__}"
            )
        return self.data

    @property
    def policy(self) -> PolicyConfig:
        """`model`, for code that needs a robot policy. Raises UsageError if it is of another kind."""
        return as_policy(self.model)

    @property
    def robot_eval(self) -> EvalConfig:
        """`eval`, for code that needs a robot policy. Raises UsageError if it is of another kind."""
        if not isinstance(self.eval, EvalConfig):
            raise UsageError(f"{self.name}: this is for robot policies; its evaluation is {type(self.eval).__name__}")
        return self.eval

    def is_frozen(self, path: str) -> bool:
        """Whether the parameter is frozen."""
        return self.model.param_rules.frozen(path) or self.freezes(path)

    def freezes(self, path: str) -> bool:
        """Whether `freeze` fully matches our path or the published name, or names a group that contains the path."""
        if self.freeze is None:
            return False
        pattern = self.model.param_rules.groups.get(self.freeze, self.freeze)
        return any(re.fullmatch(pattern, name) for name in (path, self.model.param_rules.public_name(path)))

    def check(self, num_devices: int | None) -> None:
        """Raise one UsageError with all conflicts between the fields, each with the flag to change.

        `num_devices` None: it is not known, and nothing is divided by it.
        """
        # If a number is out of range, the others cannot be divided by it.
        wrong_numbers = too_small(self)
        indivisible = [] if wrong_numbers or num_devices is None else self._check_batch_size(num_devices)
        problems = wrong_numbers or [*self._check_devices(num_devices), *indivisible]
        problems += [*self._check_training(), *self.objective.check()]
        problems += [*self._check_flags(), *self.data.check(), *self.eval.check()]
        objective = type(self.objective)
        problems += self.model.check_objective(objective.__name__, self.objective.needed)
        problems += self._check_prefix()
        problems += self.data.check_objective(objective.__name__, objective.text_kinds)
        problems += self._check_reference()
        problems += self._check_label()
        problems += [] if wrong_numbers else self._check_rl()
        if problems:
            kind = IndivisibleError if problems == indivisible else UsageError
            raise kind("\n".join(problems))

    def check_values(self) -> None:
        """Raise one UsageError with what `check` finds without data, model and devices."""
        if problems := [*(too_small(self) or self._check_training()), *self._check_flags()]:
            raise UsageError("\n".join(problems))

    def _check_training(self) -> list[str]:
        """Conflicts in schedule, optimizer and loss scaling."""
        problems = [*self.optimizer.check(), *self.loss_scaling.check()]
        if self.num_epochs is None:  # else the length in steps is known when the data are open
            problems += self.lr_schedule.check(self.num_train_steps)
        return problems

    @property
    def numbers_are_in_range(self) -> bool:
        """Whether every number is in the range of its field."""
        return not too_small(self)

    def remat_choices(self) -> dict[str | None, "Experiment"]:
        """The run under every rematerialisation policy that the flags leave open, by name, least recomputation first.

        Unrolled layers in tensor groups have no `full`. There the gradients of wide weights, which differ within a
        group, cannot hold up that of the layer's input, which does not (`parallel/layers.py: _together`): XLA puts them
        off, and keeps what they read of all layers.
        """
        keeps = self.sharding.tensor_devices > 1 and self.unroll_layers is True
        model = self.model
        return {
            name: dataclasses.replace(self, model=model.with_compute(remat=name))
            for name in model.compute.remat_choices
            if not (keeps and name == "full")
        }

    def _check_devices(self, num_devices: int | None) -> list[str]:
        tensor_devices = self.sharding.tensor_devices
        problems = self.model.compute.check_tensor(tensor_devices)
        if not self.remat_choices():
            problems.append(
                f"--unroll-layers True with --sharding.tensor-devices {tensor_devices} and remat full: XLA would keep "
                "of every layer what it should compute again. Leave --unroll-layers at auto (a loop there), or take "
                "another --model.remat"
            )
        if num_devices is not None:
            problem = does_not_divide(num_devices, tensor_devices, self.fsdp_devices or 1)
            problems += [problem] if problem else []
        return problems

    def _check_batch_size(self, num_devices: int) -> list[str]:
        """Why the batch cannot be divided over `num_devices` devices."""
        tensor_devices = self.sharding.tensor_devices
        # Devices of a tensor group hold the same rows, so a group counts as one.
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

    def _check_prefix(self) -> list[str]:
        """Why the model cannot learn to continue prefixes of the objective's length."""
        longest = self.objective.longest_prefix
        if not longest:
            return []
        flag = f"--objective.max-delay {longest}"
        if "action_times" not in self.model.provides:
            return [
                f"{flag} needs a flow time for each action, and {type(self.model).__name__} has one for the chunk: "
                "leave it out (guided real-time chunking needs no training), or train pi0, pi0.5 or SmolVLA"
            ]
        horizon = self.policy.rows.window.horizon
        return [] if longest < horizon else [f"{flag} must be less than the {horizon} actions of a chunk"]

    def _check_reference(self) -> list[str]:
        """Why the data lack what the objective compares with."""
        if not self.objective.reads_reference or getattr(self.data, "reference_log_probs", False):
            return []
        return [
            "--objective.reference precomputed needs the reference's log-probabilities, and the data do not read any: "
            "give --data.reference-log-probs, or --objective.reference model"
        ]

    def _check_label(self) -> list[str]:
        """Why the data lack what the objective learns of each step, or the objective is none that acts."""
        needed, given = self.objective.label, self.data.label if isinstance(self.data, DataConfig) else None
        name = type(self.objective).__name__
        if needed != given:
            return [f"objective {name} needs --data.label {needed}, and it is {given}"]
        if needed == "return" and isinstance(self.eval, EvalConfig):
            return [
                f"objective {name} trains no actions, and eval measures them: give the experiment "
                "eval=openpi_train.evaluation.measure.Evaluations()"
            ]
        return []

    def _check_rl(self) -> list[str]:
        """Why the run cannot learn from own rollouts as it should."""
        rl, objective = self.rl, type(self.objective)
        if (rl is not None) != objective.learns_from_rollouts:
            if rl is None:
                return [f"objective {objective.__name__} learns from own rollouts, and the experiment has no `rl`"]
            return [f"objective {objective.__name__} does not learn from own rollouts: `rl` is of no use"]
        if rl is None:
            return []
        problems = rl.check(objective=self.objective, model=self.model, data=self.data, batch_size=self.batch_size)
        if problems:
            return problems
        num_steps = rl.steps_per_iteration(self.batch_size)
        intervals = {"--save-interval": self.save_interval}
        if self.num_epochs is None:  # else the steps are those of whole iterations
            intervals = {"--num-train-steps": self.num_train_steps, **intervals}
        if self.local_checkpoints.dir is not None:
            intervals["--local-checkpoints.interval"] = self.local_checkpoints.interval
        if self.num_epochs is not None and not rl.takes_samples:
            problems.append(
                f"--num-epochs counts passes over the data, which {type(rl).__name__} does not make: give "
                "--num-train-steps"
            )
        return problems + [
            f"{flag} {steps} is not a multiple of the {num_steps} optimizer steps of an iteration (--rl.epochs "
            "x rollouts / --batch-size), within which nothing can be saved; "
            f"try {max(steps // num_steps, 1) * num_steps}"
            for flag, steps in intervals.items()
            if steps % num_steps
        ]

    def generation_sizes(self) -> list[GenerationSize]:
        """What a device generates at a time for evaluations, and for RL."""
        found = [self.eval.generation_size(self.model, self.data)]
        if self.rl is not None:
            found.append(self.rl.generation_size(self.model, self.data))
        return [size for size in found if size is not None]

    def batch_spec(self, num_rows: int, opened: OpenedData | None = None) -> Any:
        """The batch of so many rows that the objective takes, as shapes: the longest possible, or that `opened` needs.

        Opens no files.
        """
        if self.rl is None:
            return self.data.batch_spec(self.model, num_rows)
        return self.rl.batch_spec(
            objective=self.objective, model=self.model, data=self.data, opened=opened, batch_size=num_rows
        )

    def _check_flags(self) -> list[str]:
        problems = []
        if not self.exp_name:
            problems.append("--exp-name NAME is missing: the run's directory is named after it")
        if (self.lr_scaling == "none") != (self.reference_batch_size is None):
            problems.append(
                f"--lr-scaling {self.lr_scaling} with --reference-batch-size {self.reference_batch_size}: "
                "give both, the second being the batch size that the learning rate was chosen for, or neither"
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
    """The experiment without `num_epochs` if the command line sets steps. Raises UsageError if it sets both."""
    flags = {word.split("=", 1)[0].replace("_", "-") for word in argv}
    if flags >= {"--num-train-steps", "--num-epochs"}:
        raise UsageError("--num-train-steps and --num-epochs both set the length of the run: give only one of them")
    return dataclasses.replace(experiment, num_epochs=None) if "--num-train-steps" in flags else experiment


def with_own_warmup(experiment: Experiment, argv: Sequence[str]) -> Experiment:
    """The experiment, which may shorten its own warm-up in a short run, but not one of the command line."""
    flags = {word.split("=", 1)[0].replace("_", "-") for word in argv}
    if experiment.lr_schedule.decay_steps is not None or "--lr-schedule.warmup-steps" in flags:
        return experiment
    return dataclasses.replace(experiment, lr_schedule=dataclasses.replace(experiment.lr_schedule, shorten_warmup=True))


def _are_nested(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)
