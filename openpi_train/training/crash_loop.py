"""Starts of a run that end one after another without a new checkpoint: a checkpoint or a batch may be to blame.

Process 0 counts them in the run's directory, whatever started them (Kubernetes has no launcher of ours). After three
the run goes on from the checkpoint before the newest. From the third start on, until a checkpoint is saved, each step
is recorded before it is taken and waited for, and no batch is read ahead: so the step in which starts end is known, and
the rows of its batch are named. After ends of which a restart mends nothing (Ctrl-C, wrong data) it counts anew. A stop
on request (code 75) is no crash, and no progress by itself: the count is then as before that start.
Read next: `start.py`.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax

from openpi_train import faults
from openpi_train.checkpoints import fencing
from openpi_train.checkpoints.step_dirs import complete_steps
from openpi_train.data.core.files import read_json, write_json
from openpi_train.experiment import Experiment
from openpi_train.faults import Restart
from openpi_train.launch.status import MAX_RESTARTS_VARIABLE
from openpi_train.runtime import agree, exits
from openpi_train.runtime.exits import NoProgress, UsageError, exit_code_of

logger = logging.getLogger(__name__)

NAME = ".crash_loop.json"
_STARTS_PER_CHECKPOINT = 3
_CAREFUL_AFTER = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrashLoop:
    """What the starts before this one came to.

    Attributes:
        in_vain: the starts in a row that ended without a checkpoint beyond `highest`.
        highest: the newest step that any start of the run has saved.
        begun_step: the step that the last start had begun, if it was recorded.
        times: how many starts in a row ended in that step.
    """

    in_vain: int = 0
    highest: int = 0
    begun_step: int | None = None
    times: int = 0

    def is_careful(self) -> bool:
        """Whether each step is recorded, and waited for."""
        return self.in_vain >= _CAREFUL_AFTER

    def steps_back(self, steps: Sequence[int]) -> int | None:
        """Of the complete checkpoints, oldest first, the one to continue from instead of the newest; None: that."""
        is_due = self.in_vain > 0 and self.in_vain % _STARTS_PER_CHECKPOINT == 0
        return steps[-2] if is_due and len(steps) > 1 else None


def begin(experiment: Experiment, directory: pathlib.Path) -> tuple[CrashLoop, int | None]:
    """Count this start of an opened run, and return what was, with the older checkpoint to continue from, if any.

    Every process must call it. Raises NoProgress, on every process, after more starts than the launcher allows.
    """
    told = None
    if jax.process_index() == 0:
        steps = complete_steps(directory)
        loop = _counted(directory, steps[-1] if steps else 0)
        can_choose = experiment.resume and experiment.resume_from is None
        told = [dataclasses.asdict(loop), loop.steps_back(steps) if can_choose else None]
    fields, older = agree.broadcast("starts without progress", told)
    loop = CrashLoop(**fields)
    limit = os.environ.get(MAX_RESTARTS_VARIABLE, "")
    if limit.isdecimal() and loop.in_vain > int(limit):
        if jax.process_index() == 0:
            _forget(directory)  # a start by hand begins anew
        raise NoProgress(
            f"{loop.in_vain} starts in a row ended without a checkpoint after step {loop.highest}, more than the "
            f"{limit} restarts of --max-restarts{_where(loop)}. The logs in {directory / 'logs'} have the causes"
        )
    if loop.in_vain:
        _tell(loop, older)
    if jax.process_index() == 0:
        exits.before_a_stop(lambda: _take_back(directory, loop))
    return loop, older


def record_step(directory: pathlib.Path, loop: CrashLoop, step: int, rows: Callable[[], Sequence[str]]) -> None:
    """Record that a start that is careful begins this step. For process 0. `rows` names the rows of its batch."""
    if step == loop.begun_step:
        logger.warning(
            "step %d ended the start before this one; the rows of its batch:\n  %s", step, "\n  ".join(rows())
        )
    times = loop.times + 1 if step == loop.begun_step else 1
    _write(directory, dataclasses.replace(loop, in_vain=loop.in_vain + 1, begun_step=step, times=times))


@contextlib.contextmanager
def counting(directory: pathlib.Path) -> Iterator[None]:
    """Wraps the training: after a good end, and one of which a restart mends nothing, starts are counted anew."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        fault = None if error is None else faults.fault_of(exit_code_of(error))
        mends = fault is not None and fault.restart in (Restart.SAME_HOSTS, Restart.OTHER_HOSTS)
        if jax.process_index() == 0 and not mends:
            _forget(directory)


def _take_back(directory: pathlib.Path, loop: CrashLoop) -> None:
    """Record what was before this start, which ends on request. What it has saved is seen by the next one."""
    if loop.in_vain == 0:
        _forget(directory)
        return
    with contextlib.suppress(UsageError):  # it may be a newer start's by now
        fencing.require_owned_if_readable(directory)
        _write(directory, loop)


def _forget(directory: pathlib.Path) -> None:
    with contextlib.suppress(OSError, UsageError):  # it may be a newer start's by now
        fencing.require_owned_if_readable(directory)
        (directory / NAME).unlink()


def _counted(directory: pathlib.Path, newest: int) -> CrashLoop:
    """What is recorded, with this start added to the record."""
    try:
        before = CrashLoop(**read_json(directory / NAME))
    except (FileNotFoundError, ValueError, TypeError):
        before = CrashLoop(highest=newest)
    except OSError as error:  # it may pass: what is recorded stays, without this start
        logger.warning("this start is not counted: %s", error)
        return CrashLoop(highest=newest)
    if newest > before.highest:
        before = CrashLoop(highest=newest)
    _write(directory, dataclasses.replace(before, in_vain=before.in_vain + 1))
    return before


def _write(directory: pathlib.Path, loop: CrashLoop) -> None:
    with contextlib.suppress(OSError):  # a full disk does not stop the run
        write_json(directory / NAME, dataclasses.asdict(loop))


def _tell(loop: CrashLoop, older: int | None) -> None:
    if loop.in_vain == 1:
        logger.info("the start before this one ended without a checkpoint after step %d", loop.highest)
        return
    logger.warning(
        "%d starts in a row ended without a checkpoint after step %d%s", loop.in_vain, loop.highest, _where(loop)
    )
    if older is not None:
        logger.warning("the newest checkpoint may be to blame: continuing from checkpoint %d, before it", older)
    elif loop.in_vain % _STARTS_PER_CHECKPOINT == 0:
        logger.warning("there is no older checkpoint to go back to (--keep-last 2 would keep one)")
    if loop.is_careful():
        logger.warning("until a checkpoint is saved each step is recorded and waited for, to find which one ends it")


def _where(loop: CrashLoop) -> str:
    if loop.begun_step is None:
        return ""
    return f"; the last {'one' if loop.times < 2 else str(loop.times)} in step {loop.begun_step}"
