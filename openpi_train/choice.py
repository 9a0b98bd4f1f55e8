"""Put an experiment on the dataset, the model or the environment of the command line; choose among several by dims.

Read next: `registry.py`, which loads them.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import re
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.core import cache_folders
from openpi_train.data.core.dataset_flags import numbered
from openpi_train.data.core.hub import SCHEME
from openpi_train.data.core.source import SourceConfig, column_name
from openpi_train.data.formats.detection import source_at
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.lerobot.described import camera_names, described
from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.formats.zarr.described_store import described_store, store_cameras
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.windows import require_cameras
from openpi_train.data.text.first_records import first_kind
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.data.text.text_files import ENDINGS, find_files
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.env import Env
from openpi_train.experiment import Experiment
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig
from openpi_train.models.exact_policy import ExactPolicyConfig
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.language_part import language_of, with_language
from openpi_train.models.model_config import PolicyConfig
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.smolvla import SmolVlaConfig
from openpi_train.rl.rewards.text_reward import TextReward
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.rl.text_rl import TextRL
from openpi_train.robots.dataset_arm import DatasetArm
from openpi_train.runtime.exits import DataError, UsageError, reported_as

logger = logging.getLogger(__name__)

_NO_CAMERA = "none"  # the feature of a camera slot that is left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByActionDim:
    """Several experiments under one name, selected by the number of dims of the dataset's action `column`.

    The dataset is that of the first experiment, unless the command line names another.
    """

    experiments: Mapping[int, Experiment]
    column: str = "action"

    def choose(self, name: str, on: Callable[[SourceConfig], SourceConfig] | None = None) -> tuple[int, Experiment]:
        """The dims of the dataset (after applying `on`, if given) and the experiment for them; `name` is that of the
        choice.

        Raises DataError if the dataset cannot be opened, lacks the column, or has dims without an experiment.
        """
        source = next(iter(self.experiments.values())).demonstrations.datasets[0].source
        source = source if on is None else on(source)
        with reported_as(DataError):
            shapes = source.column_shapes()
        place = source.location or type(source).__name__
        found = ", ".join(f"{column} {list(shape)}" for column, shape in sorted(shapes.items()))
        shape = shapes.get(self.column)
        if shape is None or len(shape) != 1 or shape[0] not in self.experiments:
            what = f"{list(shape)} per step there" if shape else "no such column"
            known = ", ".join(map(str, sorted(self.experiments)))
            raise DataError(
                f"{name} is chosen by the dims of the column {self.column!r}, and {place} has {what} "
                f"(it has {found or 'no columns'}). Known: {known} dims. Give another dataset with --dataset PATH; "
                "a LeRobot dataset or zarr store of any dims trains with --data.robot recorded: "
                f"python -m openpi_train {name} --exp-name NAME --dataset {shlex.quote(place)} --data.robot recorded"
            )
        return shape[0], self.experiments[shape[0]]


def source_of(path: str) -> SourceConfig:
    """A robot dataset at `path`; its format is detected. Raises DataError if there is none, UsageError for texts."""
    try:
        with reported_as(DataError):
            return source_at(path)
    except DataError as error:
        with contextlib.suppress(FileNotFoundError):
            find_files(path)
            raise UsageError(
                f"{path} holds texts, which train a language model: lm_sft, lm_dpo or lm_grpo --dataset {path}"
            ) from None
        raise DataError(
            f"{str(error).removesuffix('.')}. A language model's experiment, such as lm_sft, takes texts: a file or a "
            f"folder of {', '.join(ENDINGS)}, or hub:USER/NAME"
        ) from error


def moved(source: SourceConfig, argv: Sequence[str]) -> SourceConfig:
    """The source with the path that the flags give for the first dataset, if any."""
    words = [part for word in argv for part in word.split("=", 1)]
    path = dict(itertools.pairwise(words)).get("--data.datasets.0.source.path")
    return source if path is None else dataclasses.replace(source, path=path)  # pyright: ignore[reportCallIssue]


def on_dataset(experiment: Experiment, source: SourceConfig) -> Experiment:
    """The experiment on only this dataset, with new norm stats, and with the robot of its first dataset.

    An experiment without a dataset takes the robot that this one describes, as `on_features` does, and raises as it.
    """
    first = next(iter(experiment.demonstrations.datasets), None)
    if first is None:
        robot = _robot_of(source, experiment.policy, experiment.name)
        return _with_robots(experiment, [Dataset(source=source, robot=robot)])
    first = dataclasses.replace(first, source=source, asset_id=None, norm_stats=None, validation=None)
    return _on_datasets(experiment, [first])


def on_texts(experiment: Experiment, path: str) -> Experiment:
    """The experiment on only the texts at this path: one that it has keeps its fields. Of prompts a policy may learn
    with their references, or without: that, the first record says. Raises DataError if it cannot be read.
    """
    mixed = _mixed_texts(experiment, [(path, 1.0)])
    if experiment.rl is None or not isinstance(mixed.data, TextData) or path.startswith(SCHEME):
        return mixed
    with reported_as(DataError):
        found = first_kind(mixed.data.datasets[0])
    kind = {"prompt only": "prompts", "prompt/completion": "texts"}.get(found, mixed.data.kind)
    return dataclasses.replace(mixed, data=dataclasses.replace(mixed.data, kind=kind))


def is_on(experiment: Experiment, source: SourceConfig) -> bool:
    """Whether this is the experiment's only dataset."""
    return [dataset.source for dataset in experiment.demonstrations.datasets] == [source]


def on_repo_id(experiment: Experiment, repo_id: str) -> Experiment:
    """The experiment with its only dataset replaced by a LeRobot one, a folder or a name on the hub, as openpi does it.

    Norm stats that belong to the dataset get its name; those of a robot stay. Raises UsageError for several datasets.
    """
    datasets = experiment.demonstrations.datasets
    path = repo_id if Path(repo_id).expanduser().is_dir() else cache_folders.lerobot(repo_id)
    old = next(iter(datasets), None)
    if old is None:
        return on_dataset(experiment, LeRobot(path=path))
    if len(datasets) > 1:
        raise UsageError(f"--data.repo-id is for one dataset, and {experiment.name} has {len(datasets)}")
    own = old.asset_id is not None and old.source.location == cache_folders.lerobot(old.asset_id)
    new = dataclasses.replace(old, source=LeRobot(path=path), asset_id=repo_id.strip("/") if own else old.asset_id)
    return dataclasses.replace(experiment, data=dataclasses.replace(experiment.demonstrations, datasets=(new,)))


def on_features(experiment: Experiment, *, relative: bool) -> Experiment:
    """The experiment with the robots that its datasets describe (LeRobot's `described.py`, `described_store.py`).

    A model without padded dims gets the first one's dims and cameras. Norm stats are those of the datasets, and no
    environment is evaluated in. Raises UsageError for other datasets, or a run that learns from its own rollouts;
    DataError if features are missing.
    """
    data, model = experiment.demonstrations, experiment.policy
    robots = [_robot_of(one.source, model, "--data.robot", relative=relative) for one in data.datasets]
    return _with_robots(
        experiment,
        [
            dataclasses.replace(one, robot=robot, asset_id=None, norm_stats=None)
            for one, robot in zip(data.datasets, robots, strict=True)
        ],
    )


def _robot_of(source: SourceConfig, model: PolicyConfig, who: str, *, relative: bool = False) -> DatasetArm:
    """The robot that a dataset describes; `who` reads it. Raises as `on_features`."""
    with reported_as(DataError):
        if isinstance(source, LeRobot):
            return described(source.location, model.known_slots, relative=relative)
        if isinstance(source, Zarr):
            return described_store(source, model.known_slots, relative=relative)
    raise UsageError(
        f"{who} is for LeRobot datasets and zarr stores, which say dims and cameras, and {source.location} is "
        f"{type(source).__name__}: convert it (`data convert {source.location or 'PATH'} NEW --to lerobot`), take an "
        "experiment of its robot (`list`), or write a class for the robot (docs/tutorials/my_robot.md)"
    )


def _with_robots(experiment: Experiment, datasets: Sequence[Dataset]) -> Experiment:
    """The experiment on these datasets of robots that are described, and without evaluations in an environment."""
    if experiment.rl is not None:
        raise UsageError(
            f"--data.robot: {experiment.name} learns from rollouts with a robot of its environment; train another "
            "experiment"
        )
    robots = [one.robot for one in datasets if isinstance(one.robot, DatasetArm)]
    model = experiment.policy
    if robots:
        model = model.for_robot(len(robots[0].state_dims), len(robots[0].action_dims), tuple(robots[0].cameras))
    evaluated = dataclasses.replace(experiment.robot_eval, closed_loop=ClosedLoop())
    return _on_datasets(dataclasses.replace(experiment, model=model, eval=evaluated), datasets)


def with_chosen_cameras(experiment: Experiment) -> Experiment:
    """The experiment whose robots have no camera that its flags leave out; logs which these are.

    They are those whose feature is `none`, and, for a model with cameras of its own (`--model.cameras`), those that it
    does not have, if robots have the others.
    """
    data, model = experiment.data, experiment.model
    if not isinstance(data, DataConfig):
        return experiment
    slots = {slot for one in data.datasets for slot, feature in one.robot.cameras.items() if feature != _NO_CAMERA}
    if isinstance(model, ExactPolicyConfig):
        named = {slot for one in data.datasets for slot in one.robot.cameras}
        own = [slot for slot in model.cameras if slot in slots or slot not in named]
        if {*own} <= slots:
            slots = {*own}
        if len(own) < len(model.cameras):
            model = dataclasses.replace(model, cameras=tuple(own))
    datasets = []
    for one in data.datasets:
        kept = {slot: name for slot, name in one.robot.cameras.items() if slot in slots and name != _NO_CAMERA}
        if left := [slot for slot in one.robot.cameras if slot not in kept]:
            logger.info("%s: left out by the flags: the camera %s", one.asset, ", ".join(left))
            one = dataclasses.replace(one, robot=dataclasses.replace(one.robot, cameras=kept))
        datasets.append(one)
    if datasets == [*data.datasets]:
        return experiment
    return dataclasses.replace(_on_datasets(experiment, datasets), model=model)


def tell_robots(experiment: Experiment, before: Experiment) -> None:
    """Log the robots that datasets describe, where they are not those of the experiment `before`."""
    new, old = (one.data.datasets if isinstance(one.data, DataConfig) else () for one in (experiment, before))
    for one in new:
        robot = one.robot
        if one in old or not isinstance(robot, DatasetArm):
            continue
        logger.info(
            "the robot of %s: state %s (%d dims), action %s (%d dims, %s), %g Hz, cameras %s",
            *(one.source.location, robot.state_columns[0], len(robot.state_dims), robot.action_columns[0]),
            *(len(robot.action_dims), "relative to the state but grippers" if robot.relative else "as recorded"),
            robot.rate_hz,
            ", ".join(f"{slot}: {feature}" for slot, feature in robot.cameras.items()) or "none",
        )


def require_robots(
    experiment: Experiment, typed: str | None = None, of_other_dims: Mapping[int, str] = types.MappingProxyType({})
) -> None:
    """Raise DataError, with a command to give, if a dataset lacks what the experiment's robot reads.

    Looks at metadata alone, of LeRobot datasets and zarr stores, whose robot can be described instead. `typed` is the
    word that a command line has for the experiment, where that is not its name, and `of_other_dims` those for the same
    robot with other action dims.
    """
    datasets = experiment.data.datasets if isinstance(experiment.data, DataConfig) else ()
    for number, dataset in enumerate(datasets):
        source = dataset.source
        if isinstance(dataset.robot, DatasetArm) or not isinstance(source, LeRobot | Zarr):
            continue
        with reported_as(DataError):
            cameras = camera_names(source.location) if isinstance(source, LeRobot) else store_cameras(source)
            shapes = source.column_shapes()
        columns = {column_name(name): np.zeros((1, *dims), np.float32) for name, dims in shapes.items()}
        problems = []
        for check in (
            functools.partial(require_cameras, dataset.robot, cameras),
            functools.partial(dataset.robot.read, columns, np.array([1])),
        ):
            try:
                check()
            except ValueError as error:
                problems.append(f"{numbered(str(error), number)}. ")
        if problems:
            name, about = (
                shlex.quote(typed or experiment.name),
                f"--exp-name {experiment.exp_name} --dataset {shlex.quote(source.location)}",
            )
            dims = math.prod(shapes.get("action", ()))
            if dims in of_other_dims and (other := shlex.quote(of_other_dims[dims])) != name:
                problems.append(f"With {dims} action dims: python -m openpi_train {other} {about}. ")
            raise DataError(
                f"{''.join(problems)}{experiment.name} is for {type(dataset.robot).__name__}; if this is another "
                f"robot, take the one that the dataset describes: python -m openpi_train {name} {about} --data.robot "
                f"recorded, or with settings for any robot: python -m openpi_train {_for_any_robot(experiment)} {about}"
            )


def _for_any_robot(experiment: Experiment) -> str:
    """The experiment for any robot that trains a model of this kind (`configs/own_data.py`)."""
    match experiment.model:
        case DiffusionPolicyConfig():
            return "diffusion"
        case SmolVlaConfig():
            return "smolvla"
        case Pi0Config(pi05=pi05):
            return "pi05" if pi05 else "pi0"
    return "act"


def _on_datasets(experiment: Experiment, datasets: Sequence[Dataset]) -> Experiment:
    data = dataclasses.replace(experiment.demonstrations, datasets=tuple(datasets))
    return dataclasses.replace(experiment, data=data)


def weighted_path(word: str) -> tuple[str, float]:
    """The path and the weight of a dataset that is given as PATH[:WEIGHT]. Raises UsageError for a bad weight.

    What follows the last colon is the weight, unless it has a slash or the path would be only the hub's scheme.
    """
    path, colon, text = word.rpartition(":")
    if not colon or "/" in text or f"{path}:" == SCHEME:
        return word, 1.0
    try:
        weight = float(text)
    except ValueError as error:
        raise UsageError(
            f"--data.mixture {word}: the weight {text!r} is no number; needed is PATH or PATH:WEIGHT (for a path that "
            f"ends so: {word}:1)"
        ) from error
    if not path or not 0 < weight < math.inf:
        what = f"the weight {text} must be a number above 0; leave the dataset out instead" if path else "no path"
        raise UsageError(f"--data.mixture {word}: {what}")
    return path, weight


def on_mixture(experiment: Experiment, words: Sequence[str]) -> Experiment:
    """The experiment on these datasets, each given as PATH[:WEIGHT], in place of its own.

    A dataset that the experiment has at the same path keeps its fields. Another one of texts has the columns of its
    type, and a fraction of it is held out; another one of demonstrations has the first one's robot and prompt, and new
    norm stats.

    Raises UsageError for a weight that is none, a path that is given twice, or an experiment without datasets;
    DataError if there are no demonstrations at a path.
    """
    data = experiment.data
    if not isinstance(data, TextData | DataConfig):
        raise UsageError(f"--data.mixture is for texts and demonstrations, and {experiment.name} has none of its own")
    if not words:
        raise UsageError("--data.mixture needs at least one dataset, as PATH or PATH:WEIGHT")
    given = [weighted_path(word) for word in words]
    located = [_place(path) for path, _ in given]
    if twice := sorted({path for path, _ in given if located.count(_place(path)) > 1}):
        raise UsageError(f"--data.mixture has {' and '.join(twice)} twice: give it once, with the sum of the weights")
    if isinstance(data, TextData):
        return _mixed_texts(experiment, given)
    own = {_place(dataset.source.location): dataset for dataset in data.datasets if dataset.source.location}
    if not data.datasets:
        sources = [(source_of(path), weight) for path, weight in given]
        robots = [_robot_of(source, experiment.policy, experiment.name) for source, _ in sources]
        return _with_robots(
            experiment,
            [
                Dataset(source=source, robot=robot, weight=weight)
                for (source, weight), robot in zip(sources, robots, strict=True)
            ],
        )
    first = dataclasses.replace(data.datasets[0], asset_id=None, norm_stats=None, validation=None)
    return _on_datasets(
        experiment,
        [
            dataclasses.replace(
                own[_place(path)] if _place(path) in own else dataclasses.replace(first, source=source_of(path)),
                weight=weight,
            )
            for path, weight in given
        ],
    )


def _mixed_texts(experiment: Experiment, given: Sequence[tuple[str, float]]) -> Experiment:
    """The experiment on the texts of these paths with these weights."""
    data = experiment.data
    assert isinstance(data, TextData)
    texts = {_place(dataset.path): dataset for dataset in data.datasets}
    mixed = tuple(
        dataclasses.replace(texts.get(_place(path), TextDataset(path=path)), weight=weight) for path, weight in given
    )
    return dataclasses.replace(experiment, data=dataclasses.replace(data, datasets=mixed))


def _place(path: str) -> str:
    """The path in the form in which two of one dataset are equal."""
    return path if path.startswith(SCHEME) or "://" in path else os.path.abspath(os.path.expanduser(path))


def on_model(experiment: Experiment, published: LanguageConfig) -> Experiment:
    """The experiment with the sizes, start weights and tokenizer of a published model (`huggingface.named_model`).

    Adapter, number format and all else are the experiment's. Raises UsageError if it trains no language model.
    """
    own = language_of(experiment.model)
    if own is None or published.path is None:
        raise UsageError(
            f"--model.path is for language models, and {experiment.name} trains a {type(experiment.model).__name__}"
        )
    read = {name: getattr(published, name) for name in ("path", "family", "sizes", "context_length")}
    data = experiment.data
    if isinstance(data, TextData):
        data = dataclasses.replace(data, tokenizer=published.path)
    return dataclasses.replace(
        experiment,
        model=with_language(experiment.model, dataclasses.replace(own, **read)),
        data=data,
        weight_loader=CheckpointWeightLoader(params_path=published.path),
    )


def on_env(experiment: Experiment, env: Env) -> Experiment:
    """The experiment with closed-loop evaluations, and RL if it has some, in all tasks of this environment.

    Raises UsageError if it trains no robot policy.
    """
    loop, rl = dataclasses.replace(experiment.robot_eval.closed_loop, env=env, tasks=None), experiment.rl
    if isinstance(rl, RobotRL):
        rl = dataclasses.replace(rl, env=env, tasks=None)
    return dataclasses.replace(experiment, eval=dataclasses.replace(experiment.robot_eval, closed_loop=loop), rl=rl)


def on_rewards(experiment: Experiment, names: Sequence[str]) -> Experiment:
    """The experiment whose completions have these rewards. Raises UsageError if it rewards none, or one is none."""
    if not isinstance(experiment.rl, TextRL):
        raise UsageError(
            f"--reward is for language models that learn from rewards, such as lm_grpo: {experiment.name} does not"
        )
    rewards = tuple(TextReward(name=name) for name in names)
    if problems := [problem for number, reward in enumerate(rewards) for problem in reward.check(number)]:
        raise UsageError("\n".join(problems))
    return dataclasses.replace(experiment, rl=dataclasses.replace(experiment.rl, rewards=rewards))


def with_rewards(experiment: Experiment, argv: Sequence[str]) -> Experiment:
    """The experiment with as many rewards of texts as the command line numbers: `--rl.rewards.1.name NAME`."""
    rl = experiment.rl
    found = [re.match(r"--rl\.rewards\.(\d+)\.name(=|$)", word) for word in argv]
    numbers = {int(one[1]) for one in found if one}
    if not isinstance(rl, TextRL):
        return experiment
    rewards = list(rl.rewards)
    while len(rewards) in numbers:  # beyond a gap a number is an unknown flag
        rewards.append(TextReward(name=""))
    return dataclasses.replace(experiment, rl=dataclasses.replace(rl, rewards=tuple(rewards)))
