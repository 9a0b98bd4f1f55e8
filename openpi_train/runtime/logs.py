"""Logging to one file per process and to the terminal. Read next: `exits.py`, which writes the last line.

Every process writes to `<run_dir>/logs/process_<k>.log`, each line with its step and phase; of absl and Orbax warnings
alone. A file that is longer than 64 MiB is kept as `process_<k>.log.1`. On the terminal process 0 shows the project's
INFO messages and libraries' warnings; the other processes show only errors.
"""

import faulthandler
import logging
import sys
import traceback
from pathlib import Path

from openpi_train.runtime import phases
from openpi_train.runtime.patient_file import PatientFile

_FORMAT = "%(asctime)s %(levelname).1s process {process_index} step %(step)d [%(phase)s] %(name)s: %(message)s"
_TERMINAL_FORMAT = "%(asctime)s %(levelname).1s {who}%(message)s"
_MARK = "openpi_train_handler"
# A log file that has become longer is kept as `process_<k>.log.1`, in place of the one before.
_MOST_BYTES = 64 << 20


def configure(process_index: int, run_dir: Path | None = None) -> None:
    """Send this process's log lines to the terminal and, once `run_dir` is known, also to its log file.

    Call it twice: at start without a folder, and again when the run directory is known. Every process calls it.
    """
    root = logging.getLogger()
    # Also removes absl's handler, installed when a library logs before us: every line would appear twice.
    ours_or_plain = [one for one in root.handlers if getattr(one, _MARK, False) or type(one) is logging.StreamHandler]
    for handler in ours_or_plain:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.INFO)
    # A save writes 43 lines of Orbax's, in every process: gigabytes of a long run on many hosts.
    for library in ("absl", "orbax"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    _add(root, _terminal(process_index))
    if run_dir is not None:
        _add(root, _file(process_index, run_dir))


def log_path(run_dir: Path, process_index: int) -> Path:
    """The log file of one process of a run."""
    return run_dir / "logs" / f"process_{process_index}.log"


def tell_path() -> None:
    """Log where this process's log file is, if there is one by now."""
    for file in _files():
        logging.getLogger(__name__).info("log: %s", file.path)


def dump_stacks() -> None:
    """Write the stack of every thread of this process to its log file, or to the terminal if there is none yet."""
    for stream in [one for one in _files() if one.problem is None] or [sys.stderr]:
        stream.write("where every thread of this process is:\n")
        stream.flush()
        faulthandler.dump_traceback(stream.descriptor() if isinstance(stream, PatientFile) else stream)


def keep_traceback(error: BaseException) -> bool:
    """Write the traceback of `error` to this process's log file, if it can be written; returns whether there is one."""
    files = _files()
    for file in files:
        if file.problem is not None:  # what it does not take in the end is shown on the terminal
            continue
        file.write("raised here:\n" + "".join(traceback.format_exception(error)))
    return bool(files)


def _files() -> list[PatientFile]:
    return [one.stream for one in logging.getLogger().handlers if isinstance(one, _LogFile)]


class _LogFile(logging.StreamHandler[PatientFile]):
    """A log file that survives a full disk, and begins anew once it is long; lines that could not be written in the
    end are shown."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.stream.begin_anew_after(_MOST_BYTES)

    def close(self) -> None:
        left = self.stream.close()
        if left:
            sys.stderr.write(f"what did not fit into {self.stream.path}:\n{left.decode(errors='replace')}")
        super().close()


def _terminal(process_index: int) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    who = "" if process_index == 0 else f"process {process_index}: "
    handler.setFormatter(logging.Formatter(_TERMINAL_FORMAT.format(who=who), datefmt="%H:%M:%S"))
    handler.setLevel(logging.INFO if process_index == 0 else logging.ERROR)
    handler.addFilter(_quiet_libraries)
    return handler


def _file(process_index: int, run_dir: Path) -> logging.Handler:
    path = log_path(run_dir, process_index)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(PatientFile(path))
    handler.setFormatter(logging.Formatter(_FORMAT.format(process_index=process_index)))
    handler.addFilter(_add_phase)
    return handler


def _add_phase(record: logging.LogRecord) -> bool:
    now = phases.current()
    record.step, record.phase = now.step, now.name
    return True


def _add(root: logging.Logger, handler: logging.Handler) -> None:
    setattr(handler, _MARK, True)
    root.addHandler(handler)


def _quiet_libraries(record: logging.LogRecord) -> bool:
    # Orbax and jax log several INFO lines per save, which belong in the file. absl also forwards Orbax's warnings about
    # intended states (an item of a checkpoint has no metadata of its own).
    # Errors of threads and tasks of a save are raised by the save, too.
    if record.name in ("absl", "asyncio"):
        return record.levelno >= logging.ERROR and record.exc_info is None
    return record.levelno >= logging.WARNING or record.name.startswith(("openpi_train", "__main__"))
