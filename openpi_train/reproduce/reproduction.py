"""`Reproduction`, an entry of the board: the command lines that make a result, and what was published for it.

In command lines `{data}` is the folder of the data, and `{run}` that of the training run. Read next: `board.py`.
"""

import dataclasses
import importlib.util
import shlex
from collections.abc import Mapping
from pathlib import Path

# The name of the training run.
RUN = "x"
# What a command begins with that this program runs itself.
_OWN = "data "


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """A success rate that others have published, from 0 to 1; `source` says who, and by which protocol."""

    success: float
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One result: how its data are made, how it is trained and evaluated."""

    name: str
    what: str
    # The command that makes each file or folder, in this order: one of this program (`data ...`), or of others, which
    # the user runs. Without any, the run makes or knows its data.
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The training command; empty: published weights are evaluated.
    train: str = ""
    # Evaluations by name, each an `eval` command.
    evaluations: Mapping[str, str]
    # The extra of this package that the simulator needs, and the module that it brings.
    extra: str = ""
    module: str = ""
    machine: str = "2 CPU cores"
    # Wall minutes of all of it on that machine; None: not measured.
    minutes: float | None = None
    # Devices of the run where jax computes on CPUs, over all processes: as many give equal bits.
    cpu_devices: int = 2
    published: PublishedFigure | None = None

    def data_commands(self, folder: Path) -> dict[Path, str]:
        """The command that makes each path, for the results' folder."""
        return {Path(_filled(path, folder)): _filled(command, folder) for path, command in self.data.items()}

    def train_words(self, folder: Path) -> list[str]:
        """The words of the training command, which goes on with what is there; none without a training."""
        if not self.train:
            return []
        places = f"--checkpoint-base-dir {folder / 'runs'} --assets-base-dir {folder / 'assets'}"
        return shlex.split(f"{_filled(self.train, folder)} --exp-name {RUN} {places} --resume")

    def evaluation_words(self, folder: Path) -> dict[str, list[str]]:
        """The words of each evaluation's command after `eval`, by its name."""
        run = folder / "runs" / (self.train.split() or [""])[0] / RUN
        return {
            name: shlex.split(
                f"{_filled(command, folder).replace('{run}', str(run))} --out {self.results(folder, name)}"
            )[1:]
            for name, command in self.evaluations.items()
        }

    def run_folder(self, folder: Path) -> Path:
        """The directory of the training run."""
        return folder / "runs" / self.train.split()[0] / RUN

    def results(self, folder: Path, name: str) -> Path:
        """The folder of an evaluation's results."""
        return folder / "eval" / name

    @property
    def lacking(self) -> str:
        """What to install before it can run; empty: nothing."""
        if not self.module or importlib.util.find_spec(self.module) is not None:
            return ""
        return f"{self.name} needs {self.module}: pip install 'openpi_train[{self.extra}]'"


def is_own(command: str) -> bool:
    """Whether this program runs the command itself."""
    return command.startswith(_OWN)


def _filled(command: str, folder: Path) -> str:
    return command.replace("{data}", str(folder / "data"))
