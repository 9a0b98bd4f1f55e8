"""A real Slurm on this machine: a controller, two node daemons and a munge of its own, all in one folder.

    python -m benchmarks.drill.slurm_cluster        # until Ctrl-C; prints what to export

Debian's packages slurm-wlm and munge, as root (the daemons start tasks as the user who submits, and each node has a
mount namespace). Nothing outside the folder is touched: munge has its own key and socket, the ports are free ones, and
the names node1 and node2 are known only where the nodes' tasks run. Read next: `under_slurm.py`, and `tests/slurm`.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from openpi_train.launch.processes import free_port

NODES = ("node1", "node2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# SlurmdTimeout is when a node is down whose daemon is silent.
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
SlurmdTimeout=15
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


class Cluster:
    """The daemons of a cluster in `folder`, an empty one with a short path, until the end of the `with`.

    `variables` are those that Slurm's commands need.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        self._commands = {
            "munged": ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *munge],
            "slurmctld": ["slurmctld", "-D"],
        }
        for node in NODES:
            mount = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
            self._commands[node] = ["unshare", "--mount", "bash", "-c", mount]
        self._running: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        folder = self._folder
        folder.chmod(0o755)  # munge's socket is for everybody
        for name in ("state", "spool", "spool/node1", "spool/node2", "log"):
            (folder / name).mkdir()
        for name in ("gpu0", "gpu1"):
            (folder / name).touch()
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=_host(), ports=_free_ports(3)))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        (folder / "cgroup.conf").touch()
        (folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(NODES)}\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        try:
            self.start("munged")
            _await(lambda: (folder / "munge.socket").exists(), folder)
            for name in ("slurmctld", *NODES):
                self.start(name)
            _await(lambda: self.ask("sinfo", "--noheader", "--format=%T %D") == f"idle {len(NODES)}", folder)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel_all()
        self._end()

    def start(self, name: str) -> None:
        """Start a daemon: "munged", "slurmctld", or that of a node, by the node's name."""
        with (self._folder / "log" / f"{name}.txt").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._commands[name],
                env={**os.environ, "PATH": _PATH, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who end them in order
            )

    def kill(self, name: str) -> None:
        """SIGKILL to a daemon; what it has started lives on."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def ask(self, *command: str) -> str:
        """What a command of Slurm's prints, whether it succeeds or not."""
        variables = {**os.environ, **self.variables}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def cancel_all(self) -> None:
        """End all jobs, and wait until none of their processes is left."""
        self.ask("scancel", "--user=root")
        deadline = time.monotonic() + 240
        while self.ask("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.2)

    def _end(self) -> None:
        for process in reversed(self._running.values()):
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(condition, folder: Path, limit_s: float = 240) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in (folder / "log").iterdir())
            raise RuntimeError(f"the cluster did not come up within {limit_s:.0f} s\n{logs}")
        time.sleep(0.1)


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
    with tempfile.TemporaryDirectory(prefix="slurm_") as place, Cluster(Path(place)) as found:
        exports = (f"export {name}={value}" for name, value in found.variables.items())
        print(*exports, "# until Ctrl-C", flush=True)
        try:
            time.sleep(1e9)
        except KeyboardInterrupt:
            print("ending")
