"""The process of a reward function: limits, a clean environment, and the end of all that the function has started.

    the run  <- a socket ->  its keeper  ->  the function's process  ->  programs that it starts

The keeper leads a session, runs nothing of the user's and adopts what outlives its parent. It ends everything below it
when the run or the function's process ends. Questions and answers are JSON, so that nothing that a function answers
is run in the run. This bounds mistakes; it is no sandbox. Must not import jax. Read next: `process_group.py`.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import json
import math
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat

from openpi_train.data.text.reward_form import TrlForm, form_of
from openpi_train.json_object import JsonObject
from openpi_train.rl.rewards.process_group import adopt_orphans, end_descendants, end_group, end_with_parent
from openpi_train.runtime.exits import RunError
from openpi_train.runtime.own_file import import_file

# Functions of this package by their names, each of which needs the package of its name.
PACKAGED = {"math_verify": "openpi_train.rl.rewards.math_answers:is_right"}
INSTALL = "Install what it needs: pip install 'openpi_train[math]'"

# Variables of the run's environment that its reward functions get: where things are, the language, which devices the
# run may use, and which of its processes this is. All else is left out, since keys and tokens have no common form.
_PASSED = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP PYTHONPATH PYTHONHOME PYTHONUNBUFFERED VIRTUAL_ENV "
    "CONDA_PREFIX CONDA_DEFAULT_ENV LD_LIBRARY_PATH DYLD_LIBRARY_PATH XDG_CACHE_HOME HF_HOME HF_HUB_CACHE "
    "HF_HUB_OFFLINE SSL_CERT_FILE SSL_CERT_DIR OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS JAX_PLATFORMS "
    "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK".split()
)
_PASSED_STARTS = ("LC_",)

_MOST_FILES = 4096
_MOST_FILE_BYTES = 64 << 30
# Processes and threads beyond those that the user has when the process starts: the system counts all of a user's.
_MOST_TASKS = 4096
# Seconds of all processors for a call beyond its time-out: the import, and what runs between two calls.
_SPARE_CPU_S = 600
# Characters of a traceback that are answered.
_MOST_PROBLEM = 10_000

# Started by `python -c`: the package and the user's modules may be anywhere on the run's path.
BOOT = (
    "import json, sys; told = json.loads(sys.argv.pop()); sys.path[:] = told['path']; "
    "from openpi_train.rl.rewards.reward_process import keep; "
    "keep(told['name'], told['socket'], told['memory_bytes'])"
)


def clean_environment(environment: Mapping[str, str], names: Iterable[str] = ()) -> dict[str, str]:
    """What of an environment a reward function gets: the variables that programs need, and those named."""
    named = frozenset(names)
    return {
        name: value
        for name, value in environment.items()
        if name in _PASSED or name in named or name.startswith(_PASSED_STARTS)
    }


def keep(name: str, socket: int, memory_bytes: int) -> NoReturn:
    """The keeper: starts the function's process and ends as it does; ends all if the run closes the socket."""
    for signum in (signal.SIGTERM, signal.SIGINT):  # of a whole Slurm step: the run ends this process itself
        signal.signal(signum, signal.SIG_IGN)
    adopt_orphans()
    _limit(memory_bytes)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        end_with_parent()
        _serve(Connection(socket), name)
        os._exit(0)
    threading.Thread(target=_end_with_run, args=(socket,), daemon=True).start()
    while True:
        process, status = os.wait()  # also of adopted programs
        if process == child:
            break
    end_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL and SIGSTOP there is nothing to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_with_run(socket: int) -> None:
    """Wait until the other end is closed, without reading, and end everything."""
    poll = select.poll()
    poll.register(socket, 0)
    poll.poll()
    end_group(os.getpid())


def _limit(memory_bytes: int) -> None:
    """Bound what this process and its programs may take, each of them."""
    # Not RLIMIT_AS: CUDA and allocators reserve far more addresses than they ever write to.
    _lower(resource.RLIMIT_DATA, memory_bytes)
    _lower(resource.RLIMIT_FSIZE, _MOST_FILE_BYTES)
    _lower(resource.RLIMIT_NOFILE, _MOST_FILES)
    _lower(resource.RLIMIT_CORE, 0)
    if tasks := _tasks_of_user():
        _lower(resource.RLIMIT_NPROC, tasks + _MOST_TASKS)


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _tasks_of_user() -> int:
    """The processes and threads of this user; 0 where the system has no /proc."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if process.stat().st_uid == os.getuid():
                count += len(os.listdir(process / "task"))
    return count


def _serve(connection: Connection, name: str) -> None:
    """The function's process: says whether the function is there, then answers until the other end is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the run has ended, or waits no longer
        found = _found(connection, name)
        while found is not None:
            told = json.loads(connection.recv_bytes())
            _allow_time(told["timeout_s"])
            _say(connection, **_answer(found, told.get("texts"), told.get("arguments")))


def _found(connection: Connection, name: str) -> Callable[..., Any] | None:
    """The function, after its import; None, with the reason told, if there is none."""
    file, _, function = PACKAGED.get(name, name).rpartition(":")
    found: Any = None
    form: TrlForm | None = None
    try:
        module = (
            importlib.import_module(file) if name in PACKAGED else import_file(Path(file), "the file of the reward")
        )
        found = getattr(module, function, None)
        form, problem = _form(file, function, found)
    except Exception as error:
        missing = name in PACKAGED and isinstance(error, ImportError)
        told = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        problem = told + (f". {INSTALL}" if missing else "")
    _say(connection, problem=problem, value=None if form is None else dataclasses.asdict(form))
    return found if problem is None else None


def _answer(function: Callable[..., Any], texts: Sequence[str] | None, arguments: JsonObject | None) -> dict[str, Any]:
    """The reward of a completion, of its texts, or with `arguments` those of several (`reward_form.py`)."""
    try:
        value = function(**(arguments or {})) if texts is None else function(*texts)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if texts is not None:
            return {"value": _number(value)}
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise TypeError(f"it returned {value!r:.200}; needed is a list with a reward for each completion")
        return {"value": [_number(one) for one in value]}
    except MemoryError:
        return {"out_of_memory": True}
    except Exception:
        return {"problem": traceback.format_exc(limit=-3).strip()}


def _number(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"it returned {value!r:.200}; needed is a number, or None for no reward")
    return float(value)


def _say(
    connection: Connection, *, value: object = None, problem: str | None = None, out_of_memory: bool = False
) -> None:
    if problem is not None and len(problem) > _MOST_PROBLEM:
        problem = f"{problem[: _MOST_PROBLEM // 2]}\n...\n{problem[-_MOST_PROBLEM // 2 :]}"
    told = {"value": value, "problem": problem, "out_of_memory": out_of_memory}
    connection.send_bytes(json.dumps(told).encode())


def _allow_time(timeout_s: float) -> None:
    """Limit the time on processors of what runs from here on, which may outlive the call."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(time.process_time() + timeout_s * (os.cpu_count() or 1)) + _SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _form(file: str, function: str, found: object) -> tuple[TrlForm | None, str | None]:
    """The form of what a file has under a name, and why it is no function of a reward."""
    if not isinstance(found, Callable):
        return None, f"{file} has no function {function!r} of (prompt, completion, reference)"
    try:
        signature = inspect.signature(found)
    except ValueError:  # a built-in function that does not tell
        return None, None
    try:
        return form_of(signature), None
    except ValueError as error:
        return None, f"{function} in {file}: {error}"
