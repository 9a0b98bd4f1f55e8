"""`Reproduction`, an entry of the board: the command lines that make a result, and what was published for it.

In command lines `{data}` is the folder of the data, `{start}` that of the run whose weights the training begins from,
and `{run}` that of the training run. Read next: `board.py`.
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
    # The training command whose weights `train` begins from; empty: there is none.
    start: str = ""
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

    def training_words(self, folder: Path) -> dict[str, list[str]]:
        """The words of each training command by its stage, in their order; each goes on with what is there."""
        places = f"--checkpoint-base-dir {folder / 'runs'} --assets-base-dir {folder / 'assets'}"
        start = str(_run_of(self.start, folder)) if self.start else ""
        return {
            stage: shlex.split(
                f"{_filled(command, folder).replace('{start}', start)} --exp-name {RUN} {places} --resume"
            )
            for stage, command in (("start", self.start), ("train", self.train))
            if command
        }

    def evaluation_words(self, folder: Path) -> dict[str, list[str]]:
        """The words of each evaluation's command after `eval`, by its name."""
        run = str(self.run_folder(folder)) if self.train else ""
        lines = {name: _filled(command, folder).replace("{run}", run) for name, command in self.evaluations.items()}
        return {name: shlex.split(f"{line} --out {self.results(folder, name)}")[1:] for name, line in lines.items()}

    def run_folder(self, folder: Path) -> Path:
        """The directory of the training run."""
        return _run_of(self.train, folder)

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


def _run_of(train: str, folder: Path) -> Path:
    """The directory of a training command's run."""
    return folder / "runs" / train.split()[0] / RUN


def _filled(command: str, folder: Path) -> str:
    return command.replace("{data}", str(folder / "data"))
