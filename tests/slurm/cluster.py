"""A real Slurm on this machine: a controller, two node daemons and a munge of its own, all in one folder.

    python tests/slurm/cluster.py        # until Ctrl-C; prints what to export

Debian's packages slurm-wlm and munge, as root (the daemons start tasks as the user who submits, and each node has a
mount namespace). Nothing outside the folder is touched: munge has its own key and socket, the ports are free ones, and
the names node1 and node2 are known only where the nodes' tasks run. Read next: `test_requeue.py`.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from openpi_train.launch.processes import free_port

NODES = ("node1", "node2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# cred_expire is also how long Slurm holds a requeued job back (else 120 s). The GPUs are made up; nobody uses them.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=15
MinJobAge=600
SchedulerParameters=sched_interval=5
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def why_not() -> str | None:
    """Why there can be no cluster here, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: apt-get install slurm-wlm munge; `make test` does as root)"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "this machine allows no mount namespace"
    return None


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster in `folder`, an empty one with a short path; yields the variables that Slurm's commands need."""
    folder.chmod(0o755)  # munge's socket is for everybody
    for name in ("state", "spool", "spool/node1", "spool/node2", "log"):
        (folder / name).mkdir()
    for name in ("gpu0", "gpu1"):
        (folder / name).touch()
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=_host(), ports=_free_ports(3)))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    (folder / "cgroup.conf").touch()
    (folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(NODES)}\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as daemons:
        munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        _start(daemons, folder, "munged", ["munged", "--foreground", "--force", f"--key-file={key}", *munge], variables)
        _await(lambda: (folder / "munge.socket").exists(), folder)
        _start(daemons, folder, "slurmctld", ["slurmctld", "-D"], variables)
        for node in NODES:
            mount = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
            _start(daemons, folder, node, ["unshare", "--mount", "bash", "-c", mount], variables)
        _await(lambda: _ask(variables, "sinfo", "--noheader", "--format=%T %D") == f"idle {len(NODES)}", folder)
        daemons.callback(_cancel_all, variables)
        yield variables


def _start(daemons: ExitStack, folder: Path, name: str, command: list[str], variables: dict[str, str]) -> None:
    """Start a daemon that is ended with `daemons`, the last one first."""
    with (folder / "log" / f"{name}.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PATH": _PATH, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us, who end them in order
        )

    def end() -> None:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    daemons.callback(end)


def _cancel_all(variables: dict[str, str]) -> None:
    """End all jobs, and wait until none of their processes is left."""
    _ask(variables, "scancel", "--user=root")
    deadline = time.monotonic() + 240
    while _ask(variables, "squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.2)


def _await(condition, folder: Path, limit_s: float = 240) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in (folder / "log").iterdir())
            raise RuntimeError(f"the cluster did not come up within {limit_s:.0f} s\n{logs}")
        time.sleep(0.1)


def _ask(variables: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return sorted(found)


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="slurm_") as place, cluster(Path(place)) as found:
        print(*(f"export {name}={value}" for name, value in found.items()), "# until Ctrl-C", flush=True)
        try:
            time.sleep(1e9)
        except KeyboardInterrupt:
            print("ending")
