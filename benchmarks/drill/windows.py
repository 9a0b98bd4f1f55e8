"""Windows: named places of the program in which faults strike. Read next: `inside/sitecustomize.py`, `harms.py`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).with_name("inside")


@dataclasses.dataclass(frozen=True)
class Window:
    """A function of openpi_train: its module, where it is looked up, and its name there.

    `usual_s`: faults strike at a random time until then. `of_process_0`: no other calls it.
    """

    module: str
    function: str
    usual_s: float = 0.5
    of_process_0: bool = False


_STORE, _DIRS = "checkpoints.checkpoint_store", "checkpoints.step_dirs"
# In the order in which a start comes to them. It does so once, while the last fault is being mended.
STARTING = {
    "rendezvous": Window("runtime.session", "meet", 1.0),
    "restore": Window(_STORE, "Checkpoints.restore"),
    "compile": Window("training.run", "Run.compile_step", 1.0),
    "first step": Window("training.program", "Programs.__call__", 0.2),
}
# A run that trains comes to them again and again.
RUNNING = {
    "step": Window("training.program", "Programs.__call__", 0.1),
    "evaluation": Window("training.run", "Run.evaluate", 0.2),
    "save copy": Window(_STORE, "fetch_share", 0.05),
    "save write": Window("checkpoints.copy_out", "ArrayWriter.write"),
    "commit": Window(_STORE, "write_manifest", 0.05, of_process_0=True),
    "naming": Window(_DIRS, "StepDirs.commit", 0.02, of_process_0=True),
    "link": Window(_DIRS, "StepDirs.link_latest", 0.02, of_process_0=True),
    "delete": Window(_DIRS, "_remove", 0.05, of_process_0=True),
    "local save": Window("checkpoints.local_files", "write", 0.1),
    "acting": Window("rl.rollout_feed", "RolloutFeed._collect", 0.5),
}
# Of some kinds only.
DEVICES = Window("training.start", "require_devices", 0.0)
WINDOWS = {**STARTING, **RUNNING, "look at the devices": DEVICES}


@dataclasses.dataclass(frozen=True)
class Fired:
    """Where and when (`time.monotonic`) a harm was done, and in which start."""

    host: str
    at: float
    token: str


class Armed:
    """Harms that wait in processes, as files in `folder`, which all hosts see."""

    def __init__(self, folder: Path):
        self.folder, self._number = folder, 0
        folder.mkdir(parents=True, exist_ok=True)

    def arm(
        self,
        rank: int,
        window: str,
        harm: str,
        value: Any = None,
        *,
        after_s: float = 0.0,
        times: int = 1,
        not_token: str = "",
    ) -> None:
        """Have the process of this rank do harm in its next call of the window; `not_token`: in no process of the start
        with this token."""
        place = WINDOWS[window]
        self._number += 1
        fault = {
            "number": self._number,
            "module": place.module,
            "function": place.function,
            "harm": harm,
            "value": value,
        }
        draft = self.folder / f"rank_{rank}.draft"
        draft.write_text(json.dumps({**fault, "after_s": after_s, "times": times, "not_token": not_token}))
        draft.replace(self.folder / f"rank_{rank}.json")

    def fired(self, rank: int) -> Fired | None:
        """Where it was done; None: not yet."""
        try:
            return Fired(**json.loads((self.folder / f"fired_{rank}.json").read_text()))
        except FileNotFoundError:
            return None

    def forget(self, rank: int) -> None:
        """Let a process go on that is held, and arm nothing any more."""
        for name in (f"fired_{rank}.json", f"rank_{rank}.json"):
            (self.folder / name).unlink(missing_ok=True)
