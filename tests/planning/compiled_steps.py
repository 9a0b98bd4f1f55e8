"""The steps that XLA's GPU compiler has compiled (`benchmarks/results/gpu_*.md`), for tests of what is planned."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_compile import SETS
from openpi_train import cli
from openpi_train.parallel.mesh import planned_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.choose import on_kind
from openpi_train.planning.forecast import Forecast, Machine
from openpi_train.planning.gpu import plugin
from openpi_train.tools.plan import find_machine
from openpi_train.training.prepare import forecasts, whole_layout

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Flags of the command line that the tables leave out.
_UNSAID = re.compile(r"--sharding\.strategy |--model\.(policy\.|language\.)?remat |--model\.|--sharding\.|--")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step on H100, GiB on a device, and the least time that it takes, waiting included."""

    experiment: str
    flags: str
    devices: int
    hosts: int
    gib: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.experiment} {self.flags} {self.devices}"


def rows(name: str) -> list[list[str]]:
    """The cells of the first table of a result, without its head."""
    lines = [line for line in (RESULTS / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]


def of_families() -> Iterator[CompiledStep]:
    """Every family of models and way to train."""
    known = {
        (case.experiment, tuple(_UNSAID.sub("", case.flags).split()), case.devices): case for case in SETS["families"]
    }
    for experiment, flags, devices, gib, *others in rows("gpu_families"):
        case = known[experiment, tuple(flags.replace("chosen", "").split()), int(devices.split()[0])]
        seconds = (float(others[2].replace(",", "")) + float(others[5])) / 1e3
        yield CompiledStep(experiment, case.flags, case.devices, case.hosts, float(gib), seconds)


def of_pi0() -> dict[tuple[str, str], CompiledStep]:
    """Full pi0 on 8 devices, by strategy and rematerialisation policy."""
    return {
        (strategy, remat): CompiledStep(
            "pi0_bridge_traj",
            f"--sharding.strategy {strategy} --model.remat {remat}",
            *(8, 1, float(gib), (float(others[2]) + float(others[6])) / 1e3),
        )
        for strategy, remat, gib, *others in rows("gpu_strategies")
    }


def h100(devices: int, hosts: int = 1, gib: float | None = None) -> Machine:
    """So many H100, with this memory each."""
    return find_machine("h100", devices, hosts, gib, 50.0)


def forecasts_of(name: str, flags: str, machine: Machine) -> list[Forecast]:
    """What is forecast of the experiment's steps with these flags."""
    experiment = cli.parse_experiment(name, ["--exp-name", "planned", *flags.split()])
    layout = whole_layout(experiment, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
    with plugin.pretended(machine.kind):
        return forecasts(on_kind(experiment, machine), layout, machine, [experiment.grad_accum])
