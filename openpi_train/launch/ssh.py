"""`launch ssh`: all processes of a run on a list of hosts, started and watched from here. Read next: `remote.py`.

One ssh per host runs the host's processes. This launcher treats them like local ones: their lines are shown here,
the first failure ends all, signals are forwarded, and nothing is left running when the launcher or its connection dies.
"""

import dataclasses
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train import faults
from openpi_train.launch import remote
from openpi_train.launch.child import DRAIN_S, Child, Started
from openpi_train.launch.options import Here, Launch, PerNode, at_least, option
from openpi_train.launch.preflight import require_start, sizes_of_run
from openpi_train.launch.processes import LaunchOutcome, ProcessRecord, announced, oversee, show_line
from openpi_train.launch.spec import DEFAULT_PORT, LaunchError, LaunchSpec, check_variable, share_of, this_python
from openpi_train.launch.status import Status
from openpi_train.launch.supervise import Rules, Start, max_restarts_option, supervise

# No prompts, which nobody could answer; a lost host is noticed after a minute.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
_ANSWER_S = 45.0  # more than ssh's own limit on connecting
_PORTS = 1000  # that restarts use in turn
_SSH_FAILED = 255  # ssh's own failure; every other code is that of the remote program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ssh(Launch):
    """All processes on a list of hosts, started from here."""

    hosts: str | None = option("comma-separated host names for ssh; user@host if needed", None, one_of="hosts")
    hosts_file: Path | None = option("file with a host per line; # begins a comment", None, one_of="hosts")
    per_node: PerNode
    master_addr: str | None = option("address of the first host, which all hosts can reach (default: its name)", None)
    master_port: int | None = option(
        f"coordinator's port there (default: {DEFAULT_PORT}, and others for restarts)", None
    )
    workdir: str | None = option("working directory on every host (default: the current one)", None)
    python: str = option("Python on every host (default: the path of this one)", sys.executable)
    env: tuple[str, ...] = option(
        "variables; NAME alone: its value here", (), nargs="+", action="extend", metavar="NAME=VALUE"
    )
    ssh_command: str = option("command to connect with, instead of: %(default)s", SSH)
    max_restarts: int = max_restarts_option()
    min_nodes: int | None = option(
        "continue with the other hosts after one was lost, if this many are left (default: always all)",
        None,
        type=at_least(0),
        metavar="M",
    )
    num_hosts: int | None = option(
        "how many of the hosts to use at a time; the others are spare (default: all)",
        None,
        flags=["--nodes"],
        type=at_least(1),
        metavar="N",
    )
    no_check: bool = option("start without looking, on the first host, whether the run would start", False)
    here: Here

    def launch(self) -> int:
        """Start the processes on all hosts, with restarts if requested, and return the exit code of the run."""
        hosts = {_name(host): host for host in self._words_of_hosts()}
        if self.min_nodes is not None and not self.max_restarts:
            raise LaunchError("--min-nodes needs restarts after a host was lost: also give --max-restarts")
        number = len(hosts) if self.num_hosts is None else self.num_hosts
        if number > len(hosts):
            raise LaunchError(f"--nodes {number} is more than the {len(hosts)} hosts that are named")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= number:
            raise LaunchError(f"--min-nodes {self.min_nodes} is not from 1 to {number}, the number of hosts")
        env = _variables(self.env)
        if self.python == sys.executable:
            this_python()
        workdir = os.getcwd() if self.workdir is None else self.workdir
        far = f"cd {shlex.quote(workdir)} && exec {shlex.quote(self.python)} -m {remote.__name__}"
        lines = {name: (*shlex.split(self.ssh_command), host, far) for name, host in hosts.items()}
        first = Start(arguments=self.arguments, hosts=tuple(hosts)[:number])
        spec = self._spec(first, first.hosts[0])
        if self.here.dry_run:
            for node, line in enumerate(lines[name] for name in first.hosts):
                print(shlex.join(line))
                for command in share_of(spec, node):
                    print(f"    {command.line()}")
            return 0
        if not self.no_check:
            name, python = first.hosts[0], self.python
            ssh = (*shlex.split(self.ssh_command), hosts[name])
            asked = {"python": python, "folder": Path(workdir), "env": env, "host": ssh}
            require_start(self.arguments, num_devices=number * (self.devices_of_host or 0), **asked)
        num_processes = number * spec.processes_per_host
        log_dir = announced(num_processes, self.here.log_dir, f" on {', '.join(first.hosts)}")

        def begin(start: Start) -> LaunchOutcome:
            spec = dataclasses.replace(self._spec(start, first.hosts[0]), token=secrets.token_hex(16))
            job = {"spec": dataclasses.asdict(spec), "env": env, "grace_s": self.here.grace_s}
            return _run(job, spec, {name: lines[name] for name in start.hosts}, start.log_dir(log_dir))

        rules = Rules(
            max_restarts=self.max_restarts,
            min_hosts=self.min_nodes,
            sharing=lambda counts: self.sharing(counts, number, workdir),
            hosts=tuple(hosts),
            num_hosts=number,
            answers=lambda name: _answers((*shlex.split(self.ssh_command), hosts[name], "true")),
        )
        return supervise(begin, first, rules)

    @property
    def devices_of_host(self) -> int | None:
        """The devices of each host; None: that depends on the host."""
        given = self.here.devices_per_process
        return self.per_node.gpus_per_node or (None if given is None else given * self.per_node.processes)

    def sharing(self, counts: Sequence[int], num_at_first: int, workdir: str) -> list[int]:
        """Those of these numbers of hosts on which a run that began on `num_at_first` can go on.

        They can share its batch, and make whole replicas if any of them does. The run is asked, here; if it does not
        know, it checks itself when it starts.
        """
        devices = self.devices_of_host or self.per_node.processes
        sizes = sizes_of_run(self.arguments, num_at_first * devices, workdir)
        if sizes is None:
            return list(counts)
        sharing = [count for count in counts if sizes.can_share_batch(count * devices)]
        return [count for count in sharing if sizes.make_replicas(count * devices)] or sharing

    def _spec(self, start: Start, first_host: str) -> LaunchSpec:
        """The processes and hosts of one start. A restart has another port, so remains of an old start cannot
        interfere."""
        master, *others = start.hosts
        if master == first_host and self.master_addr:
            master = self.master_addr
        return LaunchSpec(
            arguments=start.arguments,
            processes_per_host=self.per_node.processes,
            hosts=(master, *others),
            port=self.master_port or DEFAULT_PORT + start.number % _PORTS,
            devices_per_process=self.here.devices_per_process,
            restart=start.number,
            saved_step=start.saved_step,
            program=(self.python, "-m", "openpi_train"),
        )

    def _words_of_hosts(self) -> list[str]:
        """The hosts as given to ssh: name, or user@name."""
        if self.hosts_file is None:
            words = (self.hosts or "").split(",")
        else:
            try:
                lines = self.hosts_file.read_text().splitlines()
            except OSError as error:
                raise LaunchError(f"--hosts-file {self.hosts_file}: {error.strerror}") from None
            words = [line.partition("#")[0] for line in lines]
        hosts = [word.strip() for word in words if word.strip()]
        if not hosts:
            raise LaunchError("no host is named: give --hosts node1,node2 or a --hosts-file with one per line")
        for host in hosts:
            if host.split() != [host] or host.startswith("-"):
                raise LaunchError(f"host {host!r} is no name: one per line, or commas between, as in user@node1,node2")
        names = [_name(host) for host in hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise LaunchError(f"{', '.join(twice)} named more than once: give each host once")
        return hosts


def _run(job: dict[str, Any], spec: LaunchSpec, lines: Mapping[str, Sequence[str]], log_dir: Path) -> LaunchOutcome:
    """Run one start to its end: each host's ssh command gets its processes of the job."""
    count, names = spec.processes_per_host, list(lines)
    records = [ProcessRecord(rank, log_dir, names[rank // count]) for rank in range(len(names) * count)]
    started = (
        Host(name, line, {**job, "node": node}, records[node * count : (node + 1) * count])
        for node, (name, line) in enumerate(lines.items())
    )
    return oversee(started, records, job["grace_s"])


class Host(Started):
    """One host of the run: its ssh, and the records of the processes there."""

    def __init__(self, name: str, argv: Sequence[str], job: dict[str, Any], records: Sequence[ProcessRecord]):
        self._name = name
        self._records = {record.rank: record for record in records}
        self._words: list[bytes] = []
        self._running = False
        self._over = threading.Event()
        self._child = Child(argv, {}, self._take, self._end, with_input=True)
        self._say(job)

    def watch(self) -> None:
        """Start to read its reports and to send heartbeats."""
        self._child.watch()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, signum: int) -> None:
        """Send a signal to all processes of the host; after SIGKILL, do not wait for an answer."""
        self._say({"signal": signum})
        if signum == signal.SIGKILL:  # the host may be unreachable
            timer = threading.Timer(DRAIN_S, self._child.send, [signum])
            timer.daemon = True
            timer.start()

    def close(self) -> None:
        """Close its input, so that the remote side cleans up, and read its output to the end."""
        self._child.close_input()
        self._child.wait(DRAIN_S)
        self._child.close()

    def _say(self, message: dict[str, Any]) -> None:
        self._child.write(json.dumps(message).encode() + b"\n")

    def _beat(self) -> None:
        while not self._over.wait(remote.BEAT_S):
            self._say({})

    def _take(self, line: bytes, is_error: bool) -> None:
        """Handle a line from ssh: a report of the remote side, or output of ssh or the remote shell."""
        if not line.startswith(remote.MARK):
            self._words.append(line)
            if is_error:
                show_line(f"[{self._name}]", line)
            return
        kind, *news = json.loads(line.removeprefix(remote.MARK))
        if kind == remote.STARTED:
            self._running = True
        elif kind == remote.LINE:
            rank, is_error, text = news
            self._records[rank].take(text.encode(), is_error)
        elif kind == remote.STATUS:
            rank, told = news
            self._records[rank].status = Status(**told)
        elif kind == remote.ENDED:
            rank, code = news
            self._records[rank].end(code)

    def _end(self, code: int) -> None:
        """ssh has ended: processes whose end was not reported are lost."""
        self._over.set()
        self._child.drain()
        if lost := [record for record in self._records.values() if record.code is None]:
            self._give_up(lost, code)
        self._child.close_input()

    def _give_up(self, lost: Sequence[ProcessRecord], code: int) -> None:
        if self._running:
            reason = f"the connection to {self._name} was lost (ssh ended with code {code})"
        else:
            reason = f"nothing could be started on {self._name} (ssh ended with code {code})"
        for line in (*self._words, f"{reason}\n".encode()):
            lost[0].take(line, True)
        for record in lost:
            if self._running or code == _SSH_FAILED:
                record.lose(faults.PEER_LOST)
            else:
                record.end(faults.USAGE)


def _answers(line: Sequence[str]) -> bool:
    """Whether this command, which does nothing on a host, ends well in time."""
    try:
        return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _name(host: str) -> str:
    """The host of "user@host"."""
    return host.rpartition("@")[2]


def _variables(words: Sequence[str]) -> dict[str, str]:
    """The variables of --env: NAME=VALUE, or NAME for its local value."""
    variables = {}
    for word in words:
        name, given, value = word.partition("=")
        check_variable(name)
        if not given and name not in os.environ:
            raise LaunchError(f"--env {name}: it has no value here; give {name}=<value>, or leave it out")
        variables[name] = value if given else os.environ[name]
    return variables
