"""Processes that talk to each other on the loopback interface."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from openpi_train.launch import processes


@pytest.fixture
def free_port() -> int:
    """A port that is free."""
    return processes.free_port()


@pytest.fixture
def run_processes(free_port) -> Callable[..., list[subprocess.CompletedProcess]]:
    """Run a piece of Python in several processes of one run; it finds `world` started, and is stopped afterwards."""

    def run(code: str, process_count: int, devices: int = 1, timeout_s: float = 240.0, **environment: str):
        program = textwrap.dedent(
            """
            import os, sys, time, json
            from openpi_train.runtime import agree, exits, logs, preempt, session
            from openpi_train.runtime.world import WorldFlags, find_world
            session.software = dict  # a file saved in an editor while processes start is no failure of theirs
            def main():
                logs.configure(int(os.environ.get("RANK", 0)))
                world = session.start(find_world(WorldFlags(), os.environ), devices_per_process=%d)
                import jax
            %s
                session.stop()
            exits.run_guarded(main)
            """
        ) % (devices, textwrap.indent(textwrap.dedent(code), "    "))
        common = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "WORLD_SIZE": str(process_count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
            **environment,
        }
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                env={**common, "RANK": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(process_count)
        ]
        try:
            outputs = [process.communicate(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process, output in zip(processes, outputs, strict=True)
        ]

    return run
