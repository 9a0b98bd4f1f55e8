"""Translates a YAML config of the RIPT trainers for pi0 to our flags. Read next: `without_ript_flag.py`.

The keys are those of their distributed trainer, and of RIPT-VLA's configs where these mean the same. Absent keys keep
the values of `ript.py`, the counts of an iteration those of the trainer, which are here.
"""

import dataclasses
import json
import math

from openpi_train.doors.config_file import PROFILED_STEPS, Translated, contradiction, keys_by_flag
from openpi_train.doors.ript.without_ript_flag import NOT_DONE, WITHOUT_RIPT_FLAG
from openpi_train.doors.torch_optimizer import translate_optimizer
from openpi_train.doors.yaml_file import YamlFile
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

# Rollouts of a group, groups of a device, passes over an iteration's rollouts, iterations, and those between saves.
_GROUP_SIZE, _GROUPS, _EPOCHS, _ITERATIONS, _SAVE_EVERY = 4, 2, 4, 20, 10
_GROUP_SIZE_KEY, _BATCH_KEY = "algo.rloo_batch_size", "algo.ppo_batch_size"
_GROUPS_KEYS = ("algo.data_batch_size", "algo.demo_batch_size", "train_dataloader.batch_size")
_EPOCHS_KEYS = ("algo.num_epochs", "algo.num_ppo_epochs")
_POLICY_KEYS = ("policy_path", "checkpoint_path", "algo.checkpoint_path", "model.checkpoint_path")
_CLIP_KEYS, _CLIP_HIGH = ("algo.ppo_clip_range", "algo.clip_range"), "algo.ppo_clip_high"
_TASKS, _TASK = "task.task_names_to_use", "task.task_name"
# The key of the environment's name.
ENV = "task.benchmark_name"
_DEBUG = "debug.distributed_debug"
_TRACK, _SKIP = "algo.enable_rollout_stats_tracking", "algo.rollout_skip_threshold"
_NAME = "exp_name"
_STATES, _LENGTH = "rl.states-per-task", "rl.max-steps"
# Flags that are one value each: how it is read, and all spellings of its key.
_PLAIN = {
    "exp-name": "text exp_name",
    "checkpoint-base-dir": "text output_dir",
    "seed": "whole seed",
    "data.datasets.0.norm-stats": "text norm_stats_path",
    "grad-accum": "count algo.gradient_accumulation_steps gradient_accumulation_steps",
    "keep-last": "count fault_tolerance.max_checkpoints_to_keep",
    "eval.closed-loop.episodes-per-task": "count rollout.rollouts_per_env task.rollouts_per_env",
    "eval.closed-loop.episodes-per-device": "count rollout.num_parallel_envs",
    "lr-schedule.peak-lr": "number algo.lr",
    "optimizer.b1": "number optimizer.beta1",
    "optimizer.b2": "number optimizer.beta2",
    "optimizer.eps": "number optimizer.eps",
    "optimizer.momentum": "number optimizer.momentum",
    "optimizer.clip-gradient-norm": "bound algo.grad_norm_clip algo.grad_norm_clip_model grad_clip",
    "objective.kl-weight": "number algo.kl_coef",
    "rl.mixed-only": "boolean algo.enable_dynamic_sampling enhanced_sampling.enable_smart_filtering",
    _STATES: "count task.num_init_states dataset.num_init_states task.demos_per_env",
    _LENGTH: "count task.max_episode_length algo.max_episode_length",
    "rl.episodes-per-device": ("count task.num_parallel_envs algo.num_parallel_envs task.env_runner.num_parallel_envs"),
    "model.remat": "recomputes data_parallel.enable_gradient_checkpointing",
    "project-name": "text logging.project",
}
# The keys that our errors are about, by the flag that they name.
KEYS = {
    **keys_by_flag(_PLAIN),
    "--rl.group-size": _GROUP_SIZE_KEY,
    "--rl.num-groups": _GROUPS_KEYS[0],
    "--rl.epochs": _EPOCHS_KEYS[0],
    "--batch-size": f"{_BATCH_KEY}, of one device",
    "--num-train-steps": "training.num_train_steps, in iterations",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedRipt(Translated):
    """With the checkpoint to start from, the environment's name (None: that of the checkpoint's run), and whether NCCL
    is to log, too.
    """

    policy: str | None
    env: str | None
    debugs: bool


def translate_ript(config: JsonObject, given: JsonObject | None = None, name: str | None = None) -> TranslatedRipt:
    """Translate a YAML config.

    Args: `given` are values by key that replace the file's; `name` is the run's if it has none.

    Raises UsageError for unknown keys (with the closest ones), invalid values, and values that contradict each other.
    """
    file = YamlFile(config, WITHOUT_RIPT_FLAG, "RIPT's trainer", given or {})
    if name is not None:
        file.values.setdefault(_NAME, name)
    file.plain(_PLAIN)
    _resume(file)
    batch_size, num_steps = _iteration(file)
    _length(file, num_steps)
    _evaluation(file, num_steps)
    _learning_rate(file, batch_size)
    translate_optimizer(file, ("adamw", "adam", "sgd"), "algo.weight_decay")
    _objective(file)
    _sampling(file)
    _tasks(file)
    _episodes(file)
    _precision(file)
    _tracking(file)
    policy, env = file.agreed(YamlFile.text, *_POLICY_KEYS), file.text(ENV)
    file.flag("weight-loader.params-path", policy, *_POLICY_KEYS)
    file.note("the environment, in RL and in evaluations", ENV)
    debugs = bool(file.boolean(_DEBUG))
    file.note("NCCL_DEBUG=INFO, unless it is set" if debugs else "no effect", _DEBUG)
    lines, not_done = file.lines(), file.not_done(NOT_DONE)
    return TranslatedRipt(policy=policy, env=env, debugs=debugs, lines=lines, flags=file.words, not_done=not_done)


def _resume(file: YamlFile) -> None:
    auto, newest, again = "fault_tolerance.auto_resume", "fault_tolerance.resume_from_latest", "resume"
    resumes = file.agreed(YamlFile.boolean, auto, again)
    if resumes and file.boolean(newest) is False:
        raise contradiction(f"{auto} is true and {newest} is false: a run goes on from its newest good checkpoint")
    file.flag("resume", resumes, auto, again)


def _iteration(file: YamlFile) -> tuple[int, int]:
    """The rollouts of an optimizer step on one device, and the steps of an iteration on any number of them."""
    group_size = file.count(_GROUP_SIZE_KEY, _GROUP_SIZE) or _GROUP_SIZE
    groups = file.agreed(YamlFile.count, *_GROUPS_KEYS) or _GROUPS
    epochs = file.agreed(YamlFile.count, *_EPOCHS_KEYS) or _EPOCHS
    batch_size = file.count(_BATCH_KEY) or groups * group_size
    if groups * group_size % batch_size:
        raise UsageError(
            f"{_BATCH_KEY} is {batch_size}, which does not divide the {groups * group_size} rollouts of an iteration "
            f"on a device ({groups} groups of {group_size})"
        )
    file.flag("rl.group-size", group_size, _GROUP_SIZE_KEY)
    file.flag("rl.num-groups", groups, *_GROUPS_KEYS)
    file.flag("rl.epochs", epochs, *_EPOCHS_KEYS)
    file.flag("batch-size", batch_size, _BATCH_KEY)
    # Of one device: the number of devices is not known yet.
    file.flag("keep-effective-batch-size", False, *_GROUPS_KEYS, _BATCH_KEY)
    return batch_size, epochs * groups * group_size // batch_size


def _length(file: YamlFile, num_steps: int) -> None:
    """The length of the run and the steps between saves and lines of the log, from iterations of `num_steps` steps."""
    length, saves = ("num_train_steps", "n_steps"), ("fault_tolerance.checkpoint_interval", "save_interval")
    iterations = file.agreed(YamlFile.count, *length) or _ITERATIONS
    every = file.agreed(YamlFile.count, *saves) or _SAVE_EVERY
    switch = "fault_tolerance.enable_checkpointing"
    if file.boolean(switch) is False:
        every = iterations
    file.flag("num-train-steps", iterations * num_steps, *length)
    file.flag("save-interval", every * num_steps, *saves, switch)
    file.flag("log-interval", num_steps)


def _evaluation(file: YamlFile, num_steps: int) -> None:
    switch, intervals = "rollout.enabled", ("rollout.interval", "rollout_steps", "eval_interval")
    every = file.agreed(YamlFile.count, *intervals)
    if file.boolean(switch) is False:
        file.note("before the first and after the last step only", switch, *intervals)
    else:
        file.note("before the first step, after the last, and every rollout.interval iterations", switch)
        for name in ("eval.interval", "eval.closed-loop.interval"):
            file.flag(name, None if every is None else every * num_steps, *intervals)
    videos = "enhanced_sampling.save_videos"
    if file.boolean(videos) is False:
        file.flag("eval.closed-loop.num-videos", 0, videos)
    else:
        file.note("of evaluations: --eval.closed-loop.num-videos", videos)


def _learning_rate(file: YamlFile, batch_size: int) -> None:
    key = "algo.lr_scaling"
    scaling = file.word(key, ("none", "linear", "sqrt"))
    file.flag("lr-scaling", scaling, key)
    if scaling in ("linear", "sqrt"):
        # The rate is that of one device.
        file.flag("reference-batch-size", batch_size, key)


def _objective(file: YamlFile) -> None:
    low, high = file.agreed(YamlFile.number, *_CLIP_KEYS), file.number(_CLIP_HIGH)
    file.flag("objective.clip-low", low, *_CLIP_KEYS)
    file.flag("objective.clip-high", low if high is None else high, *(_CLIP_KEYS if high is None else (_CLIP_HIGH,)))


def _sampling(file: YamlFile) -> None:
    """Which groups are learnt from, and which initial states are passed over."""
    tries = "enhanced_sampling.max_sampling_attempts"
    if most := file.count(tries):
        # A try is a group there; here a wave, of all groups.
        file.flag("rl.max-waves", math.ceil(most / file.flags["rl.num-groups"]), tries)
    states = _PLAIN[_STATES].split()[1]
    tracks, times = file.boolean(_TRACK), file.whole(_SKIP)
    if tracks is False or times == 0:
        file.note("no initial state is passed over", _TRACK, _SKIP)
    elif _STATES not in file.flags:
        file.note(f"no initial state is drawn twice, so none is passed over; {states} sets a number", _TRACK)
        file.note(f"needs {states}", _SKIP)
    elif times is not None or tracks:
        file.flag("rl.skip-solved", 3 if times is None else times, _SKIP, _TRACK)


def _tasks(file: YamlFile) -> None:
    """The tasks of RL and of evaluations, by name or by number."""
    several, single = file.entries(_TASKS), file.values.get(_TASK)
    file.expect(_TASK)
    if several:
        key, chosen = _TASKS, several
        file.note(f"{_TASKS} names them", _TASK)
    else:
        key, chosen = _TASK, [] if single is None else [single]
        file.note("all tasks" if single is None else f"{_TASK} names it", _TASKS)
    for one in chosen:
        if isinstance(one, bool) or not isinstance(one, int | str):
            raise UsageError(f"{key} has {json.dumps(one)}; a task is its name, or its number from 0")
    for name in ("rl.tasks", "eval.closed-loop.tasks"):
        file.flag(name, tuple(map(str, chosen)) or None, key)


def _episodes(file: YamlFile) -> None:
    evaluated = "rollout.max_episode_length"
    own = file.count(evaluated)
    file.flag("eval.closed-loop.max-steps", file.flags.get(_LENGTH) if own is None else own, evaluated)


def _precision(file: YamlFile) -> None:
    mixed = ("use_mixed_precision", "use_amp")
    half = file.agreed(YamlFile.boolean, *mixed)
    file.flag("model.dtype", None if half is None else "bfloat16" if half else "float32", *mixed)
    profiles = "debug.profile_performance"
    file.flag("profile", {None: None, True: PROFILED_STEPS, False: 0}[file.boolean(profiles)], profiles)


def _tracking(file: YamlFile) -> None:
    mode, switches = "logging.mode", ("use_wandb", "enable_wandb")
    said = file.word(mode, ("online", "offline", "disabled"))
    enabled = file.agreed(YamlFile.boolean, *switches)
    if said is not None and enabled is not None and enabled != (said != "disabled"):
        raise contradiction(f"{mode} is {said} and wandb is {'on' if enabled else 'off'}")
    file.flag("wandb-enabled", enabled if said is None else said != "disabled", mode, *switches)
