"""`simulators_of`: what a run's simulators keep in a host's memory. Read next: `envs/env_pool.py`, which holds them."""

import dataclasses
from typing import Any

from openpi_train.envs.env import Env
from openpi_train.evaluation.eval_config import EvalConfig
from openpi_train.experiment import Experiment
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.runtime.device_kinds import GIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulators:
    """The most simulators of an environment that are open on a host at a time, and the flag that decides how many.

    `gib` is what all of them keep; None: their size is not known.
    """

    name: str
    purpose: str
    flag: str
    per_host: int
    gib: float | None

    def words(self) -> str:
        """One sentence, for the text of a plan."""
        size = "their size is not known" if self.gib is None else f"about {self.gib:.1f} GiB of its memory"
        return f"simulators for {self.purpose}: {self.per_host} of {self.name} on each host, {size} ({self.flag})"

    def as_json(self) -> dict[str, Any]:
        """All numbers; bytes, or null where they are not known."""
        size = None if self.gib is None else int(self.gib * GIB)
        return {"environment": self.name, "purpose": self.purpose, "per_host": self.per_host, "bytes_per_host": size}


def simulators_of(experiment: Experiment, devices_per_host: int) -> list[Simulators]:
    """Those of evaluations and of rollouts, of environments whose episodes have a simulator each.

    Both are open at the same time: those that wait are kept for the next evaluation, or iteration.
    """
    evaluations, rl, found = experiment.eval, experiment.rl, []
    if isinstance(evaluations, EvalConfig):
        loop = evaluations.closed_loop
        count = loop.episodes_per_device * devices_per_host
        found += simulators_in(loop.env, "evaluations", "--eval.closed-loop.episodes-per-device", count)
    if isinstance(rl, RobotRL):
        count = min(rl.slots * rl.episodes_per_device * devices_per_host, rl.num_rollouts)
        found += simulators_in(rl.env, "rollouts", "--rl.episodes-per-device, --rl.num-slots", count)
    return found


def simulators_in(env: Env, purpose: str, flag: str, per_host: int) -> list[Simulators]:
    """Those of so many episodes at a time; none where its episodes have no simulator."""
    size = env.simulator_gib
    if size == 0 or not env.tasks:
        return []
    gib = None if size is None else size * per_host
    return [Simulators(name=env.name, purpose=purpose, flag=flag, per_host=per_host, gib=gib)]
