"""`launch slurm`: write an sbatch file for a run, and submit it if asked.

Inside the job no flags are needed, since Slurm identifies every task. The file only starts one task per process,
forwards a request to stop, and requeues the job if a restart would help. Read next:
`launchers.py`, the table of launchers; `../runtime/world.py`, which reads Slurm's variables.
"""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from openpi_train import faults
from openpi_train.faults import Restart
from openpi_train.launch.options import Launch, at_least, option
from openpi_train.launch.preflight import RANK_VARIABLES, require_start
from openpi_train.launch.spec import (
    SAVED_STEP_VARIABLE,
    VERBS_WITHOUT_RUN,
    LaunchError,
    check_arguments,
    check_variable,
    cpu_devices,
    this_python,
    without_going_back,
)

_MOST_SIGNAL_S = 65535  # Slurm's own
_CONTAINER_RUNTIMES = ("pyxis", "apptainer")
_OWN_FOLDER = "slurm_scripts"
# Of each GPU, by default: data workers decode pictures and video beside the loop.
_CORES_PER_GPU = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(Launch):
    """Write an sbatch file that starts, requeues and continues the run.

    None leaves an option to the cluster.
    """

    nodes: int = option("number of hosts (%(default)s)", 1, flags=("--nodes", "--num-nodes"))
    gpus_per_node: int | None = option("GPUs of each host", None)
    gpus: int | None = option("GPUs of all hosts together, as Slurm counts them", None, type=at_least(1))
    processes_per_node: int | None = option("processes per host (default: one for each GPU)", None, type=at_least(1))
    devices_per_process: int | None = option(
        "CPU devices to create in each process; no GPU is used", None, type=at_least(1)
    )
    job_name: str | None = option("default: the experiment's name", None)
    cpus_per_task: int | None = option(
        f"CPU cores of each process (default: {_CORES_PER_GPU} for each of its GPUs; 0: left to the cluster)", None
    )
    memory: str | None = option("memory of each host, in Slurm's format: 200G", None)
    time_limit: str | None = option("in Slurm's format: 24:00:00, or 2-0 for two days", None)
    partition: str | None = option(None, None)
    account: str | None = option(None, None)
    qos: str | None = option(None, None)
    output_dir: Path = option("folder for the file and the output (%(default)s)", Path(_OWN_FOLDER))
    file: Path | None = option("the file to write (default: <output dir>/<job name>.sh)", None)
    venv: Path | None = option("virtual environment to activate (default: the Python that runs this)", None)
    container: str | None = option("container image; its `python` must have the package", None, metavar="IMAGE")
    container_runtime: str = option("what starts the container (%(default)s)", "pyxis", choices=_CONTAINER_RUNTIMES)
    container_mount: tuple[str, ...] = option(
        "a folder of the host in the container; may be repeated", (), metavar="SOURCE:TARGET"
    )
    sbatch_arg: tuple[str, ...] = option("a flag for sbatch; may be repeated: --sbatch-arg=--exclusive", ())
    env: tuple[str, ...] = option(
        "may be repeated; NAME alone: sbatch passes its value on, and the file does not hold it",
        (),
        metavar="NAME=VALUE",
    )
    max_restarts: int = option("maximum number of requeues (%(default)s); 0: never", 20)
    stop_before_s: int = option("seconds before the time limit to save and stop (%(default)s s)", 120)
    submit: bool = option("submit the file and print the job's id", False)
    no_check: bool = option("write the file without looking whether the run would start", False)
    dry_run: bool = option("print the file, write and submit nothing", False)
    folder: Path = dataclasses.field(default_factory=Path.cwd)
    """The folder where the job runs, so that relative paths mean the same as where the file was written."""
    program: tuple[str, ...] | None = None
    """The program that runs the arguments; None: this package, with the Python of `venv`, of `container`, or this
    one."""

    def __post_init__(self):
        check_arguments(self.arguments)
        if self.nodes < 1:
            raise LaunchError(f"--nodes {self.nodes}: there must be at least one")
        if self.gpus is not None:
            if self.gpus % self.nodes or self.gpus_per_node not in (None, self.gpus // self.nodes):
                raise LaunchError(
                    f"--gpus {self.gpus} counts the GPUs of all {self.nodes} nodes together, as Slurm does; give "
                    f"--gpus-per-node for those of each ({self.gpus * self.nodes} in all, if each has {self.gpus})"
                )
            object.__setattr__(self, "gpus_per_node", self.gpus // self.nodes)
        if self.num_tasks_per_node < 1:
            raise LaunchError(
                "say what each node runs: --gpus-per-node 4 (a process for each), or --processes-per-node 1"
            )
        for header in _headers(self):
            if not header.isprintable():
                raise LaunchError(f"{header!r} has a line break or another invisible character: leave it out")
        if not re.fullmatch(r"[\w.+-]+", self.name):
            raise LaunchError(f"--job-name {self.name!r} has other characters than letters, digits and _ . + -")
        if self.gpus_per_node and self.gpus_per_node % self.num_tasks_per_node:
            raise LaunchError(
                f"{self.num_tasks_per_node} processes per node cannot share {self.gpus_per_node} GPUs equally: use "
                "as many processes as GPUs, a number that divides them, or one"
            )
        for setting in self.env:
            name, given, _ = setting.partition("=")
            check_variable(name)
            if not given and name not in os.environ:
                raise LaunchError(f"--env {name}: it has no value here; give {name}=<value>, or leave it out")
        if self.cpus_per_task is not None and self.cpus_per_task < 0:
            raise LaunchError(
                f"--cpus-per-task {self.cpus_per_task}: give a number of cores, or 0 for the cluster's own"
            )
        if self.memory is not None and not re.fullmatch(r"\d+[KMGT]?", self.memory):
            raise LaunchError(f"--memory {self.memory!r} is not a number with K, M, G or T, as Slurm writes it: 256G")
        if wrong := [option for option in self.sbatch_arg if not option.startswith("-")]:
            raise LaunchError(f"--sbatch-arg {wrong[0]!r} is not an option of sbatch, such as --sbatch-arg=--exclusive")
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

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job_name or re.sub(r"[^\w.-]+", "-", self.arguments[0])

    @property
    def num_tasks_per_node(self) -> int:
        """A task is a process of the run."""
        return self.processes_per_node or self.gpus_per_node or 0

    @property
    def cores_per_task(self) -> int | None:
        """CPU cores of each process; None leaves them to the cluster, which often gives one."""
        if self.cpus_per_task is not None:
            return self.cpus_per_task or None
        if self.gpus_per_node is None or self.devices_per_process is not None:
            return None
        return _CORES_PER_GPU * self.gpus_per_node // self.num_tasks_per_node

    def _cores_there(self) -> int | None:
        """`cpus_per_task`; if it is not given, less than the default where no node has as many: the job would pend."""
        wanted, most = self.cores_per_task, _most_cores(self.partition)
        if self.cpus_per_task is not None or wanted is None or most is None or wanted * self.num_tasks_per_node <= most:
            return self.cpus_per_task
        cores = max(most // self.num_tasks_per_node, 1)
        sys.stderr.write(
            f"launch: {cores} cores for each process in place of {wanted}: sinfo knows no node with GPUs and more than "
            f"{most} (--cpus-per-task)\n"
        )
        return cores

    @property
    def num_devices(self) -> int:
        """The devices of the run."""
        return self.nodes * (self.gpus_per_node or self.num_tasks_per_node * (self.devices_per_process or 1))

    def absolute(self, path: Path) -> str:
        """An absolute path for the job."""
        return os.path.abspath(self.folder / path)

    def launch(self) -> int:
        """Write the file, print its path, and with --submit submit it."""
        if self.venv and not os.path.isfile(activate := f"{self.absolute(self.venv)}/bin/activate"):
            raise LaunchError(f"--venv {self.venv} is not a virtual environment: {activate} does not exist")
        if self.gpus is not None:
            sys.stderr.write(f"launch: --gpus {self.gpus} in all: {self.gpus_per_node} on each of {self.nodes} nodes\n")
        if not self.no_check and not (self.venv or self.container or self.program):
            this_python()
        text = script(dataclasses.replace(self, arguments=resumed(self.arguments), cpus_per_task=self._cores_there()))
        if self.dry_run:
            print(text, end="")
            return 0
        if not self.no_check and self.program is None:
            require_start(
                resumed(self.arguments),
                num_devices=self.num_devices,
                python=f"{self.absolute(self.venv)}/bin/python" if self.venv else sys.executable,
                folder=self.folder,
                env=_given(self),
                has_files=self.container is None,
            )
        output_dir = self.absolute(self.output_dir)
        file = Path(self.absolute(self.file or Path(output_dir, f"{self.name}.sh")))
        os.makedirs(output_dir, exist_ok=True)  # Slurm does not create it
        _write(file, text)
        if not self.submit:
            print(f"written: {file}\nsubmit it: sbatch {file}")
            return 0
        number = _submit(file, self)
        print(f"written: {file}\nsubmitted: job {number}, output {output_dir}/{self.name}_{number}.out")
        return 0


def resumed(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The same arguments with --resume: a requeued job continues its own run; without one, --resume starts a new
    run. A verb that makes no run does not take it."""
    if arguments and arguments[0] in VERBS_WITHOUT_RUN:
        return arguments
    if bad := [word for word in arguments if word in ("--overwrite", "--no-resume")]:
        raise LaunchError(
            f"{bad[0]} cannot be used with Slurm: a requeued job runs the same command and would move its own run "
            "aside. Leave it out; for a new run give another --exp-name"
        )
    if (point := without_going_back(arguments)[1]) is not None:
        raise LaunchError(
            f"--resume-from {point} cannot be used with Slurm: a requeued job runs the same command and would go back "
            "again. Begin another run there: --exp-name NEW --resume-from <path of the checkpoint>"
        )
    return arguments if "--resume" in arguments or not arguments else (*arguments, "--resume")


def script(job: Slurm) -> str:
    """The text of the sbatch file."""
    activate = [f"source {shlex.quote(job.absolute(job.venv) + '/bin/activate')} || exit"] if job.venv else []
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `openpi-train launch slurm`. Submit it with sbatch; submitted again, it continues the run.",
            *(f"#SBATCH {header}" for header in _headers(job)),
            "",
            "# Who a process is comes from the Slurm step, not from what the submitting shell had set.",
            f"unset {' '.join(RANK_VARIABLES)} OPENPI_TRAIN_JOB_TOKEN OPENPI_TRAIN_JOB_TOKEN_FILE",
            *(f"export {name}={shlex.quote(value)}" for name, value in _environment(job).items()),
            *activate,
            "",
            f"max_restarts={job.max_restarts}",
            # Of openpi_train/faults.py, for "$task".
            f'export again=" {_words(Restart.SAME_HOSTS, Restart.OTHER_HOSTS)} " without_node={faults.HARDWARE}',
            f"lost={faults.PEER_LOST}",
            f'never=" {_words(Restart.NEVER, Restart.FEWER_HOSTS)} "',
            # What this script and its restarts remember.
            f'export job_files={shlex.quote(f"{job.absolute(job.output_dir)}/{job.name}_")}"$SLURM_JOB_ID"',
            _SAVED,
            _TOKEN,
            _TASK,
            f"program=({shlex.join(_program(job))})",
            "if patiently write_token; then",
            f"    {shlex.join(_srun(job))} \\",
            '        bash -c "$task" task "${program[@]}" &',
            f'else (echo "{_NO_TOKEN}"; exit 1) & fi',
            _END,
        ]
    )


def _words(*restarts: Restart) -> str:
    return " ".join(str(code) for code in faults.codes_with(*restarts))


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


def _headers(job: Slurm) -> list[str]:
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.num_tasks_per_node,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cores_per_task,
        "mem": job.memory,
        "time": job.time_limit,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "chdir": job.folder.absolute(),
        "output": f"{job.absolute(job.output_dir).replace('%', '%%')}/%x_%j.out",
        "open-mode": "append",  # a requeued job appends to the same file
        "signal": f"TERM@{job.stop_before_s}",  # to the tasks, which save; the shell sees their exit codes
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return [*lines, "--requeue" if job.max_restarts else "--no-requeue", *map(shlex.quote, job.sbatch_arg)]


def _environment(job: Slurm) -> dict[str, str]:
    own = {"PYTHONUNBUFFERED": "1", "OPENPI_TRAIN_GRACE_S": str(job.stop_before_s)}
    return own | cpu_devices(job.devices_per_process) | _given(job)


def _given(job: Slurm) -> dict[str, str]:
    """The variables that were given with a value."""
    return dict(setting.split("=", 1) for setting in job.env if "=" in setting)


def _program(job: Slurm) -> list[str]:
    own = ("python" if job.venv or job.container else sys.executable, "-m", "openpi_train")
    program = [*(job.program or own), *job.arguments]
    if job.container is None or job.container_runtime == "pyxis":
        return program
    folder = str(job.folder.absolute())
    mounts = [word for mount in (folder, *_output(job), *job.container_mount) for word in ("--bind", mount)]
    gpus = ["--nv"] if job.gpus_per_node else []
    return ["apptainer", "exec", *gpus, *mounts, "--pwd", folder, job.container, *program]


def _output(job: Slurm) -> list[str]:
    """The output's folder, where a task in a container reads the token and writes its status, if `folder` lacks it."""
    output = Path(job.absolute(job.output_dir))
    return [] if output.is_relative_to(job.folder.absolute()) else [str(output)]


def _srun(job: Slurm) -> list[str]:
    nodes, tasks = job.nodes, job.num_tasks_per_node
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}"]
    # Since Slurm 22.05 srun does not inherit it from the job.
    words += [f"--cpus-per-task={job.cores_per_task}"] if job.cores_per_task else []
    if job.container is not None and job.container_runtime == "pyxis":
        folder = job.folder.absolute()
        mounts = ",".join([f"{folder}:{folder}", *(f"{one}:{one}" for one in _output(job)), *job.container_mount])
        words += [f"--container-image={job.container}", f"--container-mounts={mounts}", f"--container-workdir={folder}"]
        words += ["--no-container-entrypoint"]  # a cluster may run it, and then it would get bash as its argument
    return [*words, "--kill-on-bad-exit=1", "--label"]


def _most_cores(partition: str | None) -> int | None:
    """The largest number of cores of a node with GPUs, of this partition if given; None if sinfo cannot be asked."""
    words = ["sinfo", "--noheader", "--Node", "--format=%c %G", *([f"--partition={partition}"] if partition else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    nodes = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return max((int(cores) for cores, gres in nodes if "gpu" in gres and cores.isdecimal()), default=None)


def _write(file: Path, text: str) -> None:
    """Write the file; an existing one with other content, perhaps edited by hand, is moved aside."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.read_text() != text:
        aside = file.with_name(f"{file.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        file.rename(aside)
        print(f"the existing file was moved to {aside}")
    file.touch(0o700)  # it may hold what nobody else should read
    file.write_text(text)


def _submit(file: Path, job: Slurm) -> str:
    """Submit the file with sbatch; returns the job's number."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(f"sbatch is not installed on this machine: submit {file} from a login node of the cluster")
    done = subprocess.run([sbatch, "--parsable", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        cores = (
            f"\n(it asks for {job.cores_per_task} cores for each process; --cpus-per-task changes that)"
            if job.cpus_per_task is None and job.cores_per_task
            else ""
        )
        raise LaunchError(f"sbatch refused {file}: {done.stderr.strip()}{cores}")
    return done.stdout.strip().partition(";")[0]  # "4711" or "4711;cluster"


# What is not a number is left of a disk without space.
_SAVED = rf"""
last_saved=0 restarts=0
[ -r "$job_files.restarts" ] && read -r last_saved restarts < "$job_files.restarts"
case "$last_saved:$restarts" in *[!0-9:]*|:*|*:) last_saved=0 restarts=0 ;; esac
export {SAVED_STEP_VARIABLE}=$last_saved"""

_TOKEN = r"""
# slurmctld may be away for some minutes, or the disk full.
patiently() {
    for pause in 1 2 5 10 20 30 60 60 60 60; do "$@" && return; sleep "$pause"; done
    "$@"
}

# By this secret the tasks know each other. A file, which no list of processes or of the job's variables shows.
export OPENPI_TRAIN_JOB_TOKEN_FILE="$job_files.token"
write_token() {
    (umask 077; rm -f "$job_files.token"; od -An -v -tx1 -N16 /dev/urandom | tr -d ' \n' > "$job_files.token")
    [ "$(wc -c < "$job_files.token")" -eq 32 ]
}
rm -f "$job_files.ended_well" """
_NO_TOKEN = "$job_files.token cannot be written: is the disk full?"

_TASK = r"""
# srun returns the highest exit code of its tasks, which should be the cause and not a consequence. So each task raises
# its own: one after which the run starts again ("lost a peer", "saved and stopped") to 150 and above, the program's
# other errors to 180 and above. A task that was killed (129 and up) then counts only if there is no other cause. The
# program handles signals.
task='trap : INT TERM USR1 USR2
    [ "$SLURM_PROCID" = 0 ] && export OPENPI_TRAIN_STATUS_FILE="$job_files.status.json"
    "$@"; code=$?
    [ "$code:$SLURM_PROCID" = 0:0 ] && : > "$job_files.ended_well"
    [ "$code" = "$without_node" ] && echo "$SLURMD_NODENAME" >> "$job_files.failed_nodes"
    case "$again" in *" $code "*) exit $((code + 80));; esac
    [ "$code" -ge 1 ] && [ "$code" -le 75 ] && code=$((code + 180)); exit "$code"'

# The time limit and `scancel --signal=TERM <job>` reach the tasks without this shell, `scancel --batch` only this
# shell, which forwards it; not through srun, which would kill the tasks.
trap 'scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null' TERM USR1
"""

_END = r"""step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done  # a signal interrupts `wait`
wait "$step"
code=$?
rm -f "$job_files.token"
trap '' TERM USR1
raised=$code
case "$again" in *" $((raised - 80)) "*) code=$((raised - 80)) ;; esac
if [ "$raised" -gt 180 ]; then code=$((raised - 180)); fi

# Restarts are counted from the last progress on: a start that saved a later step than any before begins anew.
starts=$((${SLURM_RESTART_COUNT:-0} + 1))
saved=$(sed -n 's/.*"saved_step": \([0-9]*\).*/\1/p' "$job_files.status.json" 2>/dev/null)
if [ "${saved:-0}" -gt "$last_saved" ]; then last_saved=$saved restarts=0; fi

avoid_failed_nodes() {  # only a pending job can be given nodes to avoid; one that needs all nodes gets them again
    failed=$(sort -u "$job_files.failed_nodes") others=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" \
        --states=idle,alloc,mix --format=%N | sort -u | grep -vxF "$failed" | wc -l)
    if [ "$others" -ge "$SLURM_JOB_NUM_NODES" ]; then
        say "without nodes whose hardware has failed: $(echo "$failed" | paste -sd,)"
        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$(echo "$failed" | paste -sd,)"
    fi
}
say() { echo "$(date +%FT%T) job $SLURM_JOB_ID, start $starts: exit code $code, $*"; }
# Tasks raise their codes, so a small one is srun's own: it could not start them, or has lost the controller. A program
# that is not there has 126 or 127.
if [ "$raised" -ge 1 ] && [ "$raised" -le 125 ]; then code=$lost; say "srun itself has failed, with $raised"; fi
# It may end with 0 where a node went down.
if [ "$raised" = 0 ] && [ ! -e "$job_files.ended_well" ]; then code=$lost; say "srun ended with 0, but not the run"; fi
rm -f "$job_files.ended_well"
# Codes above 128 are those of tasks that were killed: for memory, or told to stop before the program listened.
case "$never" in *" $code "*) again="" ;; esac
if [ "$code" -gt 128 ] && [ -n "$again" ]; then again=" $code "; fi
case "$again" in
    *" $code "*)
        state=$(patiently squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
        if [ "$state" != RUNNING ]; then
            say "not requeued, since the job is being ended from outside (state: ${state:-unknown})"
        elif [ "$restarts" -ge "$max_restarts" ]; then
            say "not requeued again: $restarts restarts in a row saved nothing new (--max-restarts $max_restarts)"
        else
            say "requeueing"
            echo "$last_saved $((restarts + 1))" > "$job_files.restarts"
            patiently scontrol requeue "$SLURM_JOB_ID" || say "scontrol could not requeue it"
            [ "$code" = "$without_node" ] && avoid_failed_nodes
        fi
        ;;
    *) say "the run has ended" ;;
esac
exit "$code"
"""
