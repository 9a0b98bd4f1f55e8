"""Start processes on this machine, watch over them, and end them together. Read next: `local.py`, which calls this.

On the terminal: process 0 as it is, of the others only what they write to stderr, every line with its process. Each
process also has a file with all of its output. The first failure ends all, and its error is the last thing shown.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from openpi_train.launch.spec import ProcessCommand

# Codes that a process ends with because another one did: never the root cause if there is a different one.
_FOLLOWS_FROM_ANOTHER = (70, 128 + signal.SIGABRT, 128 + signal.SIGTERM)
_PREEMPTED = 75  # stopped on request after a good save; the others are saving too
_SETTLE_S = 1.5
_ERROR_LINES = 30
_HIDDEN = b"[Gloo] Rank "  # gloo greets every new group of processes on stdout


class Child:
    """A started process: its output goes to `path`, and its exit code and end time appear when it ends."""

    def __init__(self, command: ProcessCommand, log_dir: Path):
        self.rank = command.rank
        self.path = log_dir / f"process_{self.rank}.txt"
        self.errors: list[bytes] = []
        self.code: int | None = None
        self.ended_at = float("inf")
        self._process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes to the launcher alone, which passes it on
            preexec_fn=_die_with_launcher if sys.platform == "linux" else None,
        )
        self._threads: list[threading.Thread] = []

    def watch(self, screen: "_Screen") -> None:
        """Read the output and wait for the end, in threads, from when all processes are started."""
        log = self.path.open("wb")
        process = self._process
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(process.stdout, log, screen if self.rank == 0 else None)),
            threading.Thread(target=self._read, args=(process.stderr, log, screen, self.errors)),
        ]
        self._threads = [*readers, threading.Thread(target=self._wait)]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def send(self, signum: int) -> None:
        """Send a signal to the process; SIGKILL goes to all that it has started, too."""
        with suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                os.killpg(self._process.pid, signum)
            elif self.code is None:
                self._process.send_signal(signum)

    def close(self) -> None:
        """Clear away what an ended process has left running, and see its output to the end."""
        self.send(signal.SIGKILL)
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _wait(self) -> None:
        code = self._process.wait()
        self.ended_at = time.monotonic()
        self.code = code if code >= 0 else 128 - code

    def _read(self, stream: IO[bytes], log: IO[bytes], screen: "_Screen | None", keep: list[bytes] | None = None):
        for line in stream:
            log.write(line)
            log.flush()
            if keep is not None:
                keep.append(line)
                del keep[:-_ERROR_LINES]
            if screen is not None and not line.startswith(_HIDDEN):
                screen.show(self.rank, line)


class _Screen:
    """The terminal: whole lines of several processes, never mixed."""

    def __init__(self):
        self._lock = threading.Lock()

    def show(self, rank: int, line: bytes) -> None:
        with self._lock:
            sys.stdout.write(f"[{rank}] {line.decode(errors='replace').rstrip()}\n")
            sys.stdout.flush()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every form that starts processes on this machine."""
    parser.add_argument("--devices-per-process", type=int, help="make so many CPU devices in each process, use no GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the processes' command lines, start nothing")
    parser.add_argument("--log-dir", type=Path, help="folder for the processes' output (default: a temporary one)")
    parser.add_argument("--grace-s", type=float, default=15.0, help="time to end after another failed (%(default)s s)")


def start(share: Sequence[ProcessCommand], *, dry_run: bool, log_dir: Path | None, grace_s: float) -> int:
    """Start this machine's `share` of a run, or with `dry_run` only print it; returns the exit code."""
    if dry_run:
        for command in share:
            print(command.line())
        return 0
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="openpi_train_launch_"))
    count = "1 process" if len(share) == 1 else f"{len(share)} processes"
    print(f"starting {count}; all that each writes: {log_dir}/process_<k>.txt", flush=True)
    return run(share, log_dir, grace_s)


def run(commands: Sequence[ProcessCommand], log_dir: Path, grace_s: float) -> int:
    """Run all commands on this machine and return the exit code of the run: 0, or that of the first failure.

    SIGINT and SIGTERM are passed on to all processes, which may take as long as they need to save; a second one
    ends them at once. After a failure the others get `grace_s` to end by themselves.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    screen = _Screen()
    children: list[Child] = []
    try:
        with _forwarded_signals(children):
            for command in commands:
                children.append(Child(command, log_dir))
            for child in children:
                child.watch(screen)
            _wait_for_end(children, grace_s)
    finally:
        for child in children:
            child.close()
    return _report(children)


def _wait_for_end(children: Sequence[Child], grace_s: float) -> None:
    """Return when all have ended; from the first failure on, make them.

    They first get a moment to notice by themselves: a process that is told to stop after a peer has died waits for
    that peer in jax's preemption service, and never says what it saw.
    """
    failed_at, asked, killed = None, False, False
    while any(child.code is None for child in children):
        time.sleep(0.05)
        if not any(child.code not in (None, 0, _PREEMPTED) for child in children):
            continue
        failed_at = failed_at or time.monotonic()
        since_s = time.monotonic() - failed_at
        if not asked and since_s > _SETTLE_S:
            asked = True
            _send(children, signal.SIGTERM)
        if not killed and since_s > _SETTLE_S + grace_s:
            killed = True
            _send(children, signal.SIGKILL)


def _report(children: Sequence[Child]) -> int:
    """Show the root cause last, and return the exit code of the run."""
    ended = sorted((child for child in children if child.code), key=lambda child: child.ended_at)
    if not ended:
        return 0
    failed = [child for child in ended if child.code != _PREEMPTED] or ended
    first = failed[0].ended_at
    soon = [child for child in failed if child.ended_at - first <= _SETTLE_S]
    culprit = next((child for child in soon if child.code not in _FOLLOWS_FROM_ANOTHER), soon[0])
    assert culprit.code is not None
    if culprit.code == _PREEMPTED:
        sys.stderr.write("stopped on request, everything is saved: continue with the same command and --resume\n")
        return culprit.code
    for line in culprit.errors:
        sys.stderr.write(f"[{culprit.rank}] {line.decode(errors='replace').rstrip()}\n")
    signalled = f" (signal {signal.Signals(culprit.code - 128).name})" if culprit.code > 128 else ""
    sys.stderr.write(f"process {culprit.rank} failed with exit code {culprit.code}{signalled}: see {culprit.path}\n")
    return culprit.code


@contextmanager
def _forwarded_signals(children: Sequence[Child]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the children; the second time kill them."""
    received = 0

    def forward(signum: int, _frame: object) -> None:
        nonlocal received
        received += 1
        _send(children, signum if received == 1 else signal.SIGKILL)

    previous = {signum: signal.signal(signum, forward) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _send(children: Sequence[Child], signum: int) -> None:
    for child in children:
        child.send(signum)


def _die_with_launcher() -> None:
    """In the new process: be killed when the launcher is, so that no run is left behind with a port."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def free_port() -> int:
    """A port that is free on this machine together with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except (OSError, OverflowError):
                continue
