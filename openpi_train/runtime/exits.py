"""An error class for each exit code, and the guard around `main`. Read next: `../faults.py`, what follows from each."""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from openpi_train.faults import (
    BUG,
    CHECKPOINT,
    DATA,
    DONE,
    HARDWARE,
    INDIVISIBLE,
    INTERRUPTED,
    NO_PROGRESS,
    NUMBERS,
    PEER_LOST,
    PREEMPTED,
    USAGE,
)
from openpi_train.runtime import logs, phases
from openpi_train.runtime.gpu_health import gpu_faults
from openpi_train.runtime.system_errors import (
    is_exhausted_host,
    is_lost_permission,
    is_of_storage,
    is_unknown_host,
    passes,
)

logger = logging.getLogger(__name__)


class RunError(Exception):
    """An error whose message is meant for the user; shown without a traceback. Raise one of the leaves below."""

    exit_code = BUG


class UsageError(RunError):
    """The command line, the configuration or the environment is invalid."""

    exit_code = USAGE


class IndivisibleError(UsageError):
    """The batch size is not divisible by the devices. A launcher with --min-nodes tries fewer."""

    exit_code = INDIVISIBLE


class DataError(RunError):
    """A dataset, a record or a statistics file is missing, damaged or differs from the configuration."""

    exit_code = DATA


class CheckpointError(RunError):
    """There is no usable checkpoint, or no disk space to write one."""

    exit_code = CHECKPOINT


class NumbersError(RunError):
    """A loss or gradient is NaN or infinite."""

    exit_code = NUMBERS


class PeerLostError(RunError):
    """Another process, or the network to it, is lost or does not answer in time."""

    exit_code = PEER_LOST


class StorageError(RunError):
    """A file system has failed to read or write for minutes; a restart may find it well again."""

    exit_code = PEER_LOST


class HardwareError(RunError):
    """A device, or the host that holds it, has failed: a restart helps, best without this host."""

    exit_code = HARDWARE


class NoProgress(RunError):
    """The run was started again and again, and saved nothing new: it would go on so for ever."""

    exit_code = NO_PROGRESS


class Preempted(RunError):
    """The run was asked to stop and has saved everything: start it again to continue. `session.stop()` comes first."""

    exit_code = PREEMPTED


@contextlib.contextmanager
def reported_as(kind: type[RunError]) -> Iterator[None]:
    """Report errors of reading the user's files as `kind`, without a traceback; those that pass as StorageError."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise kind_for(error, kind)(str(error)) from error


def kind_for(error: BaseException, kind: type[RunError]) -> type[RunError]:
    """`kind`, but StorageError for an error that may be over a moment later, whatever the file: a restart helps."""
    return StorageError if any(map(passes, causes(error))) else kind


class ErrorCollector:
    """Errors that are told together: `with together:` around each check, then `raise_all()`."""

    def __init__(self):
        self.errors: list[RunError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Keep a RunError. After one, what else a check raises follows from it and is dropped."""
        if isinstance(error, RunError):
            self.errors.append(error)
            return True
        return bool(self.errors) and isinstance(error, Exception)

    def raise_all(self) -> None:
        """Raise what was kept, as one error; those of few lines come first.

        It is a UsageError if one of them is, as the command has to be changed; else of the first one's kind.
        """
        if len(self.errors) <= 1:
            for error in self.errors:
                raise error
            return
        ordered = sorted(self.errors, key=lambda error: str(error).count("\n"))
        texts = list(dict.fromkeys(map(str, ordered)))
        told = [text for text in texts if not any(text != other and text in other for other in texts)]
        # Indivisible alone says that fewer hosts help.
        others = [error for error in ordered if not isinstance(error, IndivisibleError)] or ordered
        first = next((error for error in others if isinstance(error, UsageError)), others[0])
        kind = next(
            (kind for kind in (StorageError, DataError, CheckpointError) if isinstance(first, kind)), UsageError
        )
        raise kind("\n".join(told)) from first


# What gloo, NCCL and jax's coordination service write when a peer is gone (gloo's arrive as a builtin ValueError).
_PEER_LOST_SIGNS = (
    "Gloo all-",
    "Gloo reduce",
    "Gloo collective",
    "Gloo context initialization failed",
    "Connection reset by peer",
    "Connection closed by peer",
    "coordination service",
    "CoordinationService",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL operation",
)


# What CUDA, cuDNN and XLA write when a device, its driver or its link has failed: names of CUDA's errors
# (https://docs.nvidia.com/cuda/cuda-driver-api, CUresult). An illegal address is rarely a kernel's own mistake here:
# the programs are XLA's, and the same one runs on the other devices.
_HARDWARE_SIGNS = (
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_SYSTEM_NOT_READY",
    "CUDA_ERROR_EXTERNAL_DEVICE",
    "CUDA_ERROR_CONTAINED",
    "uncorrectable ECC error",
)
# Memory that was enough for the steps before is not the program's fault: another one may have taken some, or what is
# free lies in pieces.
_NO_MEMORY = "RESOURCE_EXHAUSTED"


def exit_code_of(error: BaseException) -> int:
    """The exit code that tells a launcher what `error`, or one of its causes, means."""
    for cause in causes(error):
        if isinstance(cause, RunError):
            return cause.exit_code
        if isinstance(cause, KeyboardInterrupt):
            return INTERRUPTED
        from_runtime = isinstance(cause, RuntimeError | ValueError | OSError)
        if from_runtime and any(sign in str(cause) for sign in _HARDWARE_SIGNS):
            return HARDWARE
        if from_runtime and _NO_MEMORY in str(cause) and phases.has_taken_first_steps():
            return HARDWARE
        if from_runtime and any(sign in str(cause) for sign in _PEER_LOST_SIGNS):
            return PEER_LOST
        if is_of_storage(cause) or is_unknown_host(cause):
            return PEER_LOST
        if phases.has_taken_first_steps() and (is_exhausted_host(cause) or is_lost_permission(cause)):
            return PEER_LOST
    return BUG


_say_farewell: Callable[[int, str], None] | None = None
_before_a_stop: Callable[[], None] | None = None


def say_farewell_by(farewell: Callable[[int, str], None] | None) -> None:
    """Register `farewell(exit code, reason)`, called after this process's last messages if it ends with an error.

    For the watchdog, which tells the other processes.
    """
    global _say_farewell
    _say_farewell = farewell


def before_a_stop(act: Callable[[], None] | None) -> None:
    """Register what this process does, in whichever thread, before it ends with code 75: the run was asked to stop."""
    global _before_a_stop
    _before_a_stop = act


def run_guarded(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and end the process with the exit code that its result or exception means.

    Unless all is well the process leaves through `os._exit`: Python's atexit would wait for minutes in jax's
    shutdown barrier for peers that are themselves stuck in a collective, waiting for this process.
    """
    faulthandler.enable()
    # `kill -USR2 <process>` prints where every thread is. SIGUSR1 stays free for preemption notices.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    threading.excepthook = _end_if_exhausted(threading.excepthook)
    sys.unraisablehook = _end_if_exhausted(sys.unraisablehook)
    try:
        code = main() or DONE
    except SystemExit as ending:  # argparse and tyro end this way, after a message
        code = ending.code or DONE
    except BaseException as error:
        fail(error)
    if code == DONE:
        sys.exit(DONE)
    if isinstance(code, str):
        logger.error("%s", code)
    _take_leave(code if isinstance(code, int) else BUG, "")


def fail(error: BaseException) -> NoReturn:
    """End the process because of `error`, from any thread, with its message and exit code."""
    code = exit_code_of(error)
    logs.tell_path()  # before the error, which is the last line
    _report(error, code)
    _take_leave(code, str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")


def _take_leave(code: int, reason: str) -> NoReturn:
    if _say_farewell is not None:
        _say_farewell(code, reason)
    end(code)


def _end_if_exhausted(otherwise: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook for errors that nobody catches: one of an exhausted host ends a process that has taken its first steps.

    Whoever waits for that thread would do so for ever: Orbax does for a write whose end could not be told it. A server,
    or a start whose bookkeeping finds no thread, goes on.
    """

    def hook(told: Any) -> object:
        error = told.exc_value
        if error is not None and phases.has_taken_first_steps() and is_exhausted_host(error):
            fail(error)
        return otherwise(told)

    return hook


def _report(error: BaseException, code: int) -> None:
    """Show the error on the terminal; the stack of an expected error is only in the log file."""
    if isinstance(error, Preempted):
        logger.info("%s", error)
    elif code == INTERRUPTED:
        logger.error("interrupted by Ctrl-C%s", f": {error}" if str(error) else "")
    elif code == HARDWARE:
        kept = logs.keep_traceback(error)
        known = "; ".join(gpu_faults()) or "`nvidia-smi -q` and the kernel's log (Xid) say more"
        logger.error(
            "a device of host %s has failed (%s): start again with --resume, without this host if it fails again. %s",
            *(socket.gethostname(), brief(error), known),
            exc_info=None if kept or isinstance(error, RunError) else error,
        )
    elif isinstance(error, RunError):
        logs.keep_traceback(error)
        logger.error("%s", error)
    elif any(map(is_of_storage, causes(error))):
        kept = logs.keep_traceback(error)
        logger.error(
            "a file system failed (%s): start again with --resume", brief(error), exc_info=None if kept else error
        )
    elif code == PEER_LOST:
        kept = logs.keep_traceback(error)
        logger.error(
            "another process or the network to it was lost (%s)", brief(error), exc_info=None if kept else error
        )
    else:
        logger.error("ended by an unexpected error", exc_info=error)


def brief(error: BaseException) -> str:
    """The first line of an error's message: those of jax's service are very long."""
    return str(error).strip().partition("\n")[0][:300]


def end(code: int) -> NoReturn:
    """End the process at once, from any thread, after flushing all output."""
    if code == PREEMPTED and _before_a_stop is not None:
        with contextlib.suppress(Exception):  # it ends all the same
            _before_a_stop()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read our output is gone; the log file has it all
            stream.flush()
    os._exit(code)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error itself, what it was raised from, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
