"""Translates a DeepSpeed JSON config to our flags; unmapped keys are listed with a reason. Read next:
`unmapped.py`, `openpi_train/optim/schedules.py`.

Absent sections and "auto" values keep the experiment's settings. In a section that is present, omitted keys have
DeepSpeed's defaults.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.doors import guide_files
from openpi_train.doors.config_file import PROFILED_STEPS, ConfigFile, Flag
from openpi_train.doors.deepspeed.unmapped import NOT_DONE, UNMAPPED
from openpi_train.json_object import JsonObject
from openpi_train.runtime import other_tools
from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)

STRATEGIES = {0: "replicated", 1: "zero1", 2: "zero2", 3: "zero3"}
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TOTAL, _ROWS, _ACCUM = BATCH_KEYS
_OF_ANY_OPTIMIZER = ("--optimizer.clip-gradient-norm", "--optimizer.moment-dtype")
# DeepSpeed's optimizer types, in lower case, and ours.
_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "onebitadam", "zerooneadam"), "adamw"),
    "lion": "lion",
    "muon": "muon",
    "sgd": "sgd",
}
# DeepSpeed's defaults (torch's for SGD): decay rates of the moments; the others, by our flag.
_BETAS = {"adamw": (0.9, 0.999), "lion": (0.9, 0.99), "muon": (0.9, 0.95)}
_PARAMS = {
    "adamw": {"eps": ("eps", ConfigFile.number, 1e-8)},
    "lion": {},
    "muon": {"beta": ("momentum", ConfigFile.number, 0.95), "ns-steps": ("ns_steps", ConfigFile.count, 5)},
    "sgd": {"momentum": ("momentum", ConfigFile.number, 0.0), "nesterov": ("nesterov", ConfigFile.boolean, False)},
}
_PLAIN = {
    "optimizer.clip-gradient-norm": "bound gradient_clipping",
    "tensorboard": "boolean tensorboard.enabled",
    "wandb-enabled": "boolean wandb.enabled",
    "project-name": "text wandb.project",
}
# The keys that our errors are about, by the flag that they name.
_KEYS = {
    "--batch-size": f'{_TOTAL}, or "auto": {_ROWS} x {_ACCUM} x devices',
    "--micro-batch-size": f'{_ROWS}, or "auto"',
    "--grad-accum": f'{_ACCUM}, or "auto"',
    "--sharding.strategy": "zero_optimization.stage 1, 2 or 3, of which 3 needs least memory",
    "--sharding.offload": 'zero_optimization.offload_optimizer {"device": "cpu"}',
    "--fsdp-devices": "zero_optimization.mics_shard_size, which shards over all devices if it is absent",
    "--optimizer.moment-dtype": "bf16.bf16_optimizer_states true",
}
_CHANGE = 'change one of the three, or make it "auto"'
_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle")


@dataclasses.dataclass(frozen=True)
class DeepSpeedFlags:
    """A translated file."""

    file: ConfigFile

    @property
    def flags(self) -> tuple[Flag, ...]:
        """The flags."""
        return self.file.words

    @property
    def lines(self) -> tuple[str, ...]:
        """A line per key."""
        return self.file.lines()

    @property
    def missing(self) -> Mapping[str, str]:
        """The values that are still to give, by flag, with the reason."""
        return self.file.missing

    def report(self) -> str:
        """A report of every key and its result, missing values, and all flags in one line."""
        missing = [f"still to give: {flag} N: {why}" for flag, why in self.missing.items()]
        return "\n".join([*self.lines, *missing, f"the same as: {self.command_line}"])

    @property
    def command_line(self) -> str:
        """The flags as a command line."""
        return " ".join(word for flag in self.flags for word in flag)

    def before(self, given: Sequence[str]) -> list[str]:
        """The arguments to put before the `given` ones, which win. Raises UsageError if something is still missing.

        If another optimizer is given, the file's optimizer settings are left out.
        """
        names = {word.partition("=")[0].replace("_", "-") for word in given}
        for flag, why in self.missing.items():
            if flag not in names:
                raise UsageError(f"{flag} N is missing: {why}")
        other = "--optimizer" in names
        own = [flag[0].startswith("--optimizer") and flag[0] not in _OF_ANY_OPTIMIZER for flag in self.flags]
        flags = [flag for flag, is_own in zip(self.flags, own, strict=True) if not (other and is_own)]
        return [word for flag in flags for word in flag] + list(given)


def translate_file(path: str | Path, num_devices: int | None = None) -> DeepSpeedFlags:
    """Translate a DeepSpeed config file to flags. Raises UsageError if it is invalid or contradicts itself."""
    try:
        text = Path(guide_files.found(path)).read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=_once, parse_constant=_constant)
    except OSError as error:
        raise UsageError(f"the DeepSpeed config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a DeepSpeed config, which is a JSON file: {error}") from error
    if not isinstance(config, dict) or not config:
        raise UsageError(f"{path} is not a DeepSpeed config: it must hold a JSON object with keys")
    try:
        return translate(config, num_devices)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def note_file(path: str, translated: DeepSpeedFlags) -> None:
    """Remember what the file of a run asks that is not done, and its keys for errors that name flags."""
    other_tools.note_not_done(translated.file.not_done(NOT_DONE))
    other_tools.note_keys(path, _KEYS)


def before_given(file: str, given: Sequence[str]) -> list[str]:
    """The flags of a DeepSpeed config, which are logged, followed by the `given` ones."""
    translation = translate_file(file)
    words = translation.before(given)
    note_file(file, translation)
    logger.info("%s, key by key:\n%s", file, translation.report())
    return words


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of the file. Raises ValueError if it has a key twice, as DeepSpeed does."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"{', '.join(twice)} appears in it more than once")
    return found


def _constant(name: str) -> float:
    """Parse Infinity, which means "never" (steps_per_print), but refuse NaN."""
    if name == "NaN":
        raise ValueError("NaN is not a valid setting")
    return float(name)


def translate(config: JsonObject, num_devices: int | None = None) -> DeepSpeedFlags:
    """Translate a DeepSpeed config to flags.

    Args: `num_devices` is the number of devices, None if unknown.
    Raises UsageError for unknown keys (with the closest ones), invalid values, and contradictory numbers.
    """
    file = ConfigFile(config, UNMAPPED, "DeepSpeed", open_word="auto")
    _batch(file, num_devices and num_devices // _tensor_devices(file))
    _zero(file)
    _offload(file)
    _precision(file)
    _sums(file)
    _optimizer(file)
    _schedule(file)
    _others(file)
    file.lines()  # refuses unknown keys
    return DeepSpeedFlags(file)


def _tensor_devices(file: ConfigFile) -> int:
    """Number of devices that hold the same rows."""
    key = "tensor_parallel.autotp_size"
    devices = file.number(key)
    if devices is None:
        return 1
    devices = int(devices) or 1  # 0 disables it
    file.flag("sharding.tensor-devices", devices, key)
    return devices


def _batch(file: ConfigFile, num_devices: int | None) -> int | None:
    """Translate batch size and accumulation, checked for consistency. Returns the number of devices, if known."""
    total, rows, accum = (file.count(key) for key in (_TOTAL, _ROWS, _ACCUM))
    if total and rows:
        num_devices, accum = _product(total, rows, accum, num_devices)
    elif total and num_devices and total % (num_devices * (accum or 1)):
        raise UsageError(f"{_TOTAL} {total} does not divide over {num_devices} devices x {accum or 1} micro-batches")
    elif rows and num_devices:
        file.flag("batch-size", rows * (accum or 1) * num_devices, _ROWS, _ACCUM)
    elif rows:
        file.flag("batch-size", rows * (accum or 1), _ROWS, _ACCUM)  # per device; the number of devices is unknown
        file.flag("keep-effective-batch-size", False, _ROWS, _ACCUM)
    file.flag("batch-size", total, _TOTAL)
    file.flag("micro-batch-size", rows, _ROWS)
    file.flag("grad-accum", accum, _ACCUM)
    return num_devices


def _product(total: int, rows: int, accum: int | None, num_devices: int | None) -> tuple[int | None, int | None]:
    """Devices and accumulation such that total = rows x accumulation x devices, if they are determined."""
    per_device = rows * (accum or 1)
    factors = f"{_ROWS} {rows} x {_ACCUM} {accum}" if accum else f"{_ROWS} {rows}"
    devices, rest = divmod(total, per_device)
    if rest:
        raise UsageError(f"{_TOTAL} {total} is not a multiple of {factors} = {per_device}; {_CHANGE}")
    if num_devices is None:
        return (devices if accum else None), accum
    if accum and devices != num_devices:
        raise UsageError(
            f"{_TOTAL} {total} = {factors} x {devices} devices, not {num_devices}; for {num_devices} set {_TOTAL} "
            f'{per_device * num_devices}, or make one of the three "auto"'
        )
    if devices % num_devices:
        raise UsageError(f"{_TOTAL} {total} is not a multiple of {factors} x {num_devices} devices; {_CHANGE}")
    return num_devices, accum or devices // num_devices


def _zero(file: ConfigFile) -> None:
    key, shard_key = "zero_optimization.stage", "zero_optimization.mics_shard_size"
    if "zero_optimization" in file.values:
        raise UsageError('zero_optimization must be an object, such as {"stage": 2}')
    stage = file.number(key, 0 if file.has("zero_optimization") else None)
    shard = file.number(shard_key, -1)
    if stage is None:
        return
    if stage not in STRATEGIES:
        raise UsageError(f"{key} is {stage}; allowed: 0, 1, 2, 3")
    file.flag("sharding.strategy", STRATEGIES[stage], key)
    if stage and shard and shard > 0:
        file.flag("fsdp-devices", shard, shard_key)
    else:
        file.note("all devices share one copy", shard_key)
    least = "zero_optimization.stage3_param_persistence_threshold"
    elements = file.number(least)
    file.flag("sharding.min-shard-mib", None if elements is None else elements * 4 / 2**20, least)


def _offload(file: ConfigFile) -> None:
    key, older_key = "zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload"
    device = file.text(key, "none")
    if device not in ("cpu", "nvme", "none", None):
        raise UsageError(f"{key} is {device!r}; allowed: cpu, nvme, none")
    if device == "cpu" or file.boolean(older_key, False):
        file.flag("sharding.offload", "optimizer", key, older_key)
    elif device == "none":
        file.note("the state stays on the devices", key, older_key)


def _precision(file: ConfigFile) -> None:
    bf16 = "bfloat16" if file.has("bfloat16") else "bf16"  # the section's older name
    half, brain = (file.boolean(f"{name}.enabled", False) for name in ("fp16", bf16))
    states = f"{bf16}.bf16_optimizer_states"
    if half and brain:
        raise UsageError(f"fp16.enabled and {bf16}.enabled exclude each other; set one to false")
    if brain and file.boolean(states, False):
        file.flag("optimizer.moment-dtype", "bfloat16", states)
    if half:
        _loss_scale(file)
    if None not in (half, brain) and (file.has("fp16") or file.has(bf16)):
        dtype = "float16" if half else "bfloat16" if brain else "float32"
        file.flag("model.dtype", dtype, "fp16.enabled", f"{bf16}.enabled")
    for section in ("fp16", bf16):
        file.note_all(section, "no effect given the rest of its section")


def _sums(file: ConfigFile) -> None:
    key, older_key = "communication_data_type", "fp32_allreduce"
    known = {None: None, "fp32": "float32", "bf16": "bfloat16", "fp16": None}
    given = file.text(key)
    dtype = given and given.lower()  # as DeepSpeed reads it
    if dtype not in known:
        raise UsageError(f"{key} is {given!r}; allowed: fp32, fp16, bf16")
    file.flag("sharding.reduce-dtype", known[dtype], key)
    if dtype == "fp16":
        file.note("gradients are not summed in float16, in which sums overflow", key)
    file.note("gradients are summed in float32 unless --sharding.reduce-dtype says otherwise", older_key)


def _loss_scale(file: ConfigFile) -> None:
    fixed = file.number("fp16.loss_scale", 0)
    if fixed:
        for name, value in {"initial": float(fixed), "minimum": float(fixed), "growth-interval": 0}.items():
            file.flag(f"loss-scaling.{name}", value, "fp16.loss_scale")
        return
    file.note("the scale is dynamic", "fp16.loss_scale")
    power = file.number("fp16.initial_scale_power", 16)
    file.flag("loss-scaling.initial", None if power is None else 2.0**power, "fp16.initial_scale_power")
    file.becomes("fp16.loss_scale_window", "loss-scaling.growth-interval", ConfigFile.count, 1000)
    file.becomes("fp16.hysteresis", "loss-scaling.hysteresis", ConfigFile.count, 2)
    file.becomes("fp16.min_loss_scale", "loss-scaling.minimum", ConfigFile.count, 1)


def _others(file: ConfigFile) -> None:
    if file.number("steps_per_print") == math.inf:  # accelerate's notation for "never"
        file.note("never: the experiment's own value", "steps_per_print")
    else:
        file.plain({"log-interval": "count steps_per_print"})
    file.plain(_PLAIN)
    profiles = "flops_profiler.enabled"
    file.flag("profile", PROFILED_STEPS if file.boolean(profiles, False) else None, profiles)
    file.note_all("flops_profiler", "the steps after a start's first ones are traced: --profile")


def _optimizer(file: ConfigFile) -> None:
    """Translate the optimizer's type and parameters; omitted ones have DeepSpeed's defaults."""
    if not file.has("optimizer"):
        return
    kind = file.text("optimizer.type")
    ours = _OPTIMIZERS.get((kind or "").lower())
    if ours is None:
        raise UsageError(f"optimizer.type is {kind!r}; allowed: {', '.join(sorted(_OPTIMIZERS))} (in any case)")
    file.flag("optimizer", ours, "optimizer.type")
    params = "optimizer.params."
    if ours in _BETAS:
        prefix = "adam-" if ours == "muon" else ""
        for name, beta in zip(("b1", "b2"), file.pair(params + "betas", _BETAS[ours]) or (None, None), strict=True):
            file.flag(f"optimizer.{prefix}{name}", beta, params + "betas")
    for flag, (name, read, default) in _PARAMS[ours].items():
        file.becomes(params + name, f"optimizer.{flag}", read, default)
    decay = file.number(params + "weight_decay", 0.0)
    file.flag("optimizer.weight-decay", decay, params + "weight_decay")
    if decay and ours == "adamw" and file.boolean(params + "adam_w_mode", True) is False:
        raise UsageError(
            f"optimizer.params.adam_w_mode false adds weight_decay {decay} to the gradient; ours is decoupled. Set it "
            "to true, or weight_decay to 0"
        )


def _schedule(file: ConfigFile) -> None:
    """Translate the learning rate schedule; a constant rate if there is an optimizer and no scheduler.

    DeepSpeed uses the schedule's first value for two steps, so its rate at a step is ours at the previous step; its
    cosine ends one step earlier.
    """
    rate_key = "optimizer.params.lr"
    rate = file.number(rate_key, 1e-3 if file.has("optimizer") else None)
    if not file.has("scheduler"):
        if rate is not None:
            file.flag("lr-schedule.kind", "constant", rate_key)
            file.flag("lr-schedule.warmup-steps", 0, rate_key)
            file.flag("lr-schedule.peak-lr", rate, rate_key)
        return
    kind = file.text("scheduler.type")
    match kind:
        case "WarmupLR" | "WarmupDecayLR":
            _warmup(file, rate, decays=kind == "WarmupDecayLR")
        case "WarmupCosineLR":
            _cosine(file, rate)
        case "OneCycle":
            _one_cycle(file)
        case _:
            raise UsageError(f"scheduler.type is {kind!r}; allowed: {', '.join(_SCHEDULERS)}")


def _warmup(file: ConfigFile, rate: float | None, *, decays: bool) -> None:
    params, peak_key = "scheduler.params.", "scheduler.params.warmup_max_lr"
    file.flag("lr-schedule.kind", "linear" if decays else "constant", "scheduler.type")
    peak = file.number(peak_key, 1e-3 if rate is None else rate)
    if peak is None or peak_key not in file.values:
        file.flag("lr-schedule.peak-lr", rate if peak is None else peak, "optimizer.params.lr")
    else:
        file.flag("lr-schedule.peak-lr", peak, peak_key)
        file.note("replaced by the scheduler's warmup_max_lr", "optimizer.params.lr")
    file.becomes(params + "warmup_min_lr", "lr-schedule.warmup-lr", ConfigFile.number, 0.0)
    _steps_of_warmup(file)
    if decays:
        _total_steps(file)
        file.flag("lr-schedule.decay-lr", 0.0, "scheduler.type")


def _cosine(file: ConfigFile, rate: float | None) -> None:
    params = "scheduler.params."
    file.flag("lr-schedule.kind", "cosine", "scheduler.type")
    file.flag("lr-schedule.peak-lr", rate, "optimizer.params.lr")
    ratios = {"warmup-lr": ("warmup_min_ratio", 0.0), "decay-lr": ("cos_min_ratio", 1e-4)}
    for flag, (name, default) in ratios.items():
        ratio = file.number(params + name, default)
        if ratio is not None and rate is None:
            raise UsageError(f"{params}{name} is a fraction of optimizer.params.lr, which the file does not give")
        file.flag(f"lr-schedule.{flag}", None if ratio is None else ratio * rate, params + name)
    _steps_of_warmup(file)
    _total_steps(file)


def _one_cycle(file: ConfigFile) -> None:
    params = "scheduler.params."
    first, second = params + "cycle_first_step_size", params + "cycle_second_step_size"
    low, up = file.number(params + "cycle_min_lr"), file.count(first, 2000)
    down = file.count(second, up)
    file.flag("lr-schedule.kind", "linear", "scheduler.type")
    file.flag("lr-schedule.warmup-shape", "linear", "scheduler.type")
    file.flag("lr-schedule.warmup-lr", low, params + "cycle_min_lr")
    file.becomes(params + "cycle_max_lr", "lr-schedule.peak-lr", ConfigFile.number)
    file.flag("lr-schedule.decay-lr", low, params + "cycle_min_lr")
    file.flag("lr-schedule.warmup-steps", up, first)
    file.flag("lr-schedule.decay-steps", up + down if up and down else None, first, second)
    file.note("replaced by the scheduler's rates", "optimizer.params.lr")


def _steps_of_warmup(file: ConfigFile) -> None:
    params = "scheduler.params."
    file.becomes(params + "warmup_num_steps", "lr-schedule.warmup-steps", ConfigFile.count, 1000)
    shape = file.text(params + "warmup_type", "log")
    if shape not in ("log", "linear", None):
        raise UsageError(f"{params}warmup_type is {shape!r}; allowed: log, linear")
    file.flag("lr-schedule.warmup-shape", shape, params + "warmup_type")


def _total_steps(file: ConfigFile) -> None:
    key = "scheduler.params.total_num_steps"
    if key not in file.values:
        raise UsageError(f"{key} is missing: the step at which the decay ends")
    total = file.count(key)
    # transformers, which fills in "auto", uses the run's length.
    file.flag("lr-schedule.decay-steps", "None" if total is None else total, key)
