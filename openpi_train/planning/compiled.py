"""Compare the compiled step's memory with the forecast in `plan.json`. Read next: `training/run.py`."""

import logging
from pathlib import Path
from typing import Any

import jax

from openpi_train.data.core.files import read_json, write_json
from openpi_train.runtime.device_kinds import GIB

logger = logging.getLogger(__name__)

# The state is known exactly; this tolerance is for scalars and the padding of small arrays.
_TOLERANCE = 0.02


def needed_bytes(memory: Any) -> int:
    """Bytes that a compiled step takes on each device, by its `memory_analysis`; 0 if the backend has none."""
    if memory is None:
        return 0
    own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + own


def check_plan(path: Path, compiled: jax.stages.Compiled, batch_bytes: int) -> None:
    """Add the memory of `compiled`, the step with `batch_bytes` on each device, to the plan at `path`, and log it.

    Its state includes host memory, which XLA for CPUs does not distinguish. Warns if the state differs from the
    forecast, or if the step may not fit the device. For process 0 only.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        logger.info("this backend does not report the memory of the compiled step")
        return
    plan = read_json(path)
    forecast, available = plan["bytes_per_device"], plan["available_bytes_per_device"]
    arguments, own = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    total = needed_bytes(memory)
    state, expected = arguments + memory.host_argument_size_in_bytes - batch_bytes, forecast["state"] + forecast["host"]
    found = {"state": state, "batch": batch_bytes, "temporaries": own, "total": total}
    write_json(path, {**plan, "compiled_bytes_per_device": found})
    logger.info(
        "the compiled step needs on each device: state %.3g GiB (forecast %.3g), its own %.3g (%.3g), together %.3g "
        "of %.3g",
        *(size / GIB for size in (state, expected, own, forecast["total"] - forecast["state"])),
        *(size / GIB for size in (total, available)),
    )
    # A step that does not read all of its batch, as of a policy gradient without critic, has no arguments for the rest.
    if not -_TOLERANCE * expected - batch_bytes <= state - expected <= _TOLERANCE * expected:
        logger.warning(
            "the state takes %d bytes on each device and not %d, as forecast: the forecast of what fits is wrong, too; "
            "please report this with plan.json",
            state,
            expected,
        )
    if total > available:
        logger.warning(
            "the compiled step needs %.1f GiB on each device, which has %.1f: the run may end for lack of memory; use "
            "a larger --grad-accum, a --model.remat that keeps less, or zero3",
            total / GIB,
            available / GIB,
        )
