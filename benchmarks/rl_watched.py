"""Runs of RL that note, at the beginning and the end of each collection, what their process holds and has used.

`rl_speed.py` runs them, without start weights: what is learnt does not matter.
"""

import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import jax
from openpi_train_configs import metaworld_rl, tabletop_rl

from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.experiment import Experiment
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.rl.robot_actor import RobotActor
from openpi_train.rl.robot_rl import RobotRL

# Below the run's directory.
NOTES = "watched.jsonl"


class WatchedActor(RobotActor):
    """Writes a line at the beginning and the end of each collection."""

    def __init__(self, rl: RobotRL, running: Any):
        super().__init__(rl, running)
        self._notes = running.directory / NOTES

    def begin_iteration(self, number: int) -> None:
        super().begin_iteration(number)
        self._note(number, "begin")

    def end_iteration(self) -> None:
        super().end_iteration()
        self._note(None, "end")

    def _note(self, number: int | None, when: str) -> None:
        arrays = jax.live_arrays()
        line = {
            "iteration": number,
            "when": when,
            "wall_s": time.monotonic(),
            "cpu_s": time.process_time() + sum(_cpu_s(child.pid) for child in multiprocessing.active_children()),
            "resident_mb": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6,
            "arrays": len(arrays),
            "arrays_mb": sum(array.nbytes for array in arrays) / 1e6,
        }
        with self._notes.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedRL(RobotRL):
    """A `RobotRL` whose actor is watched."""

    def actor(self, running: Any, data: Any) -> RobotActor:
        return WatchedActor(self, running)


def _cpu_s(pid: int | None) -> float:
    """CPU seconds of a process so far; 0 if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _watched(experiment: Experiment, **rl: Any) -> Experiment:
    """The experiment, which is not evaluated in its environment, with an actor that is watched."""
    given = {field.name: getattr(experiment.rl, field.name) for field in dataclasses.fields(RobotRL)}
    return dataclasses.replace(
        experiment,
        rl=WatchedRL(**{**given, "num_shown": 0, **rl}),
        eval=dataclasses.replace(experiment.eval, interval=0, num_rows=32, closed_loop=ClosedLoop()),
        num_train_steps=1_000_000,
        save_interval=1_000_000,
    )


tabletop = dataclasses.replace(_watched(tabletop_rl.tabletop_few_rloo), name="tabletop")
"""pi0 on the tabletop, as in `tabletop_few_rloo`."""

_SMALL = GemmaOverrides(width=16, depth=1, mlp_dim=16, num_heads=2, head_dim=8)
tiny = dataclasses.replace(
    _watched(tabletop_rl.tabletop_few_rloo, num_groups=4, group_size=2, max_steps=8, episodes_per_device=8),
    name="tiny",
    model=dataclasses.replace(
        tabletop_rl.tabletop_few_rloo.model,
        language=_SMALL,
        action_expert=_SMALL,
        siglip=SiglipConfig(width=16, depth=1, mlp_dim=16, num_heads=2, patch_size=16),
    ),
    batch_size=8,
)
"""An iteration is eight episodes of eight control steps, and one optimizer step on them."""

# The policy is queried at every control step, so that it takes about as long as the simulators.
metaworld = dataclasses.replace(
    _watched(metaworld_rl.metaworld_rloo, execute=1, episodes_per_device=32), name="metaworld"
)
"""Meta-World's reach in worker processes, with four batches of episodes in two slots."""
