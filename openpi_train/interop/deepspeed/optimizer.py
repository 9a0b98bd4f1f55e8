"""DeepSpeed's optimizer and scheduler sections as flags. Read next: `openpi_train/optim/schedules.py`.

DeepSpeed uses the schedule's first value for two steps, so its rate at a step is ours at the previous step; its cosine
ends one step earlier.
"""

from openpi_train.interop.config_file import ConfigFile
from openpi_train.runtime.exits import UsageError

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
_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle")


def translate_optimizer(file: ConfigFile) -> None:
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


def translate_schedule(file: ConfigFile) -> None:
    """Translate the learning rate schedule; a constant rate if there is an optimizer and no scheduler."""
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
        file.note("optimizer.params.lr", "replaced by the scheduler's warmup_max_lr")
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
    file.note("optimizer.params.lr", "replaced by the scheduler's rates")


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
