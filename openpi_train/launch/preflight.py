"""What a start would refuse, found out before it waits in a queue: the command is asked, in a process without devices.

Launchers use the standard library alone, so the run's own code looks (`training/dry_run.py`), where `VARIABLE` tells
it to. Read next: `slurm.py`, a caller.
"""

import dataclasses
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from openpi_train import faults
from openpi_train.launch import own_python
from openpi_train.launch.spec import LaunchError, this_python

# The number of the run's devices: a process with it says whether a start on them would be refused, and starts nothing.
VARIABLE = "OPENPI_TRAIN_CHECK_DEVICES"
# Set where the run's files are not on this machine: then only the command line is checked.
_WITHOUT_FILES = "OPENPI_TRAIN_CHECK_WITHOUT_FILES"
# Variables that other launchers leave in a shell; a process would use them as its identity.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# What the run prints, for launchers, before `RunSizes` as JSON.
SIZES_LINE = "sizes: "
_MOST_S = 180
_REFUSED = (faults.USAGE, faults.DATA, faults.CHECKPOINT, faults.INDIVISIBLE)
_MOST_LINES = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """What the devices of a run share: its rows per step, of which the devices of a tensor group hold the same.

    `replica_devices`: how many devices hold one copy of the state, as given to the run.
    """

    rows: int
    tensor_devices: int
    replica_devices: int

    def can_share_batch(self, num_devices: int) -> bool:
        """Whether so many devices can have equally many rows."""
        return num_devices % self.tensor_devices == 0 and self.rows % (num_devices // self.tensor_devices) == 0

    def make_replicas(self, num_devices: int) -> bool:
        """Whether so many devices are whole replicas; if not, fewer devices than before must hold a copy of the
        state, each a larger part."""
        return num_devices % self.replica_devices == 0


def devices() -> int | None:
    """The number of devices for which this process is to check the start, 0: not known; None: it is to start."""
    text = os.environ.get(VARIABLE, "")
    return int(text) if text.isdecimal() else None


def has_files() -> bool:
    """Whether the run's files are on this machine."""
    return _WITHOUT_FILES not in os.environ


def require_start(
    arguments: Sequence[str],
    *,
    num_devices: int,
    python: str = sys.executable,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    has_files: bool = True,
    host: Sequence[str] = (),
) -> None:
    """Raise LaunchError with what a start of these arguments would refuse, as far as it is soon known here.

    What cannot be checked is said.

    Args:
        num_devices: those of the run; 0: not known here.
        has_files: whether the run's files are here (a container has its own); if not, only the command line counts.
        host: the words of an ssh command that runs its last argument on another machine, which is asked instead, with
            its `python` in its `folder`.
    """
    # Where it lacks them the processes have another Python, of a container.
    if not host and python == sys.executable and (problem := own_python.lacking()):
        _tell_unchecked(problem[0])
        return
    sys.stderr.write("launch: looking whether the run would start (--no-check: not) ...\n")
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    asked = {VARIABLE: str(num_devices), "JAX_PLATFORMS": "cpu", **({} if has_files else {_WITHOUT_FILES: "1"})}
    command = [python, "-m", "openpi_train", *arguments]
    if host:
        words = [f"{name}={shlex.quote(value)}" for name, value in {**(env or {}), **asked}.items()]
        command = [*host, f"cd {shlex.quote(str(folder or '.'))} && exec env {' '.join(words)} {shlex.join(command)}"]
    try:
        done = subprocess.run(
            command,
            cwd=None if host else folder,
            env=clean if host else {**clean, **(env or {}), **asked},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MOST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        _tell_unchecked(f"it took longer than {_MOST_S} s")
        return
    except OSError as error:
        _tell_unchecked(str(error))
        return
    said = done.stderr.strip().splitlines()
    if done.returncode in (_REFUSED if has_files else (faults.USAGE, faults.INDIVISIBLE)):
        found = next((number for number, line in enumerate(said) if re.match(r"\d\d:\d\d:\d\d E |error:|╭", line)), 0)
        raise LaunchError(
            "\n".join(
                [
                    "the run would not start, so nothing was begun (--no-check: all the same):",
                    *said[found:][:_MOST_LINES],
                ]
            ),
            done.returncode,
        )
    if has_files and said and re.match("(ModuleNotFoundError|.*python[0-9.]*): No module named", said[-1]):
        raise LaunchError(
            f"{python} cannot start the run, so nothing was begun (--no-check: all the same): {said[-1]}\n"
            "Give an environment in which openpi_train is installed (--venv), or install it there (docs/install.md)"
        )
    if done.returncode:
        _tell_unchecked(said[-1] if said else f"exit code {done.returncode}")
    elif notes := [line for line in done.stdout.splitlines() if line.startswith("not checked:")]:
        sys.stderr.write("\n".join([f"launch: {note}" for note in notes]) + "\n")


@functools.cache
def sizes_of_run(arguments: tuple[str, ...], num_devices: int, folder: str) -> RunSizes | None:
    """The sizes of the run on so many devices, as the run itself says; None if it does not within a minute."""
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    variables = {**clean, VARIABLE: str(num_devices), "JAX_PLATFORMS": "cpu"}
    command = [this_python(), "-m", "openpi_train", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(rf"^{SIZES_LINE}(.*)$", done.stdout, re.MULTILINE)
    return RunSizes(**json.loads(found[1])) if found else None


def _tell_unchecked(why: str) -> None:
    sys.stderr.write(f"launch: whether the run would start was not found out here: {why}\n")
