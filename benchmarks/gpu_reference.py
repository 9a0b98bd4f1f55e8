"""The step that does openpi's work (`reference.py`), compiled for GPUs as the verb `compile` compiles ours.

`gpu_compile.py` starts it in a process of its own, with the flags of `compile`; the account is printed as JSON.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from openpi_train.command_line import parse_known
from openpi_train.planning.gpu import plugin
from openpi_train.tools.requests import CompileRequest
from openpi_train.types import OPENPI_SLOTS


def main(argv: Sequence[str]) -> None:
    """Compile and print the account. Raises UsageError as `compile` does."""
    request, rest = parse_known(CompileRequest, argv, "compile")
    plugin.set_environment(os.environ, request.devices, request.hosts)  # before jax is imported
    from benchmarks.reference import reference_of
    from openpi_train.cli import parse_experiment
    from openpi_train.planning.device_limits import CLIENT_SHARE
    from openpi_train.planning.gpu.buffers import recorded_in
    from openpi_train.planning.gpu.step_account import account
    from openpi_train.planning.gpu.targets import target_of
    from openpi_train.tools.gpu_programs import Training
    from openpi_train.tools.plan import find_machine

    experiment = parse_experiment(request.experiment, ["--exp-name", "compile", *rest])
    machine = find_machine(
        request.device_kind, request.devices, request.hosts, request.device_gib, request.network_gb_s
    )
    target = target_of(machine.kind)
    with plugin.pretended(target), tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        devices = plugin.devices(
            target, int(machine.available_bytes / CLIENT_SHARE), machine.num_devices, machine.num_hosts
        )
        ours = Training.of(experiment, machine, devices, OPENPI_SLOTS)
        training = dataclasses.replace(ours, trainer=reference_of(ours.trainer, remat="full"))
        compiled = training.step().compile(compiler_options={"xla_dump_to": folder})
        compile_s, live = time.monotonic() - began, recorded_in(Path(folder))
    print(json.dumps({"account": account(compiled, live, machine, target, compile_s).as_json()}))


if __name__ == "__main__":
    main(sys.argv[1:])
