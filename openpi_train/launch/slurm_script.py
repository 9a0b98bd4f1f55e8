"""A Slurm job as data, and the text of its sbatch file: pure, nothing is written. Read next: `slurm.py`, the form.

Slurm says to every task who it is (`runtime/world.py` reads it), so the file only starts one task per process, passes
on a request to stop, and has the job requeued when starting again would help.
"""

import dataclasses
import re
import shlex

from openpi_train.launch.spec import LaunchError, LaunchSpec, check_variable

# What other ways to start a run leave in a shell; a process would believe them and not Slurm.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_MOST_SIGNAL_S = 65535  # Slurm's own
_CONTAINER_RUNTIMES = ("pyxis", "apptainer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A run as a Slurm job. Fields other than `run` are options of `launch slurm`; None leaves one to the cluster."""

    run: LaunchSpec
    job_name: str
    chdir: str
    """Absolute folder that the job runs in: relative paths of the run mean the same there as where it was written."""
    output_dir: str
    """Absolute folder of the job's output; Slurm makes none, so it must be there."""
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    time_limit: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    venv: str | None = None
    container: str | None = None
    container_runtime: str = "pyxis"
    container_mount: tuple[str, ...] = ()
    sbatch_arg: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    max_restarts: int = 20
    stop_before_s: int = 120
    """Seconds before the time limit at which the tasks are told to save and stop."""

    def __post_init__(self):
        for option in _options(self):
            if not option.isprintable():
                raise LaunchError(f"{option!r} has a line break or another invisible character: leave it out")
        if not re.fullmatch(r"[\w.+-]+", self.job_name):
            raise LaunchError(f"--job-name {self.job_name!r} has other characters than letters, digits and _ . + -")
        if self.gpus_per_node and self.gpus_per_node % self.run.processes_per_host:
            raise LaunchError(
                f"{self.run.processes_per_host} processes per node cannot share {self.gpus_per_node} GPUs equally: use "
                "as many processes as GPUs, a number that divides them, or one"
            )
        for setting in self.env:
            if "=" not in setting:
                raise LaunchError(f"--env {setting!r} is not NAME=VALUE")
            check_variable(setting.partition("=")[0])
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise LaunchError(f"--cpus-per-task {self.cpus_per_task}: there must be at least one")
        if self.memory is not None and not re.fullmatch(r"\d+[KMGT]?", self.memory):
            raise LaunchError(f"--memory {self.memory!r} is not a number with K, M, G or T, as Slurm writes it: 256G")
        if wrong := [option for option in self.sbatch_arg if not option.startswith("-")]:
            raise LaunchError(f"--sbatch-arg {wrong[0]!r} is no option of sbatch: --sbatch-arg=--exclusive, say")
        if self.venv and self.container:
            raise LaunchError("--venv and --container exclude each other: a container brings its own Python")
        if self.container_runtime not in _CONTAINER_RUNTIMES:
            raise LaunchError(f"--container-runtime {self.container_runtime!r} is not one of {_CONTAINER_RUNTIMES}")
        if self.max_restarts < 0 or not 0 < self.stop_before_s <= _MOST_SIGNAL_S:
            raise LaunchError(f"--max-restarts must be 0 or more and --stop-before-s from 1 to {_MOST_SIGNAL_S}")
        limit_s = None if self.time_limit is None else time_limit_s(self.time_limit)
        if limit_s is not None and limit_s <= 2 * self.stop_before_s:
            raise LaunchError(
                f"--time-limit {self.time_limit} leaves the run no time: it is told to stop {self.stop_before_s} s "
                "before its end (--stop-before-s). Give a longer limit, or a shorter notice"
            )


def script(job: SlurmJob) -> str:
    """The text of the sbatch file."""
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `openpi-train launch slurm`. Submit it with sbatch; submitted again, it continues the run.",
            *(f"#SBATCH {option}" for option in _options(job)),
            "",
            "# Who a process is comes from the Slurm step, not from what the submitting shell had set.",
            f"unset {' '.join(RANK_VARIABLES)} OPENPI_TRAIN_JOB_TOKEN",
            *(f"export {name}={shlex.quote(value)}" for name, value in _environment(job).items()),
            *([f"source {shlex.quote(job.venv + '/bin/activate')} || exit"] if job.venv else []),
            "",
            f"max_restarts={job.max_restarts}",
            _TASK,
            f"program=({shlex.join(_program(job))})",
            f"{shlex.join(_srun(job))} \\",
            '    bash -c "$task" task "${program[@]}" &',
            _END,
        ]
    )


def time_limit_s(text: str) -> int | None:
    """Seconds of a Slurm time limit ("30", "30:00", "24:00:00", "1-0", "1-12:00"); None for no limit.

    Raises:
        LaunchError: it is none.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    parsed = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if parsed is None:
        raise LaunchError(
            f"--time-limit {text!r} is not Slurm's minutes, minutes:seconds, hours:minutes:seconds, or days-hours"
        )
    days, *parts = (int(part) if part else None for part in parsed.groups())
    first, second, third = parts
    if days is None and third is None:  # minutes[:seconds]
        first, second, third = 0, first, second
    return (((days or 0) * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)


def _options(job: SlurmJob) -> list[str]:
    options = {
        "job-name": job.job_name,
        "nodes": len(job.run.hosts),
        "ntasks-per-node": job.run.processes_per_host,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_task,
        "mem": job.memory,
        "time": job.time_limit,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "chdir": job.chdir,
        "output": f"{job.output_dir.replace('%', '%%')}/%x_%j.out",
        "open-mode": "append",  # a requeued job goes on in the same file
        "signal": f"TERM@{job.stop_before_s}",  # to the tasks, which save; the shell is told by their exit codes
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return [*lines, "--requeue" if job.max_restarts else "--no-requeue", *map(shlex.quote, job.sbatch_arg)]


def _environment(job: SlurmJob) -> dict[str, str]:
    devices = job.run.devices_per_process
    cpu = {} if devices is None else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    given = dict(setting.split("=", 1) for setting in job.env)
    return {"PYTHONUNBUFFERED": "1", "OPENPI_TRAIN_GRACE_S": str(job.stop_before_s)} | cpu | given


def _program(job: SlurmJob) -> list[str]:
    program = [*job.run.program, *job.run.arguments]
    if job.container is None or job.container_runtime == "pyxis":
        return program
    mounts = [word for mount in (job.chdir, *job.container_mount) for word in ("--bind", mount)]
    return [
        "apptainer",
        "exec",
        *(["--nv"] if job.gpus_per_node else []),
        *mounts,
        "--pwd",
        job.chdir,
        job.container,
        *program,
    ]


def _srun(job: SlurmJob) -> list[str]:
    nodes, tasks = len(job.run.hosts), job.run.processes_per_host
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}"]
    # srun does not take it over from the job since Slurm 22.05.
    words += [f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else []
    if job.container is not None and job.container_runtime == "pyxis":
        mounts = ",".join([f"{job.chdir}:{job.chdir}", *job.container_mount])
        words += [
            f"--container-image={job.container}",
            f"--container-mounts={mounts}",
            f"--container-workdir={job.chdir}",
        ]
    return [*words, "--kill-on-bad-exit=1", "--label"]


_TASK = r"""
# srun returns the highest exit code of its tasks, which should be the cause and not what followed from it. So each
# task moves its own up: an error of the program (1 to 49) by 200, "lost a peer" and "saved and stopped" (70, 75) by
# 100. A task that was killed (129 and up) then counts only where nobody knows better. Signals are the program's affair.
task='trap : INT TERM USR1 USR2; "$@"; code=$?
    case $code in 70|75) code=$((code + 100));; [1-9]|[1-4][0-9]) code=$((code + 200));; esac; exit "$code"'

# The time limit and `scancel --signal=TERM <job>` reach the tasks without this shell, `scancel --batch` only this
# shell, which passes it on; not by way of srun, which would kill the tasks.
trap 'scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null' TERM USR1
"""

_END = r"""step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done  # a signal interrupts `wait`
wait "$step"
code=$?
trap '' TERM USR1
case $code in
    170 | 175) code=$((code - 100)) ;;
    20[1-9] | 2[1-4][0-9]) code=$((code - 200)) ;;
esac

# 70: a process or the network was lost. 75: saved and stopped. 143: told to stop before the program listened.
restarts=${SLURM_RESTART_COUNT:-0}
say() { echo "$(date +%FT%T) job $SLURM_JOB_ID, start $((restarts + 1)): exit code $code, $*"; }
case $code in
    70 | 75 | 143)
        state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
        if [ "$state" != RUNNING ]; then
            say "not requeued, since the job is being ended from outside (state: ${state:-unknown})"
        elif [ "$restarts" -ge "$max_restarts" ]; then
            say "not requeued again: --max-restarts $max_restarts"
        else
            say "requeueing"
            scontrol requeue "$SLURM_JOB_ID" || say "scontrol could not requeue it"
        fi
        ;;
    *) say "the run has ended" ;;
esac
exit "$code"
"""
