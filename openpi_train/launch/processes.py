"""Start processes on this machine, watch them, and end them together. Read next: `local.py`, which calls this.

The terminal shows all output of process 0 and the stderr of the others, each line with its process; an error that they
share is shown once. Each process also has a file with all of its output. The first failure ends all, and its error is
shown last.
"""

import dataclasses
import errno
import io
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from openpi_train import faults
from openpi_train.launch.child import Child, Started
from openpi_train.launch.spec import DEFAULT_PORT, ProcessCommand
from openpi_train.launch.status import NOTHING, VARIABLE, Status, read

# Exit codes of a process that ended because another one did: not the root cause if any other code exists.
_FOLLOWS_FROM_ANOTHER = (faults.PEER_LOST, 128 + signal.SIGABRT, 128 + signal.SIGTERM)
_SETTLE_S = 1.5
_ERROR_LINES = 30
_SHORT = 300
# How long the status of an ended process is asked for where its disk fails; its end is not noticed before.
_STATUS_S = 5.0
_LINES_IN_SIGHT = 8
# A file of output that has become longer is kept as `process_<k>.txt.1`, in place of the one before.
_MOST_BYTES = 64 << 20
# Only in the file: gloo prints a greeting for every new group of processes on stdout, in pieces: of two at a time lines
# are torn. XLA asks for a bug report where a program takes minutes to compile, as large models do.
_HIDDEN = re.compile(
    rb"^\[Gloo\] Rank | peer ranks\. Expected number of connected peer ranks is"
    rb"|slow_operation_alarm\.cc|Very slow compile\?|^\*{20,}$"
)
_FIRST_PORT = 20_000  # outgoing connections begin at 32768 (Linux) or 49152
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# The first line of an error that is meant for the user; the lines behind it belong to it.
_ERROR = re.compile(rb"error: |\d\d:\d\d:\d\d E (?!ended by an unexpected error)")
# What differs between the lines of processes that say the same (`runtime/logs.py`).
_OWN = re.compile(rb"^\d\d:\d\d:\d\d (\w) (?:process \d+: )?")
_showing = threading.Lock()
# The lines that were shown last, without time and process, each with its prefix.
_shown: deque[tuple[str, bytes]] = deque(maxlen=200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How a start of the run ended, as seen from here."""

    code: int
    reason: str = ""
    """The first failure, in words."""
    asked: bool = False
    """This launcher was told to stop, by a signal or Ctrl-C."""
    lost_hosts: tuple[str, ...] = ()
    """Hosts that could not be reached, or were lost, or whose hardware has failed."""
    broken_hosts: tuple[str, ...] = ()
    """Those whose hardware has failed."""
    status: Status = NOTHING
    """The status of process 0."""


class ProcessRecord:
    """The launcher's record of one process, on any host.

    Its output is in `path`; `code` is set once it has ended; `status` is its last reported status.
    """

    def __init__(self, rank: int, log_dir: Path, host: str = ""):
        self.rank, self.host = rank, host
        self.who = f"process {rank} on {host}" if host else f"process {rank}"
        self.prefix = f"[{host}:{rank}]" if host else f"[{rank}]"
        self.path = log_dir / f"process_{rank}.txt"
        self.errors: list[bytes] = []
        self.code: int | None = None
        self.ended_at = float("inf")
        self.lost = False
        self.status = NOTHING
        self._is_shared = False  # the line of stderr before was not shown: another process had written it
        self._log = _opened(self.path)
        self._lock = threading.Lock()  # stdout and stderr are read by a thread each

    def take(self, line: bytes, is_error: bool) -> None:
        """Record one line that the process has written to stdout or, if `is_error`, to stderr."""
        with self._lock:
            # Closed: a process that outlived its parent still writes. A full disk must not stop the processes.
            with suppress(ValueError, OSError):
                self._log.write(line)
                if self._log.tell() > _MOST_BYTES:
                    self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                    self._log.close()
                    self._log = _opened(self.path)
            if is_error:
                self._keep(line)
        if (is_error or self.rank == 0) and not _HIDDEN.search(line):
            shared = is_error and (self._is_shared or _ERROR.match(line) is not None)
            hidden = not show_line(self.prefix, line, unless_shared=shared)
            self._is_shared = hidden if is_error else self._is_shared

    def _keep(self, line: bytes) -> None:
        """Keep the last lines; the last error that is meant for the user stays before them, whatever follows it."""
        if _ERROR.match(line):
            self.errors.clear()
        self.errors.append(line)
        if len(self.errors) > _ERROR_LINES:
            del self.errors[1 if _ERROR.match(self.errors[0]) else 0]

    def end(self, code: int) -> None:
        """Record that the process has ended or is lost; only the first call counts."""
        if self.code is not None:
            return
        self.ended_at = time.monotonic()
        self.code = code

    def lose(self, code: int) -> None:
        """Record that the process and its host can no longer be reached."""
        self.lost = True
        self.end(code)

    def close(self) -> None:
        """Stop recording lines."""
        with self._lock, suppress(OSError):
            self._log.close()


def _opened(path: Path) -> io.FileIO:
    """A new file for a process's output, or where that is not possible, with a warning, nowhere."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb", buffering=0)
    except OSError as error:
        tell(f"{path} cannot be written ({error}): that output is only shown")
        return open(os.devnull, "wb", buffering=0)


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write a line to the terminal (stderr). A closed terminal or a full disk does not stop the run."""
    screen: TextIO = sys.stderr if stream is None else stream
    try:
        screen.write(f"{text}\n")
        screen.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:  # `| head`, a closed window: nobody reads any more
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), screen.fileno())


def show_line(prefix: str, line: bytes, *, unless_shared: bool = False) -> bool:
    """Print a line of a process; lines of several processes are never interleaved.

    Returns False, having printed nothing, if it is `unless_shared` and another process has just had the same.
    """
    (text,) = _texts([line])
    with _showing:
        if unless_shared and any(other != prefix and text == shown for other, shown in _shown):
            return False
        _shown.append((prefix, text))
        tell(_prefixed(prefix, line), sys.stdout)
    return True


def _last_error(lines: Sequence[bytes]) -> list[bytes]:
    """The lines from the last error on that is meant for the user; all if there is none."""
    first = max((number for number, line in enumerate(lines) if _ERROR.match(line)), default=0)
    return list(lines[first:])


def _texts(lines: Sequence[bytes]) -> list[bytes]:
    return [_OWN.sub(rb"\1 ", line).strip() for line in lines]


def _is_on_screen(lines: Sequence[bytes]) -> bool:
    """Whether these lines were just shown where messages of this launcher go, too, and not in another file.

    With more than a few lines after them they are out of sight.
    """
    with suppress(OSError, ValueError):
        shown = {text for _, text in list(_shown)[-len(lines) - _LINES_IN_SIGHT :]}
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno()) and shown >= set(_texts(lines))
    return False


def _prefixed(prefix: str, line: bytes) -> str:
    return f"{prefix} {line.decode(errors='replace').rstrip()}"


def stop_signals() -> list[signal.Signals]:
    """The signals that request a stop; SIGHUP, sent by a closed terminal, is ignored under `nohup`."""
    return [one for one in _STOP_SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]


@contextmanager
def stop_signals_to(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Install `handler` for requests to stop, within a `with` block."""
    previous = {signum: signal.signal(signum, handler) for signum in stop_signals()}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


def show(share: Sequence[ProcessCommand]) -> int:
    """Print the processes' command lines instead of starting them; returns the exit code."""
    for command in share:
        print(command.line())
    return 0


def announced(num_processes: int, log_dir: Path | None, where: str = "") -> Path:
    """Create the folder for the processes' output and tell the user where it is."""
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="openpi_train_launch_"))
    log_dir.mkdir(parents=True, exist_ok=True)
    count = "1 process" if num_processes == 1 else f"{num_processes} processes"
    tell(f"starting {count}{where}; output of each: {log_dir}/process_<k>.txt", sys.stdout)
    return log_dir


def run(commands: Sequence[ProcessCommand], log_dir: Path, grace_s: float) -> LaunchOutcome:
    """Run all commands on this machine to the end, with `oversee`."""
    records = [ProcessRecord(command.rank, log_dir) for command in commands]
    children = (_child(command, record) for command, record in zip(commands, records, strict=True))
    return oversee(children, records, grace_s)


def _child(command: ProcessCommand, record: ProcessRecord) -> Child:
    """Start the process; its record ends with its last status."""
    file = record.path.with_suffix(".status.json")
    with suppress(OSError):  # a disk that fails for a moment
        file.unlink(missing_ok=True)  # of an earlier run with the same --log-dir

    def end(code: int) -> None:
        record.status = read(file, limit_s=_STATUS_S)
        record.end(code)

    return Child(command.argv, {**command.env, VARIABLE: str(file)}, record.take, end)


def oversee(start: Iterable[Started], records: Sequence[ProcessRecord], grace_s: float) -> LaunchOutcome:
    """Start what `start` yields and wait until all `records` have ended; returns code 0 or that of the first failure.

    SIGINT, SIGTERM, SIGUSR1 and (as SIGTERM) SIGHUP are forwarded to all processes, which may take as long as they need
    to save; a second one ends them at once. After a failure the others have `grace_s` to exit.
    """
    started: list[Started] = []
    _shown.clear()
    try:
        with forwarded_signals(started) as received:
            for one in start:
                started.append(one)
            for one in started:
                one.watch()
            _wait_for_end(records, started, grace_s)
    finally:
        for closed in (*started, *records):
            closed.close()
    code, reason = _report(records, records[0].status, asked=bool(received))
    return LaunchOutcome(
        code=code,
        reason=reason,
        asked=bool(received),
        lost_hosts=_hosts(record for record in records if record.lost or record.code == faults.HARDWARE),
        broken_hosts=_hosts(record for record in records if record.code == faults.HARDWARE),
        status=records[0].status,
    )


def _hosts(records: Iterable[ProcessRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.host for record in records))


def _wait_for_end(records: Sequence[ProcessRecord], started: Sequence[Started], grace_s: float) -> None:
    """Wait until all have ended; after the first failure, end them.

    They first get a moment to notice the failure themselves: a process that is told to stop after a peer has died waits
    for that peer in jax's preemption service, and never reports what it saw.
    """
    failed_at, asked, killed = None, False, False
    while any(record.code is None for record in records):
        time.sleep(0.05)
        if not any(record.code not in (None, 0, faults.PREEMPTED) for record in records):
            continue
        failed_at = failed_at or time.monotonic()
        since_s = time.monotonic() - failed_at
        if not asked and since_s > _SETTLE_S:
            asked = True
            _send(started, signal.SIGTERM)
        if not killed and since_s > _SETTLE_S + grace_s:
            killed = True
            _send(started, signal.SIGKILL)


def _report(records: Sequence[ProcessRecord], status: Status, *, asked: bool) -> tuple[int, str]:
    """Show the root cause last, and return the exit code of the run and the cause in words.

    Of several processes with the same error the first is named. A process that was told to stop (`asked`) before it
    could listen ends by the signal, and has nothing to save. If one was told by somebody else so early, all others lose
    it, and the run was asked to stop all the same. Processes whose connection is lost are told so by their own host.
    """
    ended = sorted((record for record in records if record.code), key=lambda record: record.ended_at)
    if not ended:
        return 0, "done"
    stopped = [record for record in ended if record.code == faults.PREEMPTED]
    failed = [record for record in ended if record.code != faults.PREEMPTED] or ended
    first = failed[0].ended_at
    was_stopped = stopped and stopped[0].ended_at - first <= _SETTLE_S  # not by this launcher, because of the others
    if was_stopped and all(record.code in _FOLLOWS_FROM_ANOTHER and not record.lost for record in failed):
        failed, first = stopped, stopped[0].ended_at
    soon = [record for record in failed if record.ended_at - first <= _SETTLE_S]
    culprit = min(soon, key=lambda record: _derived(record.code))
    texts = _texts(_last_error(culprit.errors))
    alike = [one for one in soon if one.code == culprit.code and _texts(_last_error(one.errors)) == texts]
    culprit = min(alike, key=lambda one: one.rank)
    error = _last_error(culprit.errors)
    assert culprit.code is not None
    if culprit.code == faults.PREEMPTED or (asked and culprit.code == 128 + signal.SIGTERM):
        tell(_stopped(status))
        saved = f", and saved step {status.saved_step}" if status.saved_step else ""
        return faults.PREEMPTED, f"it was asked to stop{saved}"
    if not _is_on_screen(error):
        for line in error:
            tell(_prefixed(culprit.prefix, line))
    names = {128 + one: f" (signal {one.name})" for one in signal.Signals}
    reason = f"{culprit.who} failed with exit code {culprit.code}{names.get(culprit.code, '')}"
    tell(f"{reason}: see {culprit.path}")
    return culprit.code, reason + (
        f": {error[-1].decode(errors='replace').strip()}" if culprit.lost else _in_short(error)
    )


def _derived(code: int | None) -> int:
    """How far an end is from the root cause, of those that ended at nearly the same time.

    A process that this launcher did not tell to stop yet, and that ended by a request to, was told by somebody else.
    """
    if code not in _FOLLOWS_FROM_ANOTHER:
        return 0
    return 1 if code == 128 + signal.SIGTERM else 2


def _in_short(error: Sequence[bytes]) -> str:
    """The first line of an error that is meant for the user, for the line about a restart; else nothing."""
    if not error or not _ERROR.match(error[0]):
        return ""
    text = _OWN.sub(b"", error[0]).decode(errors="replace").strip()
    return f": {text[:_SHORT]}"


def _stopped(status: Status) -> str:
    """What a run that was asked to stop has saved since its start, and how to go on."""
    if status.saved_step:
        return f"stopped on request at step {status.saved_step}, and saved: continue with the same command and --resume"
    how = " and --resume" if status.opened else ""
    return f"stopped on request, before this start had anything new to save: start again with the same command{how}"


@contextmanager
def forwarded_signals(started: Sequence[Started]) -> Iterator[list[int]]:
    """Forward a request to stop to all processes, and kill them on the second. Yields the signals received."""
    received: list[int] = []

    def forward(signum: int, _frame: object) -> None:
        received.append(signum)
        passed_on = signal.SIGTERM if signum == signal.SIGHUP else signum
        _send(started, passed_on if len(received) == 1 else signal.SIGKILL)

    with stop_signals_to(forward):
        yield received


def _send(started: Sequence[Started], signum: int) -> None:
    for one in started:
        one.send(signum)


def free_port() -> int:
    """A port that is free on this machine.

    It is outside of the range for outgoing connections: one of these could take it before process 0 listens, seconds
    later.
    """
    while True:
        port = random.SystemRandom().randrange(_FIRST_PORT, DEFAULT_PORT)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
