"""The end of a run that was asked to stop: it is saved, and says how to go on. Read next: `runtime/preempt.py`."""

import shlex
from pathlib import Path
from typing import NoReturn

from openpi_train.checkpoints.step_dirs import complete_steps
from openpi_train.parallel.state import TrainState
from openpi_train.runtime import preempt
from openpi_train.runtime.exits import Preempted
from openpi_train.training.run import Run


def stop_after(run: Run, step: int, state: TrainState, *, is_saved: bool) -> NoReturn:
    """Raise Preempted, once the state of this step is saved. Every process must call it.

    Of a run that stops before its first step nothing is saved: it can be made again.
    """
    if not is_saved:
        run.recorder.check()
        with run.recorder.paused("checkpoint"):
            run.save(step, state, is_last=True)
    run.finish()
    times = preempt.stop_times()
    took = f", {times.words()}" if times else ""
    has = f"stopped after step {step} of {run.experiment.num_train_steps} with a good checkpoint"
    if step == 0:
        has = "stopped before the first step, with nothing to save"
    raise Preempted(f"{has}{took}; {_going_on(run.directory)}")


def interrupted(directory: Path) -> KeyboardInterrupt:
    """What ends the run in this directory after Ctrl-C: it says what is saved, and how to go on from there."""
    steps = complete_steps(directory)
    saved = f"the last saved step is {steps[-1]}" if steps else "no step is saved yet"
    return KeyboardInterrupt(f"{saved}; {_going_on(directory)}")


def _going_on(directory: Path) -> str:
    return f"continue with --resume, or: python -m openpi_train resume {shlex.quote(str(directory))}"
