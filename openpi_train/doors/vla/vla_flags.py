"""Translates a YAML config of the PaliGemma VLA's PyTorch trainer to our flags. Read next: `without_vla_flag.py`.

Its commands' options that replace keys, or stand beside them, are read as keys, too. Absent keys keep the values of
`vla.py`.
"""

import dataclasses
import re
from pathlib import Path

from openpi_train.doors.config_file import Translated, contradiction, keys_by_flag
from openpi_train.doors.own_checkpoint import own_checkpoint, split_checkpoint
from openpi_train.doors.posttraining.model_keys import address_of
from openpi_train.doors.torch_optimizer import translate_betas, translate_optimizer
from openpi_train.doors.vla.without_vla_flag import NOT_DONE, WITHOUT_VLA_FLAG
from openpi_train.doors.yaml_file import YamlFile
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

# The experiment's name, and so the folder of its runs.
NAME = "vla"
# Parent of the runs.
DEFAULT_OUTPUT = "./experiments"
# Keys that the trainer's options replace.
NAME_KEY, MODEL_KEY = "experiment_name", "model.vlm_config.model_name_or_path"
TRAIN_KEY, VALIDATION_KEY = "data.train_parquet_files", "data.val_parquet_files"
_TOKENIZER, _BATCH = "data.tokenizer_name_or_path", "data.batch_size"
_VLM, _HEAD = "model.vlm_config", "model.action_head_config"
_DTYPES = ("bfloat16", "float16", "float32")
_T_MAX, _EPOCHS = "lr_scheduler.T_max", "epochs"
# PaliGemma's published sizes of pictures, at the end of its names.
_PIXELS = re.compile(r"-(224|448|896)/?$")
# What the trainer adds to a run's name.
_TIME = re.compile(r"_\d{8}_\d{6}$")
# Flags that are one value each: how it is read, and its key.
_PLAIN = {
    "exp-name": f"text {NAME_KEY}",
    "checkpoint-base-dir": "text checkpoint_dir",
    "seed": "whole seed",
    "num-epochs": f"count {_EPOCHS}",
    "log-interval": "count log_interval",
    "batch-size": f"count {_BATCH}",
    "grad-accum": "count gradient_accumulation_steps",
    "num-workers": "whole data.num_workers",
    "lr-schedule.peak-lr": "number optimizer.lr",
    "optimizer.eps": "number optimizer.eps",
    "optimizer.clip-gradient-norm": "bound grad_clip_norm",
    "model.head.depth": f"count {_HEAD}.num_layers",
    "model.head.num-heads": f"count {_HEAD}.num_heads",
    "model.max-token-len": "count data.prompt_max_len",
    "eval.num-sample-steps": f"count {_HEAD}.num_inference_timesteps",
}
# The keys that our errors are about, by the flag that they name.
KEYS = {
    **keys_by_flag(_PLAIN),
    "--weight-loader.params-path": MODEL_KEY,
    "--model.dtype": "model.vlm_config.dtype",
    "--freeze": "model.vlm_config.freeze_vision_tower, freeze_language_model",
    "--no-keep-effective-batch-size": "without --keep_effective_batch_size",
    "--resume-from": "resume_checkpoint",
}
# The feed-forward layers of the trainer's head, relative to its width.
_MLP_FACTOR = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedVla(Translated):
    """With the datasets, those that are held out, the dims of state and action and the number of cameras (None: not in
    the file), and the team at Weights & Biases.
    """

    datasets: tuple[str, ...]
    validation: tuple[str, ...]
    state_dims: int | None
    action_dims: int | None
    cameras: int | None
    entity: str | None


def translate_vla(config: JsonObject, given: JsonObject | None = None, name: str = "") -> TranslatedVla:
    """Translate a YAML config.

    Args: `given` are values by key that replace the file's, and the options of the trainer's commands; `name` is the
    run's if it has none.

    Raises UsageError for unknown keys (with the closest ones), invalid values, and values that contradict each other.
    """
    written = YamlFile(config, WITHOUT_VLA_FLAG, "the trainer", {})
    file = YamlFile(config, WITHOUT_VLA_FLAG, "the trainer", given or {})
    if name:
        file.values.setdefault(NAME_KEY, name)
    file.plain(_PLAIN)
    batch = _batch(file)
    _schedule(file, written.count(_EPOCHS))
    translate_optimizer(file, ("adamw", "adam"))
    translate_betas(file)
    _backbone(file)
    state_dims, action_dims = _dims(file)
    _head(file)
    (datasets, validation), cameras = _data(file), _cameras(file)
    entity = _tracking(file)
    _resume(file)
    return TranslatedVla(
        datasets=datasets,
        validation=validation,
        state_dims=state_dims,
        action_dims=action_dims,
        cameras=cameras,
        flags=file.words,
        lines=(*file.lines(), f"{batch}; the learning rate stays"),
        not_done=file.not_done(NOT_DONE),
        entity=entity,
    )


def _batch(file: YamlFile) -> str:
    """The rows of a step. Returns a sentence that says whose they are."""
    keeps = file.boolean("keep_effective_batch_size", False)
    # Always said, so that a flag of ours that is given behind it counts as it does there.
    file.flag("keep-effective-batch-size", keeps, "keep_effective_batch_size", _BATCH)
    if keeps:
        return "the batch size counts the rows of all GPUs, as there with --keep_effective_batch_size"
    return "each GPU takes the batch size, as there: with --keep_effective_batch_size it counts the rows of all GPUs"


def _schedule(file: YamlFile, epochs: int | None) -> None:
    """The learning rate; `epochs` are those of the file itself, for which its T_max was chosen."""
    kind, low = "lr_scheduler.type", "lr_scheduler.eta_min"
    said = file.word(kind, ("cosineannealinglr", "none"))
    if said in (None, "none"):
        if file.has("lr_scheduler") and said is None:
            raise UsageError(f"{kind} is missing: CosineAnnealingLR, or none for a constant rate")
        for key in (kind, _T_MAX, low):
            file.note("a constant rate", key)
        return
    file.flag("lr-schedule.kind", "cosine", kind)
    file.flag("lr-schedule.decay-lr", file.number(low, 0.0), low)
    length = file.count(_T_MAX)
    if length is None or length == epochs:
        file.note("all epochs of the run", _T_MAX)
    elif epochs is not None and length < epochs:
        raise UsageError(
            f"{_T_MAX} is {length} and {file.shown(_EPOCHS)} is {epochs}: the rate would rise again within the run, "
            f"which no schedule here does; give {epochs}, that of the run, or a number of optimizer steps above it"
        )
    else:
        file.flag("lr-schedule.decay-steps", length, _T_MAX)


def _backbone(file: YamlFile) -> None:
    weights, tokenizer = file.text(MODEL_KEY), file.text(_TOKENIZER)
    if weights is not None:
        file.flag("weight-loader.params-path", address_of(weights), MODEL_KEY)
        pixels = _PIXELS.search(weights)
        file.flag("model.image-size", int(pixels[1]) if pixels else None, MODEL_KEY)
    if (name := tokenizer or weights) is not None:  # a folder, or a name on the hub
        file.flag("data.tokenizer", name.removeprefix("hub:"), _TOKENIZER if tokenizer else MODEL_KEY)
    key = f"{_VLM}.dtype"
    dtype = file.text(key)
    if dtype is not None and dtype.removeprefix("torch.") not in _DTYPES:
        raise UsageError(f"{key} is {dtype!r}; allowed: {', '.join(f'torch.{name}' for name in _DTYPES)}")
    file.flag("model.dtype", None if dtype is None else dtype.removeprefix("torch."), key)
    tower, language = f"{_VLM}.freeze_vision_tower", f"{_VLM}.freeze_language_model"
    of_frozen = {(True, True): "backbone", (True, False): "vision", (False, True): "language", (False, False): "None"}
    if tower in file.values or language in file.values:
        frozen = of_frozen[file.boolean(tower, False), file.boolean(language, False)]
        file.flag("freeze", frozen, tower, language)


def _dims(file: YamlFile) -> tuple[int | None, int | None]:
    """The dims of the state and of an action, where the file says them. Raises UsageError if counts do not agree."""
    total_key, horizon_key = f"{_HEAD}.action_dim", f"{_HEAD}.horizon"
    of_action = (f"{_HEAD}.per_action_dim", f"{_HEAD}.num_action_dims")
    of_state = ("data.state_dim", f"{_HEAD}.state_dim")
    actions, state = file.agreed(YamlFile.count, *of_action), file.agreed(YamlFile.count, *of_state)
    total, horizon = file.count(total_key), file.count(horizon_key)
    if total is not None and actions is not None:
        if total % actions or (horizon is not None and total != horizon * actions):
            steps = f"{horizon_key} {horizon}" if horizon is not None else "a number of steps"
            raise contradiction(f"{total_key} is {total}, and {of_action[0]} {actions} x {steps} is not")
        horizon = total // actions
    file.flag("model.action-horizon", horizon, horizon_key, total_key)
    file.note("the numbers of a whole chunk", total_key)
    if actions is not None:
        file.flag("model.action-dim", max(actions, state or 0), *of_action, *of_state)
    file.note("the robot's dims", *of_state)
    return state, actions


def _head(file: YamlFile) -> None:
    """The flow head's sizes. Raises UsageError for what it does not have."""
    sees, categories, dropout = (f"{_HEAD}.{name}" for name in ("use_state_input", "num_categories", "dropout"))
    if file.boolean(sees, True) is False:
        raise UsageError(f"{sees} is false; allowed: true (the flow head always sees the robot's state)")
    file.note("the flow head sees the robot's state", sees)
    for key, only in ((categories, 1), (dropout, 0)):
        file.only(key, only, "the flow head has no such part", note=f"{only}: as here")
    width = file.spelled("model.head.width", YamlFile.count, f"{_HEAD}.embed_dim")
    file.flag("model.head.mlp-dim", None if width is None else _MLP_FACTOR * width, f"{_HEAD}.embed_dim")


def _data(file: YamlFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The datasets of the file: those to train on, and those that are held out."""
    found = {}
    file.expect(TRAIN_KEY, VALIDATION_KEY)
    for key in (TRAIN_KEY, VALIDATION_KEY):
        value = file.values.get(key)
        entries = value if isinstance(value, list) else [] if value in (None, "") else [value]
        if not all(isinstance(entry, str) and entry for entry in entries):
            raise UsageError(f"{key} is {value!r}; it must be a path, or a list of paths")
        found[key] = tuple(entries)
    file.note("the training data", TRAIN_KEY)
    if not found[VALIDATION_KEY]:
        # As there: all episodes train, and nothing is measured besides.
        file.flag("data.validation-fraction", 0.0, VALIDATION_KEY)
        file.flag("eval.interval", 0, VALIDATION_KEY)
    file.note("the held-out data", VALIDATION_KEY)
    file.note("minimum and maximum of each dim, computed from the training data", "data.normalization_stats_path")
    return found[TRAIN_KEY], found[VALIDATION_KEY]


def _cameras(file: YamlFile) -> int | None:
    key = f"{_VLM}.use_aux_camera"
    both = file.boolean(key)
    file.note("two cameras" if both else "the first camera alone", key)
    return None if both is None else 2 if both else 1


def _tracking(file: YamlFile) -> str | None:
    """Weights & Biases, which is off without the option, as there. Returns the team."""
    switch, project, team = "use_wandb", "wandb_project_name", "wandb_entity"
    uses = file.boolean(switch, False)
    file.flag("wandb-enabled", uses, switch)
    named = file.text(project)
    file.note("used with use_wandb", project)
    if uses:
        file.flag("project-name", named or f"VLA_Project_{file.values.get(NAME_KEY, '')}_DDP", project)
    file.note("WANDB_ENTITY, unless it is set", team)
    return file.text(team)


def _resume(file: YamlFile) -> None:
    """Go on with this run from one of its checkpoints, or begin a new one from another run's.

    Raises UsageError for a checkpoint of the trainer itself.
    """
    key = "resume_checkpoint"
    value = file.text(key)
    if value is None:
        return
    if Path(value).expanduser().is_file():
        raise UsageError(
            f"{file.shown(key)} is {value}, a file of the trainer: its flow head is another network, so no run can go "
            f"on from it. Its backbone can begin a new run: in place of it give --weight-loader.params-path {value}. "
            "To go on with a run of ours, give its folder, or that of a step in it"
        )
    base, name = Path(file.flags.get("checkpoint-base-dir", DEFAULT_OUTPUT)).expanduser(), file.flags.get("exp-name")
    own = [] if name is None else [Path(base / NAME / name).absolute(), Path(base / name).absolute()]
    folder, word = split_checkpoint(value)
    for one in (folder, folder.with_name(_TIME.sub("", folder.name))):
        if (point := own_checkpoint(str(one / (word or "")), own)) is not None:
            file.flag("resume-from", point, key)
            return
    # Of another run.
    file.flag("resume-from", value if word is None else str(folder if word == "latest" else folder / word), key)
