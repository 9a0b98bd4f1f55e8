"""`launch manual`: this host's processes of a run on several hosts, started by hand on each.

Read next: `processes.py`.
"""

import dataclasses
import shlex

from openpi_train.launch.options import Here, Launch, PerNode, option
from openpi_train.launch.processes import announced, run, show
from openpi_train.launch.spec import DEFAULT_PORT, LaunchError, LaunchSpec, share_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manual(Launch):
    """This host's processes; run it on every host of the run."""

    node_rank: int = option("index of this host, from 0 to the number of hosts - 1")
    num_nodes: int = option("number of hosts")
    master_addr: str = option("address of host 0, which all hosts can reach")
    master_port: int = option("coordinator's port there (%(default)s)", DEFAULT_PORT)
    per_node: PerNode
    job_token: str = option("a secret, the same on all hosts (default: made by process 0, in the run's folder)", "")
    here: Here

    def launch(self) -> int:
        """Start this host's processes, print the commands for the other hosts, and return the exit code."""
        if not 0 <= self.node_rank < self.num_nodes:
            raise LaunchError(
                f"--node-rank {self.node_rank} is not from 0 to {self.num_nodes - 1} (--num-nodes less one)"
            )
        if not self.master_addr.strip():
            raise LaunchError("--master-addr is empty: give the address of host 0, which all hosts can reach")
        spec = LaunchSpec(
            arguments=self.arguments,
            processes_per_host=self.per_node.processes,
            hosts=(self.master_addr, *(f"host {node}" for node in range(1, self.num_nodes))),
            port=self.master_port,
            devices_per_process=self.here.devices_per_process,
            token=self.job_token,
        )
        for node in range(self.num_nodes):
            if node != self.node_rank:
                print(f"on host {node}: {self._line(node)}", flush=True)
        share = share_of(spec, self.node_rank)
        if self.here.dry_run:
            return show(share)
        return run(share, announced(len(share), self.here.log_dir), self.here.grace_s).code

    def _line(self, node: int) -> str:
        """The command that starts the processes of another host."""
        options = {
            "--node-rank": node,
            "--num-nodes": self.num_nodes,
            "--master-addr": self.master_addr,
            "--master-port": self.master_port,
            "--gpus-per-node": self.per_node.gpus_per_node,
            "--processes-per-node": self.per_node.processes_per_node,
            "--devices-per-process": self.here.devices_per_process,
            "--job-token": self.job_token or None,
        }
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return shlex.join(["python", "-m", "openpi_train", "launch", "manual", *words, "--", *self.arguments])
