"""Faults of a run under Slurm's real daemons, submitted by `launch slurm --submit`: a row per fault.

The job has two processes on one of two nodes, so that it may go on on the other. After each fault it must be requeued
without a person and train again from its newest checkpoint; at the end it is stopped and compared with an undisturbed
run, bit by bit. Needs root and Debian's slurm-wlm and munge. Read next: `slurm_cluster.py`, `../fault_drill.py`.

    python -m benchmarks drill.under_slurm [--faults NAME ...]
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.drill.comparison import compare
from benchmarks.drill.experiments import EXPERIMENTS
from benchmarks.drill.running import CONTINUING, STEP, metrics_in
from benchmarks.drill.scene import FaultFailed
from benchmarks.drill.slurm_cluster import NODES, Cluster, why_not
from benchmarks.drill.windows import INSIDE, Armed
from benchmarks.launched import Launched, last_step, launch, places
from benchmarks.report import ROOT, Cell, Spread, Table

COLUMNS = ("fault", "number", "survived", "run ended with", "steps trained again", "seconds to train again", "p95")
_DRILLED = EXPERIMENTS["imitation"]
_TIMEOUTS = ("--timeouts.lost-s", "15", "--timeouts.stuck-s", "30")
_LIMIT_S = 400.0
_POLL_S = 0.1
_AWAY_S = 20.0
# How long before its time is up the job is told to stop; Slurm counts in minutes, and may do so a minute too soon.
_STOP_BEFORE_S = 30
# What the job's script says at the end of a start.
_ENDED = re.compile(r"start \d+: exit code (\d+), ")
_GPU_FAULT = "INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"


class Job:
    """The run, as a job of a cluster; all its files are below `folder`."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self._folder = cluster, folder
        self.directory = folder / "disturbed" / "runs" / _DRILLED.name / "x"
        self.armed = Armed(folder / "faults")
        options = ["--nodes", 1, "--gpus-per-node", 2, "--devices-per-process", 1, "--job-name", "drill", "--no-check"]
        options += ["--output-dir", folder, "--max-restarts", 30, "--stop-before-s", _STOP_BEFORE_S, "--submit"]
        options += ["--env", "MASTER_ADDR={host}"]
        options += ["--env", f"PYTHONPATH={INSIDE}", "--env", f"DRILL_FAULTS={self.armed.folder}"]
        words = [*_DRILLED.words, *_TIMEOUTS, "--num-train-steps", "1000000", *places(folder / "disturbed")]
        done = subprocess.run(
            launch("slurm", *options, "--", *words),
            env={**os.environ, **cluster.variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r"submitted: job (\d+)", done.stdout)
        if found is None:
            raise FaultFailed(f"the job was not submitted: {done.stdout}{done.stderr}")
        self.number = found[1]

    def output(self) -> str:
        """All that the job has written so far."""
        return "".join(path.read_text(errors="replace") for path in self._folder.glob(f"*_{self.number}.out"))

    def state(self) -> dict[str, str]:
        """What `scontrol show job` knows."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.ask("scontrol", "show", "job", self.number)))

    def step(self) -> int:
        """The last step in the metrics."""
        return last_step(self.directory)

    def checkpoints(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        names = (path.parent.name for path in self.directory.glob("*/manifest.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def processes(self, kind: str) -> list[int]:
        """The pids of the job's processes: of its "tasks" that train, or of Slurm's "slurmstepd" for the tasks."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = (place / "cmdline").read_bytes().split(b"\0")
                variables = (place / "environ").read_bytes().split(b"\0")
                is_of_job = f"SLURM_JOB_ID={self.number}".encode() in variables
                is_task = (
                    is_of_job
                    and b"openpi_train" in words
                    and any(one.startswith(b"SLURM_PROCID=") for one in variables)
                )
                is_daemon = words[0].startswith(f"slurmstepd: [{self.number}.0]".encode())
                if is_task if kind == "tasks" else is_daemon:
                    found.append(int(place.name))
        return sorted(found)

    def wait(self, condition: Callable[[], object], what: str, limit_s: float = _LIMIT_S) -> None:
        """Return once the condition holds; raises FaultFailed, with the job's last words, if it never does."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise FaultFailed(
                    f"{what} within {limit_s:.0f} s; the job is {self.state().get('JobState')}\n{self.output()[-5000:]}"
                )
            time.sleep(_POLL_S)


def kill_task(job: Job) -> None:
    """SIGKILL to a process that trains."""
    os.kill(job.processes("tasks")[-1], signal.SIGKILL)


def kill_step_daemon(job: Job) -> None:
    """SIGKILL to the slurmstepd that watches the tasks: they train on, and nobody can end them by Slurm's commands.

    A requeue then starts the run beside them; they must end by themselves, since the newer start owns the run.
    """
    orphans = set(job.processes("tasks"))
    os.kill(job.processes("slurmstepd")[-1], signal.SIGKILL)
    reached = job.step()
    job.wait(lambda: job.step() > reached, "the run did not go on")
    requeue(job)
    job.wait(lambda: not orphans & set(job.processes("tasks")), "tasks of the older start live on")


def ask_to_stop(job: Job) -> None:
    """`scancel --signal=TERM`."""
    job.cluster.ask("scancel", "--signal=TERM", job.number)


def requeue(job: Job) -> None:
    """`scontrol requeue`, as an administrator or a preemption does."""
    job.cluster.ask("scontrol", "requeue", job.number)


def kill_node_daemon(job: Job) -> None:
    """SIGKILL to slurmd: the node counts as down, with tasks on it that live on. It comes back once the job is gone."""
    node = job.state()["NodeList"]
    job.cluster.kill(node)
    job.wait(lambda: job.state().get("NodeList") != node, f"the job still has {node}, which is down,")
    job.cluster.start(node)


def controller_away(job: Job) -> None:
    """SIGKILL to slurmctld, and to a task while it is away."""
    job.cluster.kill("slurmctld")
    kill_task(job)
    time.sleep(_AWAY_S)
    job.cluster.start("slurmctld")


def failed_gpu(job: Job) -> None:
    """A GPU's error in the next step: exit code 71, and the other node."""
    node = job.state()["NodeList"]
    job.armed.arm(1, "step", "jax", _GPU_FAULT, not_token="no start")
    job.wait(lambda: job.armed.fired(1), "the fault was not met")
    job.armed.forget(1)
    job.wait(lambda: job.state().get("NodeList") in set(NODES) - {node}, f"the job is not on another node than {node}")


def suspend(job: Job) -> None:
    """`scontrol suspend`, and `resume` after a while: there is no restart."""
    job.cluster.ask("scontrol", "suspend", job.number)
    time.sleep(5.0)
    job.cluster.ask("scontrol", "resume", job.number)


def time_limit(job: Job) -> None:
    """The job's time is up: Slurm tells it ahead. Its next start has time again."""
    began = job.output().count("exit code")
    hours, minutes, _ = job.state()["RunTime"].split(":")
    job.cluster.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * int(hours) + int(minutes) + 2}")
    job.wait(lambda: job.output().count("exit code") > began, "the time limit did not end the start")
    job.cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=UNLIMITED")


FAULTS: dict[str, Callable[[Job], None]] = {
    "task killed": kill_task,
    "slurmstepd killed, then requeued": kill_step_daemon,
    "asked to stop (scancel --signal)": ask_to_stop,
    "requeued by scontrol": requeue,
    "controller away while a task dies": controller_away,
    "node down (slurmd killed)": kill_node_daemon,
    "GPU fault (exit 71)": failed_gpu,
    "suspended for 5 s": suspend,
    "time limit": time_limit,
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks drill.under_slurm", description=__doc__
    )
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS), metavar="NAME", help="(all)")
    parser.add_argument("--quick", action="store_true", help="one fault, to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the drill and return its table."""
    flags = parse(argv)
    if reason := why_not():
        return [Table("Fault drill under Slurm", COLUMNS, [], [f"Not run: {reason}."])]
    names = flags.faults[:1] if flags.quick else flags.faults
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slurm_") as place:
        folder = Path(place) / "job"
        (Path(place) / "cluster").mkdir()
        with Cluster(Path(place) / "cluster") as cluster:
            job = Job(cluster, folder)
            rows, problem = _drill(job, names)
            steps = job.step()
        problem = problem or _differences(job, folder, steps)
    verdict = (
        problem or f"{steps} steps, every array of the last checkpoint and the metrics of every step the same bits"
    )
    notes = [f"Against the undisturbed run: {verdict}.", f"{(time.monotonic() - began) / 60:.0f} minutes."]
    title = f"Fault drill under Slurm: {_DRILLED.name} experiment, 2 processes on one of 2 nodes"
    return [Table(title, COLUMNS, rows, notes, problem)]


def _drill(job: Job, names: Sequence[str]) -> tuple[list[list[Cell]], str]:
    """Inject each fault, then stop; returns the rows, and what went wrong."""
    rows: list[list[Cell]] = []
    for name in names:
        print(f"{len(rows) + 1} of {len(names)}: {name}", file=sys.stderr, flush=True)
        try:
            row = _one(job, name)
        except FaultFailed as error:
            return [*rows, [name, 1, 0, None, None, None, None]], f"{name}: {error}"
        print(f"  {row[3]}: {row[4]} steps again, {row[5]} s", file=sys.stderr, flush=True)
        rows.append(row)
    job.cluster.ask("scancel", job.number)
    job.wait(lambda: not job.processes("tasks"), "the job did not end")
    return rows, ""


def _one(job: Job, name: str) -> list[Cell]:
    """Inject one fault once there is progress to lose, and wait until the run trains again, and has saved."""
    before = job.checkpoints()
    job.wait(lambda: len(job.checkpoints()) >= 2 and job.checkpoints() > before, "no progress before it")
    heard, newest, reached, at = len(job.output()), job.checkpoints()[-1], job.step(), time.monotonic()
    FAULTS[name](job)
    goes_on = name.startswith("suspended")
    if goes_on:
        reached = job.step()
        job.wait(lambda: job.step() > reached, "the run did not go on")
        return [name, 1, 1, "no restart", Spread((0,)), Spread((time.monotonic() - at,)), time.monotonic() - at]
    # Output that Slurm writes late, of the start that ends, has no such line.
    job.wait(lambda: CONTINUING.search(job.output()[heard:]), "the run was not started again")
    job.wait(
        lambda: STEP.search(job.output()[heard:].partition("continuing from step")[2]), "the run did not train again"
    )
    seconds = time.monotonic() - at
    said = job.output()[heard:]
    told, _, _ = said.partition("continuing from step")
    reached = max([reached, *(int(step) for step in STEP.findall(told))])
    found = CONTINUING.search(said)
    assert found
    if int(found[1]) < newest:
        raise FaultFailed(f"it continued from {found[1]}, not from {newest}")
    code = _ENDED.search(told)
    ended = code[1] if code else "its job's end"
    return [name, 1, 1, ended, Spread((max(reached - int(found[1]), 0),)), Spread((seconds,)), seconds]


def _differences(job: Job, folder: Path, steps: int) -> str:
    """Train as many steps without faults; returns the differences, or an empty string."""
    last = job.checkpoints()[-1]
    words = [*_DRILLED.words, "--num-train-steps", last, *places(folder / "undisturbed")]
    command = launch("local", "--processes", 2, "--devices-per-process", 1, "--", *words)
    with Launched(command, {}) as run:
        if (code := run.end(_LIMIT_S + 2 * steps)) != 0:
            return f"the undisturbed run ended with code {code}\n{run.said()}"
    directory = folder / "undisturbed" / "runs" / _DRILLED.name / "x"
    found = {step: values for step, values in metrics_in(job.directory).items() if step <= last}
    return compare((found, job.directory), (metrics_in(directory), directory))
