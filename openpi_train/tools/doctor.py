"""The `doctor` verb: check everything that a run needs, and report what is wrong and what to do.

One process checks its machine; started with `launch`, `srun` or by `launch kubernetes`, all processes check theirs
and run the first collective steps of a run together. Read next: `check_host.py`, `check_run.py`.
"""

import dataclasses
import json
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from openpi_train.command_line import ProcessFlags
from openpi_train.data.core import cache_folders
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.json_object import JsonObject
from openpi_train.runtime import agree, logs, session, xla
from openpi_train.runtime.exits import DONE, USAGE, RunError
from openpi_train.runtime.world import World, find_world
from openpi_train.tools import check_host, check_run
from openpi_train.tools.check_host import CheckResult, fail, ok, warn
from openpi_train.tools.requests import DoctorRequest

DEFAULT_PORT = 29500


def main(request: DoctorRequest, experiment: Experiment | None, process: ProcessFlags) -> int:
    """Run all checks, print a line for each, and return 0, or 2 if one failed.

    Every process of the run must call it; process 0 prints for all.
    """
    logs.configure(0)
    world = find_world(process, os.environ)
    logs.configure(world.process_index)
    # INFO messages of these modules are in the report; waits are still logged.
    for name in ("runtime.session", "runtime.compile_cache", "data", "training"):
        logging.getLogger(f"openpi_train.{name}").setLevel(logging.WARNING)
    report = _Report(world, as_text=not request.json)
    report.add(_place(world))
    report.add(_host(world, request.hosts, request.port))
    try:
        facts = {"doctor": as_json(experiment) if experiment else "no experiment"}
        world = session.start(world, facts=facts, devices_per_process=process.devices_per_process)
        report.add(check_run.devices(_gpus_to_use()))
        report.add(check_run.collectives())
        report.add(check_run.clocks())
        report.add(_run(experiment, world))
        reports = agree.gather("the findings", report.as_json())
        session.stop()
    except RunError as error:
        report.add([fail("start", str(error), "as it says; a run would end here too")])
        reports = [report.as_json()]
    return report.end(reports)


def _place(world: World) -> Iterable[CheckResult]:
    """This process's index, and environment variables that were ignored."""
    coordinator = f", coordinator {world.coordinator}" if world.coordinator else ""
    yield ok("place", f"process {world.process_index} of {world.process_count} ({world.source}{coordinator})")
    for note in world.notes:
        yield warn("place", note, "as it says")


def _host(world: World, hosts: Sequence[str], port: int | None) -> Iterable[CheckResult]:
    """Checks before jax starts."""
    versions, kind = check_host.installed(), xla.device_kind(_platforms(), os.environ)
    yield from check_host.machine()
    yield from check_host.driver(versions)
    yield from check_host.pairing(versions, _gpus_to_use())
    yield from check_host.settings(kind, os.environ, xla.extent_of(world, os.environ))
    yield from check_host.shared_memory()
    yield from check_host.own_name(kind)
    yield from check_host.clock()
    if world.coordinator is None:  # else the rendezvous tests it
        yield from check_host.ports(port or DEFAULT_PORT, chosen=port is not None)
    yield from check_host.reach(hosts, port or DEFAULT_PORT)


def _platforms() -> str | None:
    return jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]


def _gpus_to_use() -> int:
    """Number of GPUs that jax should find: 0 if the user has chosen other devices."""
    chosen_otherwise = _platforms() and xla.device_kind(_platforms(), os.environ) != "gpu"
    return 0 if chosen_otherwise else xla.num_gpus(os.environ)


def _run(experiment: Experiment | None, world: World) -> Iterable[CheckResult]:
    """Checks that need the devices or an experiment."""
    yield from check_host.writing(cache_folders.home(), "OPENPI_TRAIN_HOME")
    if experiment is None:
        yield from check_host.writing(Path(), "--checkpoint-base-dir")
        return
    yield from check_run.needs(experiment, world)
    yield from check_run.data(experiment)


class _Report:
    """Collects findings; process 0 shows its own as they come and those of the others at the end."""

    def __init__(self, world: World, *, as_text: bool):
        self._is_first, self._as_text = world.process_index == 0, as_text
        self._who = f"process {world.process_index} on {socket.gethostname()}"
        self._findings: list[CheckResult] = []
        # Only the report goes to stdout, where gloo prints a greeting for every new group of processes, from C++.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def add(self, findings: Iterable[CheckResult]) -> None:
        for finding in findings:
            self._findings.append(finding)
            if self._is_first and self._as_text:
                print(finding.line(), file=self._out, flush=True)

    def as_json(self) -> dict[str, Any]:
        return {"who": self._who, "findings": [dataclasses.asdict(finding) for finding in self._findings]}

    def end(self, reports: Sequence[JsonObject]) -> int:
        """Show the remaining `reports` of all processes, and return the exit code."""
        levels = [finding["level"] for report in reports for finding in report["findings"]]
        code = USAGE if "fail" in levels else DONE
        if not self._is_first:
            return code
        if not self._as_text:
            print(json.dumps({"ok": code == DONE, "processes": list(reports)}, indent=1), file=self._out, flush=True)
            return code
        for report in reports[1:]:
            print(f"{report['who']}:", file=self._out)
            for finding in report["findings"]:
                if finding["level"] != "ok":
                    print(CheckResult(**finding).line(), file=self._out)
        counts = {level: levels.count(level) for level in ("ok", "warn", "fail")}
        print(", ".join(f"{count} {level}" for level, count in counts.items()), file=self._out, flush=True)
        return code
