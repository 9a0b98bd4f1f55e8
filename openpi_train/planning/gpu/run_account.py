"""The account of the step that a run on GPUs compiled for itself. Read next: `step_account.py`.

The run writes it as `gpu_step.json`; its `results.json` and `report` show it.
"""

import logging
from typing import Any

from openpi_train.json_object import JsonObject
from openpi_train.planning.forecast import Machine
from openpi_train.planning.gpu.step_account import GpuAccount, account
from openpi_train.planning.gpu.targets import has_target, target_of

logger = logging.getLogger(__name__)

RECORD = "gpu_step.json"
# What a record and `results.json` share.
_IN_BRIEF = ("kernels", "moved_bytes", "matmul_s", "bound_s", "exposed_s", "peak_bytes")


def run_account(compiled: object, machine: Machine, compile_s: float) -> GpuAccount | None:
    """The account of a run's step (`jax.stages.Compiled`) on these devices, without the buffers at the peak.

    None on devices that have no description, and where the compiled text is not as expected: then the log says so.
    """
    if not has_target(machine.kind):
        return None
    try:
        found = account(compiled, None, machine, target_of(machine.kind), compile_s)
    except (ValueError, LookupError) as error:
        logger.warning("the compiled step cannot be read, so there is no bound of its time: %r", error)
        return None
    logger.info(
        "no step of this program takes less than %.3g s, %.3g s of it products (a bound by its %d kernels, which move "
        "%.3g GB in device memory)",
        *(found.bound_s, found.matmul_s, found.kernels, found.moved_bytes / 1e9),
    )
    return found


def in_brief(record: JsonObject) -> dict[str, Any]:
    """The part of a record that `results.json` has."""
    return {name: record[name] for name in _IN_BRIEF}
