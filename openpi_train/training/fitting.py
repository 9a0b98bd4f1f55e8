"""The compiler as the judge of memory: a run takes the first candidate whose compiled step fits its devices.

Read next: `settling.py`, which estimates and chooses; `program.py`, the compiled step.
"""

import logging

import jax

from openpi_train.planning.compiled import needed_bytes
from openpi_train.planning.memory import OFF
from openpi_train.runtime import agree
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.phases import phase
from openpi_train.training.program import Programs
from openpi_train.training.settling import Prepared, Settling, batch_specs

logger = logging.getLogger(__name__)


def fitted(settling: Settling) -> tuple[Prepared, Programs | None]:
    """The run as it is chosen, or with the next strategy and policy whose compiled step fits; and that step.

    Nothing is compiled (None) where no other choice is open, or where the step is small against the devices. Every
    process must call it; all take the same.
    """
    prepared = settling.prepared
    if len(settling.forecasts) == 1 or prepared.forecast.is_small:
        return prepared, None
    usable = prepared.forecast.machine.usable_bytes
    while True:
        programs, needed, error = _compiled(settling, prepared)
        other = settling.instead(prepared, needed) if needed > usable else None
        if other is None and error is not None:
            raise error
        if other is None:
            return prepared, programs
        logger.warning(
            "by the compiler %s needs %.3g GiB on each device, of which %.3g can be used: %s is taken in its place",
            *(prepared.forecast.name, needed / GIB, usable / GIB, other.forecast.name),
        )
        prepared = other


@phase("compiling the training step", abandonable=True)
def _compiled(settling: Settling, prepared: Prepared) -> tuple[Programs | None, int, Exception | None]:
    """The step of the largest batch, with the bytes that it needs on the fullest of all processes' devices; or why a
    compiler that knows the device's memory has made none."""
    experiment, data = prepared.experiment, settling.data
    assert data is not None, "a start opens them"
    logger.info("compiling the training step (a first time can take minutes)")
    programs, error = Programs(prepared.trainer, prepared.layout.shardings, prepared.layout.abstract()), None
    try:
        with jax.set_mesh(prepared.trainer.plan.real_mesh):
            programs.compile([batch_specs(experiment, data, experiment.batch_size)[-1]])
        needed = needed_bytes(programs.compiled.memory_analysis())
    except jax.errors.JaxRuntimeError as found:
        if "RESOURCE_EXHAUSTED" not in str(found):
            raise
        error, needed = found, int((1 + OFF) * prepared.forecast.machine.usable_bytes)
    return programs, max(agree.gather("bytes of the compiled step", needed)), error
