"""The `vla` verb: an experiment on a PaliGemma policy from a YAML config of the VLA's PyTorch trainer.

Sizes, and what is frozen, are those of a named experiment where the config does not say them. Values for absent keys
are those of the trainer: 8 rows on each GPU, AdamW at a constant 2e-5, 10 epochs, pictures as they are, no average.
Read next: `vla_flags.py`.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openpi_train import registry
from openpi_train.choice import on_dataset, source_of
from openpi_train.data.core.source import SourceConfig
from openpi_train.data.formats.parquet import Parquet
from openpi_train.data.robot.config import Dataset
from openpi_train.doors.begun_anew import begun_anew
from openpi_train.doors.config_file import not_replaced
from openpi_train.doors.door_requests import VlaRequest
from openpi_train.doors.own_checkpoint import going_on
from openpi_train.doors.vla.vla_flags import (
    DEFAULT_OUTPUT,
    KEYS,
    MODEL_KEY,
    NAME,
    NAME_KEY,
    TRAIN_KEY,
    VALIDATION_KEY,
    TranslatedVla,
    translate_vla,
)
from openpi_train.doors.yaml_file import read_yaml
from openpi_train.experiment import Experiment
from openpi_train.models.paligemma import PaliGemmaFlowConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import LRSchedule
from openpi_train.robots.numbered import Numbered
from openpi_train.robots.robot import Robot
from openpi_train.runtime.exits import DataError, UsageError, reported_as
from openpi_train.tools.requests import given_fields
from openpi_train.training.documented_links import documented

# Options of the trainer, by the key that each replaces or stands for.
_OPTIONS = {
    "data.batch_size": "batch_size",
    "keep_effective_batch_size": "keep_effective_batch_size",
    "epochs": "epochs",
    "optimizer.lr": "lr",
    "checkpoint_dir": "checkpoint_dir",
    NAME_KEY: "experiment_name",
    MODEL_KEY: "model_path_override",
    "data.tokenizer_name_or_path": "model_path_override",
    TRAIN_KEY: "train_data_override",
    VALIDATION_KEY: "val_data_override",
    "resume_checkpoint": "resume_checkpoint",
    "use_wandb": "use_wandb",
    "wandb_project_name": "wandb_project_name",
    "wandb_entity": "wandb_entity",
}
# Where the trainer's guide says that it is: there every start has a folder with its time.
_LINKS = {"{base}/{name}_{time}/train.log": "logs/process_0.log"}
# Those with commas between paths.
_PATHS = (TRAIN_KEY, VALIDATION_KEY)
# The model's camera slots, and the columns of the trainer's files.
_CAMERAS = {"base_0_rgb": "image_1", "left_wrist_0_rgb": "image_2"}
# Flags of the config that one on the command line replaces, besides that of its own name.
_REPLACED = {"--num-train-steps": ("--num-epochs",)}


def experiment_of(request: VlaRequest, given: Sequence[str]) -> tuple[Experiment, list[str]]:
    """The experiment of a config, and flags that are still to be applied to it: the config's, then the `given` ones.

    Logs what became of every key, and sets the team at Weights & Biases. Raises RunError, saying what to do.
    """
    translated = translate_vla(read_yaml(request.config), _replacing(request), name=Path(request.config).stem)
    translated.tell(request.config, KEYS)
    if translated.entity is not None:
        os.environ.setdefault("WANDB_ENTITY", translated.entity)
    documented(_LINKS)
    with reported_as(UsageError):
        base = registry.load(request.experiment)
    if not isinstance(base.model, PaliGemmaFlowConfig):
        raise UsageError(
            f"--experiment {request.experiment} trains a {type(base.model).__name__}; the config is for a PaliGemma "
            "with a flow head, such as paligemma_flow"
        )
    kept = not_replaced(translated.flags, given, _REPLACED)
    return training(base, translated), [*going_on([word for flag in kept for word in flag], given), *given]


def training(base: Experiment, translated: TranslatedVla) -> Experiment:
    """`base` on the config's dataset, with the trainer's values for all else. Raises UsageError, DataError."""
    where, held_out = _only(TRAIN_KEY, translated.datasets), _only(VALIDATION_KEY, translated.validation)
    if where is not None:
        base = on_dataset(base, _source(TRAIN_KEY, where))
    data = base.demonstrations
    first = dataclasses.replace(data.datasets[0], robot=_robot(data.datasets[0], translated))
    if held_out is not None:
        first = dataclasses.replace(first, validation=_source(VALIDATION_KEY, held_out))
    rate = LRSchedule(kind="constant", warmup_steps=0, peak_lr=2e-5, decay_steps=None, decay_lr=0.0)
    return dataclasses.replace(
        begun_anew(base, name=NAME, rate=rate, output=DEFAULT_OUTPUT),
        objective=FlowMatching(augment=False),
        data=dataclasses.replace(data, datasets=(first, *data.datasets[1:]), normalization="min_max"),
        seed=123,
        batch_size=8,
        num_epochs=10,
        log_interval=10,
        save_best=True,
        on_nan="skip",
    )


def _only(key: str, paths: Sequence[str]) -> str | None:
    """The path of a key; None without one. Raises UsageError if there are several."""
    if len(paths) > 1:
        raise UsageError(f"{key} has {len(paths)} paths: put the files in one folder and give that")
    return next(iter(paths), None)


def _source(key: str, path: str) -> SourceConfig:
    """The dataset that a key names. Raises DataError and UsageError that name the key, too."""
    try:
        return source_of(path)
    except (DataError, UsageError) as error:
        raise type(error)(f"{key}: {error}") from error


def _robot(dataset: Dataset, translated: TranslatedVla) -> Robot:
    """The robot with as many cameras as the config wants; of parquet files, which name no dims, one of these dims.

    Raises UsageError if dims or cameras differ from the config's.
    """
    robot = dataset.robot
    if isinstance(dataset.source, Parquet):
        return _numbered(dataset.source, translated)
    name = type(robot).__name__
    dims = (
        ("state_dim", translated.state_dims, robot.state_names),
        ("per_action_dim", translated.action_dims, robot.action_names),
    )
    for key, wanted, names in dims:
        if wanted is not None and wanted != len(names):
            raise UsageError(
                f"{key} is {wanted}, and the {name} robot has {len(names)} ({', '.join(names)}): name an experiment "
                "with your robot, --experiment FILE.py:NAME (docs/tutorials/my_robot.md)"
            )
    slots = dict(robot.cameras)
    if translated.cameras is None or translated.cameras == len(slots):
        return robot
    if translated.cameras > len(slots):
        raise UsageError(
            f"use_aux_camera is true, and the {name} robot has one camera ({', '.join(slots)}): name an experiment "
            "with your robot, --experiment FILE.py:NAME (docs/tutorials/my_robot.md)"
        )
    return dataclasses.replace(robot, cameras=dict(list(slots.items())[: translated.cameras]))


def _numbered(source: Parquet, translated: TranslatedVla) -> Numbered:
    """The robot of parquet files: dims as in the config, or else those of the files."""
    state, action = translated.state_dims, translated.action_dims
    if state is None or action is None:
        with reported_as(DataError):
            shapes = source.column_shapes()
        state = math.prod(shapes.get("state", ())) if state is None else state
        action = math.prod(shapes.get("action", ())) if action is None else action
    cameras = dict(list(_CAMERAS.items())[: translated.cameras or 1])
    return Numbered(num_state_dims=state, num_action_dims=action, cameras=cameras)


def _replacing(request: VlaRequest) -> dict[str, Any]:
    """The options as values by key."""
    found = given_fields(request, *dict.fromkeys(_OPTIONS.values()))
    values = {key: found[option] for key, option in _OPTIONS.items() if found.get(option) not in (None, False)}
    return {key: value.split(",") if key in _PATHS else value for key, value in values.items()}
