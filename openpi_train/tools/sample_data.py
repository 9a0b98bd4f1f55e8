"""The `data sample` verb: a dataset of demonstrations from a simulator, in a format that other tools read, too.

The scripted expert acts, its episodes are collected (`collect.py`), and a conversion writes them
(`data/make/convert.py`) beside OUT, which appears when all is written and read back.

The simulation runs in 64 bits, and what it records is rounded to 32: processors that round otherwise, with fused
multiplications or without, then give the same bytes. Read next: `collect.py`, `data/make/convert.py`.
"""

import dataclasses
import logging
import shlex
import shutil
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from openpi_train.data.core.held_out import validation_episodes
from openpi_train.data.core.source import About, Source
from openpi_train.data.formats.conversion import Pictures
from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.make.convert import convert
from openpi_train.envs.named_envs import environment
from openpi_train.envs.task_choice import chosen_tasks
from openpi_train.robots.metaworld import MetaWorld
from openpi_train.robots.robot import Robot
from openpi_train.robots.tabletop import Tabletop
from openpi_train.runtime.exits import DataError
from openpi_train.tools.atomic_output import drafted
from openpi_train.tools.collect import collect

logger = logging.getLogger(__name__)

SampleFormat = Literal["lerobot", "rlds", "zarr"]
# How each format stores pictures: as most public datasets in it do.
_PICTURES: dict[SampleFormat, Pictures] = {"lerobot": "av1", "rlds": "jpeg", "zarr": "png"}
# Of each environment the robot, which names its dims, and the tasks that are recorded by default.
_ROBOTS: dict[str, Robot] = {"tabletop": Tabletop(), "metaworld": MetaWorld()}
DEFAULT_TASKS = {
    "tabletop": ("reach_red", "pick_yellow", "push_left_green", "plate_blue"),
    "metaworld": ("reach", "button-press", "drawer-close"),
}
# Of each environment an experiment that trains on its sample, with what it needs to be told.
_TRAINING = {
    "tabletop": "tabletop_act --dataset {path}",
    "metaworld": "metaworld_mt5_dp --dataset {path} --data.datasets.0.robot.state-columns observation/state",
}
# The part of the episodes that this experiment holds out.
HELD_OUT = 0.1
# Meanwhile every picture is on disk twice, as pixels; an episode has about this many.
_PICTURES_OF_AN_EPISODE = 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was written, in words; the number of episodes, and how many of them the training command holds out."""

    account: str
    num_episodes: int
    num_held_out: int


def sample(
    out: Path,
    *,
    form: SampleFormat,
    env_name: str,
    tasks: tuple[str, ...],
    episodes_per_task: int,
    image_size: int,
    seed: int,
    overwrite: bool,
) -> Sampled:
    """Write the dataset `out`; none is there before it is complete.

    The same arguments give the same states, actions and instructions on every machine.

    Args:
        tasks: names; none: the environment's `DEFAULT_TASKS`.
        image_size: pixels of a side of the pictures.
        overwrite: whether what is at `out` is moved aside.

    Raises:
        UsageError: `out` exists, or the environment's package is missing.
        ValueError: there is no such environment or task.
        DataError: it cannot be written; nothing is left then.
    """
    if env_name not in _ROBOTS:
        raise ValueError(f"there is no sample of {env_name!r}; there are {', '.join(_ROBOTS)}")
    env = environment(env_name, image_size=image_size)
    env.require()
    wanted = tasks or DEFAULT_TASKS[env_name]
    chosen_tasks(env, wanted)
    target = Path(out).expanduser().absolute()
    num_pictures = len(wanted) * episodes_per_task * _PICTURES_OF_AN_EPISODE * len(env.cameras)
    needed = 2 * num_pictures * image_size**2 * 3
    with drafted(target, needed, overwrite, DataError) as draft:
        stages, index = draft / "stages", str(draft / "index")
        collected, whole = stages / "collected.zarr", stages / target.name
        stages.mkdir(parents=True)
        with jax.enable_x64(True):
            found = collect(env, collected, tasks=wanted, episodes_per_task=episodes_per_task, seed=seed)
        for one in found:
            logger.info("%s", one.text())
        source = _Recorded(
            Zarr(path=str(collected), cache_dir=index, decoded_copy=True).open(), env_name, env.control_hz
        )
        account = convert(source, whole, form, pictures=_PICTURES[form], cache_dir=index).text()
        num_held_out = int(validation_episodes(source.episode_ids, HELD_OUT).sum())
        for path in list(whole.iterdir()):
            path.rename(draft / path.name)
        shutil.rmtree(stages)
        shutil.rmtree(index, ignore_errors=True)
    return Sampled(account=account, num_episodes=source.num_episodes, num_held_out=num_held_out)


def next_commands(out: Path, env_name: str) -> list[str]:
    """The commands to go on with: look at the dataset, check it, train on it."""
    path = shlex.quote(str(out))
    training = _TRAINING[env_name].format(path=path)
    return [
        f"python -m openpi_train data inspect {path} --out look",
        f"python -m openpi_train data check {path}",
        f"python -m openpi_train {training} --data.validation-fraction {HELD_OUT} --exp-name first",
    ]


class _Recorded(Source):
    """The collected demonstrations in 32 bits, with the names and the description that public datasets have."""

    def __init__(self, collected: Source, env_name: str, control_hz: float):
        self._collected, robot = collected, _ROBOTS[env_name]
        names = {"state": ("observation/state", robot.state_names), "action": ("action", robot.action_names)}
        self.columns = {names[name][0]: np.asarray(column, np.float32) for name, column in collected.columns.items()}
        self._about = About(control_hz, dict(names.values()), robot_type=env_name)
        self._cameras = {f"observation/{name}": name for name in collected.cameras}
        self.cameras = tuple(self._cameras)
        for name in ("fingerprint", "episode_ends", "episode_ids", "prompts", "prompt_index"):
            setattr(self, name, getattr(collected, name))

    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        return self._collected.frames(steps, self._cameras[camera])

    def about(self) -> About:
        return self._about

    def describe(self, step: int) -> str:
        return self._collected.describe(step)
