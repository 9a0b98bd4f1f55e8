"""The step that does openpi's work (`reference.py`), compiled for GPUs as the verb `compile` compiles ours.

`gpu_compile.py` starts it in a process of its own, with the flags of `compile`; the account is printed as JSON.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

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
    from openpi_train.runtime.device_limits import CLIENT_SHARE
    from openpi_train.tools.gpu_programs import Training
    from openpi_train.tools.gpu_step import compiled_program
    from openpi_train.tools.plan import find_machine

    experiment = parse_experiment(request.experiment, ["--exp-name", "compile", *rest])
    machine = find_machine(
        request.device_kind, request.devices, request.hosts, request.device_gib, request.network_gb_s
    )

    def lower(target):
        client_bytes = int(machine.available_bytes / CLIENT_SHARE)
        devices = plugin.devices(target, client_bytes, machine.num_devices, machine.num_hosts)
        ours = Training.of(experiment, machine, devices, OPENPI_SLOTS)
        return None, dataclasses.replace(ours, trainer=reference_of(ours.trainer, remat="full")).step()

    _, found = compiled_program(machine, lower)
    print(json.dumps({"account": found.as_json()}))


if __name__ == "__main__":
    main(sys.argv[1:])
