"""The memory of a step as reported by the compiler, for CPU devices in place of the planned ones; nothing is run.

XLA for CPUs widens much of bfloat16 to float32, so the program's own bytes are larger than a GPU's would be;
the state's are the same. Read next: `plan.py`.
"""

import dataclasses
import math
import time

import jax

from openpi_train.experiment import Experiment
from openpi_train.parallel.mesh import FSDP
from openpi_train.planning.forecast import Forecast
from openpi_train.training.settling import Prepared, Settling, this_machine

# Maximum number of CPU devices: beyond it, a program for fewer devices, with the same rows on each, is compiled.
MOST_DEVICES = 64
# How XLA for CPUs lays out memory as XLA for GPUs does: by default it copies the moments, which it could update in
# place, and allocates what loops fill long before they run, to compute more at a time. LLVM's part, which takes
# longest, comes after the layout and is left out.
_AS_ON_GPUS = {
    "xla_cpu_copy_insertion_use_region_analysis": True,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_backend_optimization_level": 0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Bytes on one device: the state (with the batch), and the program's own, also as the forecast has them: this
    program's, whose layers are in a loop."""

    num_devices: int
    fsdp_devices: int
    state_bytes: int
    program_bytes: int
    forecast_bytes: int
    compile_s: float


def imitate(num_devices: int, tensor_devices: int) -> None:
    """Make jax start with `num_devices` CPU devices (at most `MOST_DEVICES`), in tensor groups. Call it before jax
    starts."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _stand_ins(num_devices, tensor_devices))


def prepared_for_cpus(experiment: Experiment, chosen: Forecast) -> Prepared:
    """The run of `chosen`, with as many rows on each device, for the devices that `imitate` made.

    `experiment` is fitted to the planned ones.
    """
    num_devices = _stand_ins(chosen.machine.num_devices, chosen.layout.tensor_devices)
    given = dataclasses.replace(
        experiment,
        model=experiment.model.with_compute(attention="xla"),  # XLA for CPUs has no cuDNN
        unroll_layers=experiment.unroll_layers is True,  # it keeps what unrolled layers gather and recompute
        sharding=dataclasses.replace(experiment.sharding, strategy=chosen.layout.strategy),
        fsdp_devices=math.gcd(chosen.layout.fsdp_devices, num_devices // chosen.layout.tensor_devices),
        grad_accum=chosen.grad_accum,
        batch_size=chosen.batch_size // chosen.machine.num_devices * num_devices,
        # Rows and rate are already those of all devices.
        keep_effective_batch_size=True,
        lr_scaling="none",
        reference_batch_size=None,
    )
    given = given.remat_choices()[chosen.policy.remat]
    return Settling(given=given, machine=this_machine(chosen.machine.available_bytes)).prepared


def compile_step(experiment: Experiment, chosen: Forecast) -> Compiled:
    """Compile the step of `chosen` for those devices."""
    prepared = prepared_for_cpus(experiment, chosen)
    experiment = prepared.experiment
    trainer, layout = prepared.trainer, prepared.layout
    batch = experiment.batch_spec(experiment.batch_size)
    began = time.monotonic()
    with jax.set_mesh(trainer.plan.real_mesh):
        lowered = trainer.jitted_step(layout.shardings).lower(layout.abstract(), batch)
        memory = lowered.compile(compiler_options=_AS_ON_GPUS).memory_analysis()
    return Compiled(
        num_devices=math.prod(trainer.plan.mesh.shape.values()),
        fsdp_devices=trainer.plan.mesh.shape[FSDP],
        # XLA for CPUs counts host memory as the device's.
        state_bytes=memory.argument_size_in_bytes - prepared.memory.host,
        program_bytes=memory.temp_size_in_bytes,
        forecast_bytes=prepared.memory.step,
        compile_s=time.monotonic() - began,
    )


def _stand_ins(num_devices: int, tensor_devices: int) -> int:
    """The largest allowed number of CPU devices that divides the planned ones and is a multiple of the tensor
    groups."""
    group = max(tensor_devices, 1)  # what cannot be is refused later
    return max((n for n in range(group, MOST_DEVICES + 1, group) if num_devices % n == 0), default=num_devices)
