"""openpi's own training step through the account of ours: compiled by the jax that it names, read from XLA's dump.

`gpu_compile --openpi CHECKOUT` has it in the set `openpi`. Nothing of openpi is here: the checkout is the user's, its
packages are in an environment of their own. Read next: `gpu_openpi_peer.py`, `planning/gpu/step_account.py`.
"""

import re
import subprocess
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from benchmarks import peers
from openpi_train.planning.gpu import step_account
from openpi_train.planning.gpu.targets import target_of
from openpi_train.runtime.device_limits import CLIENT_SHARE
from openpi_train.tools.plan import find_machine

# What the step needs, as in openpi's uv.lock at 15a9616.
PACKAGES = ("jax[cuda12]==0.5.3", "flax==0.10.2", "chex==0.1.90", "orbax-checkpoint==0.11.13", "jaxtyping==0.2.36")
PACKAGES += ("beartype==0.19.0", "ml_collections==1.0.0", "numpydantic==1.6.9", "numpy==1.26.4", "augmax==0.4.1")
PACKAGES += ("einops==0.8.1", "etils[epath]==1.12.2", "optax==0.2.4", "fsspec", "filelock", "safetensors")
PACKAGES += ("sentencepiece", "typing-extensions")
ROWS = 32
"""Rows per device."""
# Transfers run beside kernels, as in our programs, which openpi's users get by a flag alone.
_FLAGS = "--xla_gpu_enable_triton_gemm=false --xla_gpu_enable_latency_hiding_scheduler=true --xla_dump_hlo_as_text"
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": ""}
# The last line of an error is then its own.
_ENVIRONMENT |= {"JAX_TRACEBACK_FILTERING": "off"}
_PROGRAM = "*gpu_after_optimizations.txt"


def is_checkout(path: Path) -> bool:
    """Whether openpi is in this folder."""
    return Path(path, "scripts", "train.py").is_file()


def compiled(
    checkout: Path, python: Path | None, device_kind: str, num_devices: int
) -> tuple[dict[str, Any] | None, str]:
    """The account of full pi0's step with `ROWS` rows a device, or why there is none.

    Args: `python` is that of an environment with openpi's packages; None installs `PACKAGES` into the user's cache.
    `compile_s` is the time of the whole process.
    """
    machine = find_machine(device_kind, num_devices, num_hosts=1, device_gib=None, network_gb_s=50.0)
    target = target_of(machine.kind)
    environ, command = peers.environment(), str(python)
    if python is None:
        try:
            environ, command = peers.installed("openpi-jax0.5.3", PACKAGES, timeout_s=1800), peers.python()
        except (peers.Unavailable, subprocess.TimeoutExpired) as error:
            return None, f"openpi's packages: {error}"
    program = Path(__file__).with_name("gpu_openpi_peer.py")
    with tempfile.TemporaryDirectory(prefix="openpi-step-") as dumped:
        began = time.monotonic()
        try:
            done = subprocess.run(
                [command, str(program), str(checkout), str(num_devices), str(ROWS * num_devices)],
                input=target.text(int(machine.available_bytes / CLIENT_SHARE)),
                env={**environ, **_ENVIRONMENT, "XLA_FLAGS": f"{_FLAGS} --xla_dump_to={dumped}"},
                capture_output=True,
                text=True,
            )
        except OSError as error:
            return None, f"{command}: {error.strerror}"
        if done.returncode:
            return None, ([*done.stderr.splitlines()] or [f"code {done.returncode}"])[-1][:300]
        try:
            step = Dumped(Path(dumped))
        except ValueError as error:
            return None, str(error)
        found = step_account.account(step, None, machine, target, time.monotonic() - began)
    return {"account": found.as_json()}, ""


class Dumped:
    """The largest program that XLA wrote to a folder, as the account reads a `jax.stages.Compiled`.

    jaxlib 0.5 gives neither text nor sizes of a program for devices that are not there. Arguments are not told apart
    from results and temporaries: `memory_analysis` counts all as temporaries. Raises ValueError without a program.
    """

    def __init__(self, folder: Path):
        programs = sorted(folder.glob(_PROGRAM), key=lambda file: file.stat().st_size)
        if not programs:
            raise ValueError(
                "XLA wrote no program: the process compiled nothing, or this jaxlib does it in another way"
            )
        program = programs[-1]
        self._text = program.read_text()
        report = program.with_name(program.name.replace(".txt", "-memory-usage-report.txt")).read_text()
        total = re.search(r"^Total bytes used: (\d+)", report, re.MULTILINE)
        if total is None:
            raise ValueError("XLA's memory report has no total: this jaxlib writes it in another way")
        self._bytes = int(total[1])

    def as_text(self) -> str:
        """The program."""
        return self._text

    def memory_analysis(self) -> types.SimpleNamespace:
        """Its memory on one device."""
        names = ("argument", "host_argument", "output", "alias")
        return types.SimpleNamespace(temp_size_in_bytes=self._bytes, **{f"{name}_size_in_bytes": 0 for name in names})
