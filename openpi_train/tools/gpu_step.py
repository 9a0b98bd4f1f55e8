"""The `compile` verb: a program of a run, compiled by XLA's GPU compiler for GPUs that need not be present.

Nothing is run. `plan` starts this verb in a process of its own for the candidates that it compiles, because what the
plugin needs (`plugin.set_environment`) must be set before jax starts. Read next: `gpu_programs.py`,
`planning/gpu/step_account.py`, `gpu_text.py`.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openpi_train.experiment import Experiment
from openpi_train.planning.forecast import Forecast, Machine
from openpi_train.planning.gpu import plugin
from openpi_train.planning.gpu.buffers import recorded_in
from openpi_train.planning.gpu.step_account import GpuAccount, account
from openpi_train.planning.gpu.targets import GpuTarget, target_of
from openpi_train.runtime.exits import DONE, UsageError
from openpi_train.tools import gpu_programs, gpu_text
from openpi_train.tools.requests import CompileRequest


def main(experiment: Experiment, machine: Machine, request: CompileRequest) -> int:
    """Compile and print the account. Raises UsageError for conflicting flags, and a file that cannot be written."""
    if request.dump is not None:
        _require_writable(request.dump)
    (chosen, compiled), found = compiled_program(
        machine,
        lambda target: gpu_programs.lowered(request.program, experiment, machine, target, request.cameras),
    )
    if request.dump is not None:
        request.dump.write_text(compiled.as_text())
    if request.json:
        forecast = {} if chosen is None else {"forecast": chosen.as_json()}
        print(json.dumps({**forecast, "account": found.as_json()}))
    else:
        print(gpu_text.lines_alone(found, machine) if chosen is None else gpu_text.lines(found, chosen))
    return DONE


def _require_writable(file: Path) -> None:
    if file.is_dir():
        raise UsageError(f"--dump {file} is a folder: name the file that the program's text is written to")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise UsageError(f"--dump {file} cannot be written: {error.strerror}; name another file") from error


def compiled_program(
    machine: Machine, lower: Callable[[GpuTarget], tuple[Forecast | None, Any]]
) -> tuple[tuple[Forecast | None, Any], GpuAccount]:
    """What `lower` makes for the machine's kind, as `gpu_programs.lowered` does: a forecast, and the program, compiled
    (`jax.stages.Compiled`). And its account."""
    target = target_of(machine.kind)
    with plugin.pretended(target), tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        chosen, lowered = lower(target)
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        compile_s, live = time.monotonic() - began, recorded_in(Path(folder))
    return (chosen, compiled), account(compiled, live, machine, target, compile_s)


def compile_candidate(words: Sequence[str], chosen: Forecast, machine_flags: Sequence[str]) -> GpuAccount:
    """The account of a candidate, by the verb in a process of its own.

    `words` are the experiment and its flags, those of the candidate too, `machine_flags` those of the devices. Raises
    UsageError, with what the process said, if it fails.
    """
    command = [sys.executable, "-m", "openpi_train", "compile", *words, *machine_flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != DONE:
        said = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise UsageError(f"XLA's GPU compiler failed for {chosen.words()} (code {done.returncode}):\n{said}")
    return GpuAccount.from_json(json.loads(done.stdout)["account"])
