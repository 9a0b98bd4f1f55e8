"""Runs on several hosts: started as users start them, and what becomes of each process. Read next: `test_start.py`."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runs.command import ROOT, environment, places
from small_runs import SMALL

from benchmarks.drill.netns import Host, Network

RUN = (SMALL, "--num-train-steps", "4")
# Parameters cut over two devices, so that a step needs the network all the time.
CUT = ("--fsdp-devices", "2", "--sharding.min-shard-mib", "0")
SOON = ("--timeouts.rendezvous-s", "15")


class Fleet:
    """Starts `launch` on hosts of a network; all of them share the folder `base`."""

    variables = (
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT",
        "XLA_FLAGS",
        "JAX_PLATFORMS",
    )

    def __init__(self, network: Network, base: Path):
        self.network, self.base = network, base

    def launch(
        self,
        host: Host,
        *words: object,
        arguments: Sequence[str],
        devices: int = 1,
        folder: Path = ROOT,
        **variables: str,
    ) -> subprocess.Popen:
        """`launch <words> -- <arguments>` on a host; each process's output is kept in `output` of the base.

        It runs in `folder`, with the package that lies there.
        """
        options = [*words, "--devices-per-process", devices, "--log-dir", self.base / "output" / host.name]
        command = [sys.executable, "-m", "openpi_train", "launch", *map(str, options), "--", *arguments]
        return subprocess.Popen(
            [*host.enter, "env", f"--chdir={folder}", *command, *places(self.base)],
            env=environment(**variables),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def manual(
        self,
        node: int,
        *arguments: str,
        hosts: int = 4,
        per_node: int = 1,
        master: str = "node0",
        token: str = "word",
        **more,
    ) -> subprocess.Popen:
        """`launch manual` on host `node` of so many."""
        words = ["manual", "--node-rank", node, "--num-nodes", hosts, "--master-addr", master]
        words += ["--processes-per-node", per_node, "--job-token", token]
        return self.launch(self.network.hosts[node], *words, arguments=arguments, **more)

    def all_manual(self, *arguments: str, hosts: int = 4, **options) -> list[subprocess.Popen]:
        """`launch manual` on every host."""
        return [self.manual(node, *arguments, hosts=hosts, **options) for node in range(hosts)]

    def output(self, place: str, rank: int) -> str:
        """All that a process has written so far; `place` is the host of its launcher."""
        path = self.base / "output" / place / f"process_{rank}.txt"
        return path.read_text() if path.exists() else ""

    def metrics(self) -> str:
        path = self.base / "runs" / "small" / "x" / "metrics.jsonl"
        return path.read_text() if path.exists() else ""


def ends(launchers: Sequence[subprocess.Popen], timeout_s: float = 480) -> list[tuple[int, str]]:
    """Exit code and output of each; all of it is shown if one does not end."""
    deadline = time.monotonic() + timeout_s
    results = []
    for launcher in launchers:
        try:
            out, err = launcher.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for one in launchers:
                one.terminate()
            raise AssertionError([one.communicate(timeout=60) for one in launchers]) from None
        results.append((launcher.returncode, out + err))
    return results


def until(condition: Callable[[], bool], launchers: Sequence[subprocess.Popen], timeout_s: float = 480) -> None:
    """Return when `condition` holds; fail with the launchers' output if one ends before, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline or any(launcher.poll() is not None for launcher in launchers):
            for one in launchers:
                one.terminate()
            raise AssertionError(ends(launchers))
        time.sleep(0.05)
