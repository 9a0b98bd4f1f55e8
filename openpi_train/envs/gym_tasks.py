"""Tasks of Gymnasium packages by short name, with the names and limits that published datasets and results have.

| name | package | what is as in |
|---|---|---|
| `aloha:transfer_cube`, `aloha:insertion` | gym-aloha | LeRobot's `aloha_sim_*` datasets and its evaluation |
| `pusht`, `pusht:keypoints` | gym-pusht | LeRobot's `pusht`, `pusht_keypoints`: success at a coverage of .95 |
| `fetch:reach`, `push`, `slide`, `pick_and_place` | gymnasium-robotics | Plappert et al. 2018: success at step 50 |

Read next: `gym_env.py`.
"""

import dataclasses
import difflib
import importlib.util
from typing import Any

from openpi_train.runtime.exits import UsageError


@dataclasses.dataclass(frozen=True)
class _Package:
    """A package on the index, its module, and the fields of `GymEnv` for each of its tasks and for all."""

    name: str
    module: str
    tasks: dict[str, dict[str, Any]]
    common: dict[str, Any]


_ALOHA = "gym_aloha/Aloha{}-v0"
_FETCH = "gymnasium_robotics:Fetch{}-v4"
_PUSHT = "gym_pusht/PushT-v0"
_PACKAGES = {
    "aloha": _Package(
        "gym-aloha",
        "gym_aloha",
        {
            "transfer_cube": {"source": _ALOHA.format("TransferCube"), "prompt": "Transfer cube"},
            "insertion": {"source": _ALOHA.format("Insertion"), "prompt": "Insert the peg into the socket"},
        },
        # The limit is LeRobot's: gym-aloha's own 300 steps are fewer than many demonstrations have.
        {"make": ("obs_type=pixels_agent_pos",), "step_limit": 400, "rate_hz": 50.0},
    ),
    "pusht": _Package(
        "gym-pusht",
        "gym_pusht",
        {
            "": {"make": ("obs_type=pixels_agent_pos",), "camera_names": ("image=pixels",)},
            "keypoints": {"make": ("obs_type=environment_state_agent_pos",)},
        },
        {"source": _PUSHT, "prompt": "Push the T-shaped block onto the T-shaped target."},
    ),
    "fetch": _Package(
        "gymnasium-robotics",
        "gymnasium_robotics",
        {
            "reach": {"source": _FETCH.format("Reach"), "prompt": "move the gripper to the goal"},
            "push": {"source": _FETCH.format("Push"), "prompt": "push the block to the goal"},
            "slide": {"source": _FETCH.format("Slide"), "prompt": "slide the puck to the goal"},
            "pick_and_place": {"source": _FETCH.format("PickAndPlace"), "prompt": "bring the block to the goal"},
        },
        {"success_at": "last"},
    ),
}


def fields_of(kind: str, task: str) -> dict[str, Any]:
    """The fields of the `GymEnv` of this task. Raises UsageError for a task or package that is not there."""
    package = _PACKAGES[kind]
    if task not in package.tasks:
        close = difflib.get_close_matches(task.lower(), package.tasks, n=1, cutoff=0.4)
        has = ", ".join(f"{kind}:{name}".removesuffix(":") for name in package.tasks)
        hint = f"; did you mean {kind}:{close[0]}?" if close else ""
        raise UsageError(f"there is no {kind}:{task}{hint} There are {has}")
    if importlib.util.find_spec(package.module) is None:
        raise UsageError(f"{kind}:{task} needs {package.name}: pip install 'openpi_train[{kind}]'")
    return {**package.common, **package.tasks[task]}
