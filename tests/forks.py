"""Runs of `python -m openpi_train` that need not import everything again: forks of a process that has.

A server per pytest process has jax and the package imported, has read two command lines, and has nothing started: one
thread, no device, no open file.
A run is a fork of it, with its own environment, arguments, output and exit code; so are the processes that `launch
local` starts in such a run. Whatever a fork cannot be like, it is started as a process of its own: a variable that is
read by an import, another folder, another program, a parent with threads. The tests that kill launchers, take the
hosts' networks away, start by ssh or Slurm, or stop and resume start real ones, all.

What a fork hides: the seconds of the import and half of those of the command line, and that every process has its own
hash seed.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, "-m", "openpi_train"]
_MOST_BYTES = 1 << 17
# What a fork may have of its own: read when a run begins, by no import.
_FREE = ("OPENPI_TRAIN_", "PYTEST_", "XLA_FLAGS", "NPROC")
_FREE += ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_HOME = "OPENPI_TRAIN_HOME"
_DEVICES = "JAX_NUM_CPU_DEVICES"  # jax reads it when it is imported; `_become` tells jax

# What every process of the tests has. One thread of numpy's: the server may have none beside its own.
ALIKE = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}

# What runs import, most of it only when they need it.
IMPORTED = ("openpi_train.launch.launchers", "openpi_train.training.settling", "openpi_train.training.start")
IMPORTED += ("openpi_train.tools.evaluate_policy", "openpi_train.tools.evaluate_text", "openpi_train.tools.report")
IMPORTED += ("jaxlib.mlir.dialects.mhlo", "matplotlib.backends.backend_svg", "matplotlib.figure", "tensorboardX")

_start_process = subprocess.Popen


def read_sources_once() -> None:
    """Have tyro read the source of a class once, not for each command line: most of the time of a parse."""
    import tyro._docstrings

    sources: Any = tyro._docstrings
    with contextlib.suppress(AttributeError):  # another version's may have other names
        sources._ClassTokenization.make = staticmethod(functools.cache(sources._ClassTokenization.make.__wrapped__))


# ---- the tests' side ----


class _Server:
    """The process of which the others are forks; it ends with us."""

    def __init__(self):
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {name: value for name, value in os.environ.items() if name != _DEVICES}
        with theirs:
            self._process = _start_process(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**variables, **ALIKE},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.is_up = self.channel.recv(_MOST_BYTES) == b"ready"
        atexit.register(self._end)

    def _end(self) -> None:
        self.channel.close()
        self._process.wait()


_server = functools.cache(_Server)


class Forked:
    """A process that the server started; it goes by the names of `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int):
        self.args, self.returncode = args, None
        channel = _server().channel
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = json.dumps({"args": list(args), "env": dict(env)}).encode()
            socket.send_fds(channel, [words], [stdout, stderr, theirs.fileno()])
        self.pid = self._answer(None)["pid"]

    def _answer(self, timeout_s: float | None) -> dict[str, int]:
        self._answers.settimeout(timeout_s)
        answer = self._answers.recv(_MOST_BYTES)
        assert answer, "the server of forks has ended"
        return json.loads(answer)

    def poll(self) -> int | None:
        """The exit code, or None where it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        if self.returncode is None:
            try:
                self.returncode = self._answer(timeout)["code"]
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._answers.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(args: Sequence[str], env: Mapping[str, str], output: int) -> "Forked | subprocess.Popen":
    """As `subprocess.Popen`, with everything that it prints going to the file of this descriptor."""
    if not _server().is_up:
        return _start_process(args, env=dict(env), cwd=ROOT, stdout=output, stderr=output)
    return Forked(args, env, output, output)


class Script(Forked):
    """A fork that runs a file of the tests as a program; it prints into one file."""

    def __init__(self, path: Path, *arguments: object):
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`communicate` closes it)
        words, number = [sys.executable, str(path), *map(str, arguments)], self._output.fileno()
        environ = {name: value for name, value in os.environ.items() if name != _DEVICES}
        super().__init__(words, {**environ, **ALIKE}, number, number)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """All that it has printed, once it has ended."""
        self.wait(timeout)
        with self._output as file:
            file.seek(0)
            return file.read(), None


def run(args: Sequence[str], env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with the output captured as text: the process's own end, and its output's."""
    if not _server().is_up:
        return subprocess.run(
            args, capture_output=True, text=True, timeout=timeout_s, env=dict(env), cwd=ROOT, check=False
        )
    deadline, said, readers = time.monotonic() + timeout_s, ["", ""], []
    pipes = [os.pipe(), os.pipe()]
    try:
        process = Forked(args, env, pipes[0][1], pipes[1][1])
    finally:
        for _, write in pipes:
            os.close(write)

    def read(index: int) -> None:
        with open(pipes[index][0]) as file:
            said[index] = file.read()

    for index in range(2):
        readers.append(threading.Thread(target=read, args=(index,), daemon=True))
        readers[-1].start()
    try:
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(args, timeout_s, *said)
        code = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(args, code, *said)


# ---- the server's side ----


class _Popen(_start_process):
    """A fork where it can be one."""

    def __init__(self, args, *more, preexec_fn: Callable[[], object] | None = None, **options):
        if not more and _can_fork(args, options):
            preexec_fn = functools.partial(_become, list(args), dict(options["env"]), preexec_fn)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # jax's: it is not started
            super().__init__(args, *more, preexec_fn=preexec_fn, **options)


_own: dict[str, str] = {}  # the variables that the imports saw


def _can_fork(args: object, options: Mapping[str, object]) -> bool:
    env = options.get("env")
    if not isinstance(args, list | tuple) or not isinstance(env, Mapping):
        return False
    if list(args[:3]) != PROGRAM and not _is_script(args):
        return False
    different = {name for name in {*env, *_own} if env.get(name) != _own.get(name)}
    return (
        all(name == _DEVICES or name.startswith(_FREE) for name in different)
        and not options.get("pass_fds")
        and options.get("cwd") in (None, str(ROOT))
        and os.getcwd() == str(ROOT)
        and len(os.listdir("/proc/self/task")) == 1
    )


def _is_script(args: Sequence[str]) -> bool:
    return args[0] == sys.executable and Path(args[1]).is_relative_to(ROOT / "tests")


def _become(args: list[str], env: Mapping[str, str], before: Callable[[], object] | None) -> NoReturn:
    """In the new process, with its output in place: be the program, as `exec` would have it, and end."""
    gc.freeze()  # whatever our parent left is nobody's to clear away: the numbers of its files are ours now
    code: object = 1
    try:
        if before is not None:
            before()
        os.closerange(3, 1 << 16)  # among them the pipe by which `subprocess` waits for an `exec`
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_IGN)
        if env.get(_HOME) != os.environ.get(_HOME):  # experiments have read it
            for name in [name for name in sys.modules if name.startswith("openpi_train_configs.")]:
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(env)
        if _DEVICES in env:
            import jax

            jax.config.update("jax_num_cpu_devices", int(env[_DEVICES]))
        subprocess.Popen = _Popen
        if _is_script(args):
            sys.argv = args[1:]
            sys.path[:1] = [str(Path(args[1]).parent), str(ROOT)]
            runpy.run_path(args[1], run_name="__main__")
        else:
            sys.argv = [args[2], *args[3:]]
            runpy.run_module("openpi_train", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    _end(0 if code is None else code if isinstance(code, int) else 1)


def _end(code: int) -> NoReturn:
    """What Python does at the end of a program."""
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        traceback.print_exc()
        code = code or 120
    os._exit(code & 0xFF)


def serve(channel: socket.socket) -> None:
    """Start what is asked for, and tell how each ended, until nobody is left who asks."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is channel:
                    words, descriptors, *_ = socket.recv_fds(channel, _MOST_BYTES, 3)
                    if not words:
                        return
                    _start(selector, json.loads(words), descriptors)
                else:
                    process, answers = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    with answers, contextlib.suppress(OSError):
                        answers.send(json.dumps({"code": process.wait()}).encode())


def _start(selector: selectors.BaseSelector, request: Mapping, descriptors: Sequence[int]) -> None:
    stdout, stderr, answer = descriptors
    answers = socket.socket(fileno=answer)
    process = subprocess.Popen(request["args"], env=request["env"], stdout=stdout, stderr=stderr)
    os.close(stdout)
    os.close(stderr)
    with contextlib.suppress(OSError):
        answers.send(json.dumps({"pid": process.pid}).encode())
    selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (process, answers))


def main(channel: socket.socket) -> None:
    """Import everything, read a command line as each run does, and serve."""
    sys.path[0] = str(ROOT)  # as `python -m` does
    _own.update(os.environ)
    for module in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # another jaxlib's may have other names
            importlib.import_module(module)
    read_sources_once()
    from openpi_train import cli

    for name in ("debug", "arithmetic_sft"):
        cli.parse_experiment(name, ["--exp-name", "x"])

    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C comes to all: the tests end us
    subprocess.Popen = _Popen
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # as tests/conftest.py
    channel.send(b"ready")
    serve(channel)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
