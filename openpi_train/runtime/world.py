"""Find this process's index among all processes of the run, from flags and the environment, without side effects.

Read next: `session.py`, which starts jax with the result, and `rendezvous.py`, which checks that all agree on it.

The first of these sources that is present is used: explicit flags, RANK-style variables (set by our launchers), a Slurm
step, Open MPI, a pod of a Kubernetes Indexed Job; otherwise the process is alone. jax's own detection is never used: it
differs between releases, gives every process one GPU under Slurm, and fails in a Kubernetes pod without a service
account.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping

from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.job_token import FILE_VARIABLE, TOKEN_VARIABLE, given_token

# Comma-separated host names in order, from a launcher that knows them.
HOSTS_VARIABLE = "OPENPI_TRAIN_HOSTS"
# Set by `launch kubernetes`; the index of a pod, JOB_COMPLETION_INDEX, is set by Kubernetes itself.
_POD_INDEX, _POD_COUNT, _POD_COORDINATOR = (
    "JOB_COMPLETION_INDEX",
    "OPENPI_TRAIN_NUM_PROCESSES",
    "OPENPI_TRAIN_COORDINATOR",
)
_INTERACTIVE_STEP = "4294967290"  # the shell that salloc may open on the first node, a step of one task
_JAX_VARIABLES = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WORTH_NOTHING_WITHOUT = {
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI_SIZE": ("PMI_RANK",),
    "RANK and WORLD_SIZE": ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "JAX_COORDINATOR_ADDRESS"),
}
# What a launcher that starts processes within a task sets; the process is then one of those, and not the task.
_STARTED_WITHIN_A_TASK = (TOKEN_VARIABLE, FILE_VARIABLE, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldFlags:
    """Flags that identify the process; give all three, or none to detect them."""

    coordinator: str | None = None
    """Address of process 0 as host:port. The port must be free there. None, as with the next two: detected from RANK..,
    Slurm, Open MPI or Kubernetes (docs/howto/hosts.md)."""
    num_processes: int | None = None
    """Number of processes of the run."""
    process_id: int | None = None
    """This process, from 0 to num_processes - 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """One process's index among all. `local_count` is None if the number of processes on this host is unknown."""

    process_index: int
    process_count: int
    local_index: int
    local_count: int | None
    coordinator: str | None
    """host:port, or None for a process alone, which uses a free port."""
    source: str
    """"flags", "environment", "slurm", "openmpi", "kubernetes" or "alone"."""
    token: str = dataclasses.field(default="", repr=False)
    """What keeps processes of other jobs out of the rendezvous: the job's secret, or its number in a queue."""
    token_is_secret: bool = False
    hosts: tuple[str, ...] = ()
    """The hosts' names in order, if a launcher gave them; only used to name missing hosts."""
    notes: tuple[str, ...] = ()
    """Notes on environment variables that were ignored, with the reason."""

    def __post_init__(self):
        if self.process_count < 1 or not 0 <= self.process_index < self.process_count:
            raise UsageError(
                f"process {self.process_index} of {self.process_count} (from {self.source}) cannot be: "
                "ids run from 0 to the number of processes less one"
            )
        if self.local_count is not None and not 0 <= self.local_index < self.local_count:
            raise UsageError(
                f"local process {self.local_index} of {self.local_count} on this host (from {self.source}) cannot be: "
                "check LOCAL_RANK and LOCAL_WORLD_SIZE"
            )
        if self.coordinator is not None:
            split_address(self.coordinator)

    def host_of(self, process_index: int) -> str | None:
        """The name of a process's host, if it is known: launchers start equally many processes on all hosts."""
        if not self.hosts or self.process_count % len(self.hosts):
            return None
        return self.hosts[process_index // (self.process_count // len(self.hosts))]


def find_world(flags: WorldFlags, environ: Mapping[str, str]) -> World:
    """This process's `World`, from the first source that is present.

    Raises:
        UsageError: a source is incomplete or invalid (RANK without WORLD_SIZE, a word for a number), or another one
            contradicts it.
    """
    world = _from_flags(flags) or _from_environment(environ) or _from_slurm(environ) or _from_openmpi(environ)
    world = world or _from_kubernetes(environ) or _alone(environ)
    hosts = tuple(filter(None, environ.get(HOSTS_VARIABLE, "").split(",")))
    world = dataclasses.replace(world, hosts=hosts)
    secret = given_token(environ) if world.process_count > 1 else None
    return dataclasses.replace(world, token=secret, token_is_secret=True) if secret else world


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether a launcher starts again what it has started before, unchanged."""
    counts = (environ.get(name, "") for name in ("OPENPI_TRAIN_RESTART", "SLURM_RESTART_COUNT"))
    return any(count.isdecimal() and int(count) > 0 for count in counts)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" ("[::1]:port" for IPv6)."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"coordinator address {address!r} is not host:port with a port from 1 to 65535")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by a name that no other machine can use."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _from_flags(flags: WorldFlags) -> World | None:
    given = {
        "--coordinator": flags.coordinator,
        "--num-processes": flags.num_processes,
        "--process-id": flags.process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        present = ", ".join(name for name in given if name not in missing)
        raise UsageError(f"{present} given without {', '.join(missing)}; give all three, or none to have it detected")
    assert flags.num_processes is not None and flags.process_id is not None
    local_index, local_count = _place_on_host(flags.coordinator, flags.process_id, flags.num_processes)
    return World(
        process_index=flags.process_id,
        process_count=flags.num_processes,
        local_index=local_index,
        local_count=local_count,
        coordinator=flags.coordinator,
        source="flags",
    )


def _from_environment(environ: Mapping[str, str]) -> World | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None and (size is None or size == 1):
        return None
    needed = ["RANK", "WORLD_SIZE"] + (["MASTER_ADDR", "MASTER_PORT"] if size != 1 else [])
    missing = [name for name in needed if name not in environ]
    if missing or rank is None or size is None:
        present = [f"{name}={environ[name]}" for name in _RANK_VARIABLES if name in environ]
        raise UsageError(
            f"the environment says {' '.join(present)} but not {', '.join(missing)}: set "
            f"{'it' if len(missing) == 1 else 'them'} too, or unset RANK and WORLD_SIZE to train alone"
        )
    _refuse_fewer_than_tasks(environ, rank, size)
    coordinator = None
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        coordinator = f"{environ['MASTER_ADDR']}:{_free_port(environ)}"
    local_index, local_count = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE")
    if local_index is None:
        local_index, local_count = _place_on_host(coordinator, rank, size)
    return World(
        process_index=rank,
        process_count=size,
        local_index=local_index,
        local_count=local_count,
        coordinator=coordinator,
        source="environment",
    )


def _refuse_fewer_than_tasks(environ: Mapping[str, str], rank: int, size: int) -> None:
    """Raise UsageError if RANK and WORLD_SIZE are left over from before the tasks that this process is one of.

    Each of 8 tasks would be the whole of a run of WORLD_SIZE=1. A launcher within a task, such as torchrun, makes at
    least as many processes as there are tasks, or says itself that it has started the process.
    """
    is_started = any(name in environ for name in _STARTED_WITHIN_A_TASK)
    if is_started or (_number(environ, "LOCAL_WORLD_SIZE") or 1) > 1:
        return
    for what, index, count in _tasks(environ):
        if (tasks := _number(environ, count) or 1) > size:
            raise UsageError(
                f"RANK={rank} WORLD_SIZE={size} contradicts {what}, {index}={environ.get(index)} {count}={tasks}: this "
                f"process is one of {size} by the first and one of {tasks} by the second. Unset RANK and WORLD_SIZE "
                f"for one run of {tasks} processes; for runs of {size}, give each its --coordinator, --num-processes "
                "and --process-id"
            )


def _tasks(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """What started the process as one of several tasks: in words, and the variables of its index and their number."""
    slurm = [("the Slurm step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")] if in_slurm_step(environ) else []
    return [
        *slurm,
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("the pod of an Indexed Job", _POD_INDEX, _POD_COUNT),
        ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    ]


def _free_port(environ: Mapping[str, str]) -> str:
    """MASTER_PORT, or the port after it under torchrun, which listens on MASTER_PORT itself."""
    port = environ["MASTER_PORT"]
    is_taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and port.isdecimal()
    return str(int(port) + 1) if is_taken else port


def _from_slurm(environ: Mapping[str, str]) -> World | None:
    """A task of a Slurm step, started by srun; not a batch script, salloc or an ssh login into an allocation."""
    if not in_slurm_step(environ):
        return None
    names = ("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    values = {name: _number(environ, name) for name in names}
    missing = [name for name, value in values.items() if value is None]
    if missing or "SLURM_STEP_TASKS_PER_NODE" not in environ:
        missing = missing or ["SLURM_STEP_TASKS_PER_NODE"]
        raise UsageError(f"a Slurm step without {', '.join(missing)}: start with srun, or give --coordinator etc.")
    job, count, index, local_index, node = (values[name] or 0 for name in names)
    restart, step = (_number(environ, name) or 0 for name in ("SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    port = _job_port(job + 1009 * restart + 101 * step)  # a different port for each start
    tasks = slurm_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    return World(
        process_index=index,
        process_count=count,
        local_index=local_index,
        local_count=tasks[node],
        coordinator=f"{_slurm_address(environ, len(tasks))}:{environ.get('MASTER_PORT') or port}",
        source="slurm",
        token=f"slurm-{job}.{environ.get('SLURM_STEP_ID', '')}.{environ.get('SLURM_RESTART_COUNT', '')}",
    )


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a step (a process of the run), not a batch script or shell in a job."""
    return "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_STEP_ID") != _INTERACTIVE_STEP


def _slurm_address(environ: Mapping[str, str], num_hosts: int) -> str:
    """The first host's name, or its variant by MASTER_ADDR ("{host}-ib", the host's name on another network)."""
    address = environ.get("MASTER_ADDR") or "{host}"
    if num_hosts > 1 and is_loopback(address):
        raise UsageError(
            f"MASTER_ADDR={address} in a Slurm step on {num_hosts} hosts: the others cannot reach process 0 there. "
            "Unset it, or give a name or an address of the step's first host, which {host} stands for"
        )
    return address.replace("{host}", first_slurm_host(environ["SLURM_STEP_NODELIST"]))


def _from_openmpi(environ: Mapping[str, str]) -> World | None:
    """A process of mpirun. Its coordinator is mpirun's own host, where rank 0 runs unless told otherwise."""
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    prefix = "OMPI_COMM_WORLD_"
    count, index, local_index, local_count = (
        _number(environ, prefix + name) for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    )
    if count is None or index is None or local_index is None or local_count is None:
        raise UsageError(f"{prefix}SIZE is set but not {prefix}RANK, _LOCAL_RANK and _LOCAL_SIZE: start with mpirun")
    # "<jobid>;tcp://10.0.0.1,10.1.0.1:43210": Open MPI 4; later ones do not say where mpirun runs.
    uri = re.search(r"tcp6?://\[?([^,:\]]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if local_count == count else uri and uri.group(1))
    if not host:
        raise UsageError("mpirun does not say where process 0 runs: pass its address with mpirun -x MASTER_ADDR=<host>")
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE", "")
    return World(
        process_index=index,
        process_count=count,
        local_index=local_index,
        local_count=local_count,
        coordinator=f"{host}:{environ.get('MASTER_PORT') or _job_port(zlib.crc32(job.encode()))}",
        source="openmpi",
        token=f"openmpi-{job}",
    )


def _from_kubernetes(environ: Mapping[str, str]) -> World | None:
    """The process of a pod of an Indexed Job, one per host. Only the manifest has their number."""
    index, count = _number(environ, _POD_INDEX), _number(environ, _POD_COUNT)
    if index is None and count in (None, 1):
        return None
    needed = (_POD_INDEX, _POD_COUNT) if count == 1 else (_POD_INDEX, _POD_COUNT, _POD_COORDINATOR)
    missing = [name for name in needed if name not in environ]
    if missing or index is None or count is None:
        present = [f"{name}={environ[name]}" for name in needed if name in environ]
        what = {
            _POD_INDEX: "`completionMode: Indexed` in the Job's spec",
            _POD_COUNT: f"{_POD_COUNT}=<number of pods>, or 1 for pods that each train alone",
            _POD_COORDINATOR: f"{_POD_COORDINATOR}=<name of the pod with index 0>:<port>",
        }
        raise UsageError(
            f"a Kubernetes pod with {' '.join(present)} but without {', '.join(missing)}: set "
            f"{'; '.join(what[name] for name in missing)}. `launch kubernetes` writes a manifest that has it all"
        )
    coordinator = environ.get(_POD_COORDINATOR) if count > 1 else None
    return World(
        process_index=index if count > 1 else 0,
        process_count=count,
        local_index=0,
        local_count=1,
        coordinator=coordinator,
        source="kubernetes",
        token=f"kubernetes-{coordinator}",
    )


def _alone(environ: Mapping[str, str]) -> World:
    """A process alone, with a note for every sign of a cluster that is too incomplete to use."""
    if (_number(environ, "PMI_SIZE") or 1) > 1:
        said = " ".join(f"{name}={environ[name]}" for name in ("PMI_RANK", "PMI_SIZE") if name in environ)
        raise UsageError(
            f"{said}: started by MPICH or Intel MPI, which do not say where process 0 runs. Start with `launch`, srun "
            "or Open MPI's mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; unset PMI_SIZE to train alone"
        )
    if (_number(environ, "JAX_NUM_PROCESSES") or 1) > 1:
        said = " ".join(f"{name}={environ[name]}" for name in _JAX_VARIABLES if name in environ)
        raise UsageError(
            f"{said}: neither jax nor this program reads JAX_NUM_PROCESSES, so that every process would train alone. "
            "Give --coordinator, --num-processes and --process-id, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT; unset JAX_NUM_PROCESSES to train alone"
        )
    notes = []
    if "SLURM_JOB_ID" in environ:
        notes.append(
            f"inside Slurm job {environ['SLURM_JOB_ID']} but not in a step of it (a batch script, salloc or an ssh "
            "login): training alone in this process; use srun to start one process per task"
        )
    for needed, names in _WORTH_NOTHING_WITHOUT.items():
        if unused := [name for name in names if name in environ]:
            notes.append(f"{', '.join(unused)} set without {needed}: not used, training alone in this process")
    return World(
        process_index=0,
        process_count=1,
        local_index=0,
        local_count=1,
        coordinator=None,
        source="alone",
        notes=tuple(notes),
    )


def first_slurm_host(nodelist: str) -> str:
    """The first host of a Slurm node list: "gpu[07-09,12],x" gives "gpu07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise UsageError(f"Slurm node list {nodelist!r} names no host")
    return re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", first.group())


def slurm_counts(tasks_per_node: str) -> list[int]:
    """Tasks on each node of a step: "4(x2),3" gives [4, 4, 3]."""
    counts = []
    for part in tasks_per_node.split(","):
        parsed = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if parsed is None:
            raise UsageError(f"Slurm tasks per node {tasks_per_node!r} is not of the form 4(x2),3")
        counts += [int(parsed[1])] * int(parsed[2] or 1)
    return counts


def _place_on_host(coordinator: str | None, index: int, count: int) -> tuple[int, int]:
    """Default local index and count: all on one host if its address is loopback, else one per host."""
    if coordinator is None or is_loopback(split_address(coordinator)[0]):
        return index, count
    return 0, 1


def _job_port(job: int) -> int:
    return 12000 + job % 20000  # below the ports that kernels give out


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is None:
        return None
    if not value.isdecimal():
        raise UsageError(f"{name}={value!r} in the environment is not a whole number")
    return int(value)
