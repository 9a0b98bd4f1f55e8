"""A reward function of the user's, or one that may hang, in a process of its own that is killed if it takes too long.

It may hang, end its process, start programs or use any library, and training goes on or ends with an error that names
it. It sees little of the run's environment, and has limits. Read next: `reward_process.py`, what runs there.
"""

import ast
import difflib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from openpi_train.data.text.reward_form import GIVEN, NEEDED, TrlForm, form_of, signature_in
from openpi_train.json_object import JsonObject
from openpi_train.rl.rewards.process_group import end_group
from openpi_train.rl.rewards.reward_process import BOOT, clean_environment
from openpi_train.runtime.exits import DataError

logger = logging.getLogger(__name__)

# The start of the process and the import of the file may take so long in any case.
_START_S = 120.0
# Seconds between looks whether the run is asked to stop.
_LOOK_S = 1.0
_SHOWN = 80  # characters of a prompt in a message
# So many completions in a row may end the process: then it is the function, and not what a policy wrote.
_MOST_DEATHS = 8

# The longest answer, in bytes: a number, or the end of a traceback.
_MOST_ANSWER = 1 << 20

# Prompt, completion, reference.
Texts = tuple[str, str, str]


def file_problem(name: str) -> list[str]:
    """Why there is no function of the name `file.py:function`, as far as can be seen without running the file."""
    file, _, function = name.rpartition(":")
    if not (file.endswith(".py") and function.isidentifier()):
        return [f"needed is file.py:function; {NEEDED}"]
    if not Path(file).is_file():
        return [f"there is no file {file} (looked in {Path.cwd()})"]
    try:
        module = ast.parse(Path(file).read_bytes(), file)
    except (SyntaxError, ValueError) as error:
        return [f"{file} is no Python file: {error}"]
    names = _names(module)
    if function in names or "*" in names:
        try:
            _form_in(module, function)
        except ValueError as error:
            return [f"{function} in {file}: {error}"]
        return []
    close = difflib.get_close_matches(function, names, n=1)
    return [f"{file} has no function {function!r}" + (f"; did you mean {close[0]}?" if close else "")]


def trl_form(name: str) -> TrlForm | None:
    """The form of the function `file.py:function` if it is TRL's, as far as can be seen without running the file."""
    file, _, function = name.rpartition(":")
    try:
        return _form_in(ast.parse(Path(file).read_bytes(), file), function)
    except (OSError, SyntaxError, ValueError):  # `file_problem` tells
        return None


def _form_in(module: ast.Module, name: str) -> TrlForm | None:
    """The form of the last function of this name, if it is TRL's. Raises ValueError if it is no reward's."""
    found = [one for one in module.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name]
    signature = signature_in(found[-1]) if found else None
    return None if signature is None else form_of(signature)


def _names(module: ast.Module) -> set[str]:
    """The names that a file defines or imports, at any place in it; `*` stands for names that cannot be known."""
    found: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name)
            case ast.Call(func=ast.Name(id="globals" | "setattr" | "exec")):
                found.add("*")
    return found


class InterruptedReward(Exception):
    """The run was asked to stop while a reward was computed."""


class FunctionReward:
    """Calls `file.py:function(prompt, completion, reference)`, or one of `PACKAGED`, in a process of its own; or a
    function of TRL's form (`reward_form.py`), whose `form` is known once it is started.

    Args:
        timeout_s: the longest time of a call. The process is then killed and the next call gets a new one.
        on_timeout: "error" raises DataError; "none" gives the completion no reward, with a warning. A call that ends
            its process, or needs too much memory, counts as one that takes too long, up to `_MOST_DEATHS` in a row.
        memory_gib: the most memory that the process, and each program that it starts, may take.
        environment: names of variables of the run's environment that it gets, besides those of `clean_environment`.
        is_stopping: whether the run is asked to stop.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        on_timeout: str = "error",
        memory_gib: float = 64.0,
        environment: Sequence[str] = (),
        is_stopping: Callable[[], bool] = lambda: False,
    ):
        self.name, self._timeout_s, self._on_timeout, self._is_stopping = name, timeout_s, on_timeout, is_stopping
        self._memory_gib, self._environment = memory_gib, tuple(environment)
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._looked = time.monotonic()
        self._deaths = 0
        self.form: TrlForm | None = None

    def __call__(self, texts: Sequence[Texts]) -> list[float | None]:
        """The rewards. Raises DataError if the function raises, or ends its process or takes too long and that is an
        error, and InterruptedReward if the run is asked to stop.
        """
        return [self._asked({"texts": one}, self._told(one[0]), 1)[0] for one in texts]

    def of_group(self, prompt: str, arguments: Mapping[str, Sequence[object]]) -> list[float | None]:
        """The rewards of the completions of a prompt, by a function of TRL's form. It may take as long as for as many
        single ones; if it takes longer, all have no reward. Raises as `__call__`.
        """
        count = len(arguments["completions"])
        assert self.form is not None
        columns = {name: values for name, values in arguments.items() if name not in GIVEN}
        given = self.form.arguments({name: arguments[name] for name in GIVEN}, columns)
        return self._asked({"arguments": given}, self._told(prompt, count), count)

    def start(self) -> None:
        """Start the process. Raises DataError if the file cannot be imported, or has no such function."""
        self._started()

    def close(self) -> None:
        """End the process, and all that it has started."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            end_group(self._process.pid)
            self._process.wait()
        self._process = self._connection = None

    def _asked(self, question: JsonObject, told: str, count: int) -> list[float | None]:
        """The answer, for so many completions, to a question that `told` describes."""
        if self._process is not None and self._has_ended():
            self.close()  # it was killed between two calls, of which this completion knows nothing
        connection, limit_s = self._started(), self._timeout_s * count
        none: list[float | None] = [None] * count
        try:
            connection.send_bytes(json.dumps({**question, "timeout_s": limit_s}).encode())
            is_in_time = self._answers(connection, limit_s)
            answer = self._received(connection) if is_in_time else {}
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._without(f"{told} has ended its process ({self._end()})", error)
            return none
        if not is_in_time:
            self.close()
            self._without(f"{told} took longer than {limit_s:g} s and was killed")
            return none
        if answer["out_of_memory"]:
            self.close()  # what it holds may be half made
            most = f"more than {self._memory_gib:g} GiB of memory (--rl.reward-memory-gib)"
            self._without(f"{told} needed {most} and was killed", MemoryError())
            return none
        self._deaths = 0
        if answer["problem"] is not None:
            raise DataError(f"{told} has failed:\n{answer['problem']}")
        values = [answer["value"]] if "texts" in question else answer["value"]
        if not isinstance(values, list) or len(values) != count:
            number = len(values) if isinstance(values, list) else 1
            raise DataError(f"{told}: it returned {number} rewards, and there are {count} completions")
        return values

    def _received(self, connection: Connection) -> dict[str, Any]:
        """The answer. Raises DataError if it has not the form of one, as of a function that writes to the socket."""
        try:
            told = json.loads(connection.recv_bytes(_MOST_ANSWER))
            value, problem, out_of_memory = told["value"], told["problem"], told["out_of_memory"]
            if _is_answer(value) and isinstance(problem, str | None) and isinstance(out_of_memory, bool):
                return told
        except (EOFError, ConnectionResetError):
            raise
        except (ValueError, KeyError, TypeError, RecursionError, OSError):  # OSError: it is too long
            pass
        self.close()
        raise DataError(f"the reward {self.name} writes to files that it has not opened: its answers are no answers")

    def _without(self, told: str, death: Exception | None = None) -> None:
        """No reward, with a warning, if that is allowed. Raises DataError otherwise."""
        self._deaths = self._deaths + 1 if death else 0
        if self._on_timeout == "none" and self._deaths < _MOST_DEATHS:
            logger.warning("%s", told)
            return
        if self._on_timeout == "none":
            raise DataError(
                f"{told}, as {self._deaths - 1} completions before it in a row: mend the function"
            ) from death
        remedy = "Mend it" if death else "Make it faster, raise --rl.reward-timeout-s"
        raise DataError(f"{told}. {remedy}, or give such completions no reward: --rl.on-reward-timeout none") from death

    def _end(self) -> str:
        """How the process has ended, which is closed."""
        process, until = self._process, time.monotonic() + _LOOK_S
        assert process is not None
        while not (has_ended := self._has_ended()) and time.monotonic() < until:
            time.sleep(0.01)  # its files are closed a little before
        self.close()
        if not has_ended or process.returncode >= 0:
            return f"exit code {process.returncode}" if has_ended else "it closed its files"
        name = signal.Signals(-process.returncode).name
        return f"killed by {name}" + (", as the system does that has no memory left" if name == "SIGKILL" else "")

    def _answers(self, connection: Connection, limit_s: float) -> bool:
        """Whether there is an answer in time.

        Raises InterruptedReward if the run is asked to stop meanwhile, EOFError if the process ends. A copy of it may
        hold the other end of the connection.
        """
        until = time.monotonic() + limit_s
        while True:
            left = max(until - time.monotonic(), 0.0)
            has_ended = self._has_ended()
            is_there = connection.poll(0 if has_ended else min(left, _LOOK_S))
            self._look()
            if has_ended and not is_there:
                raise EOFError
            if is_there or not left:
                return is_there

    def _has_ended(self) -> bool:
        """Whether the process has ended. It is not waited for, so that its number remains its own (`end_group`)."""
        assert self._process is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _look(self) -> None:
        """Raise InterruptedReward if the run is asked to stop; that is looked for every second at most."""
        if time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            if self._is_stopping():
                self.close()
                raise InterruptedReward

    def _told(self, prompt: str, count: int = 1) -> str:
        what = "a completion" if count == 1 else f"the {count} completions"
        return f"the reward {self.name} of {what} of {prompt[:_SHOWN]!r}"

    def _started(self) -> Connection:
        """The connection to the process, which is started if there is none."""
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        told = {
            "path": sys.path,
            "name": self.name,
            "socket": theirs.fileno(),
            "memory_bytes": int(self._memory_gib * (1 << 30)),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(told)],
                env=clean_environment(os.environ, self._environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        try:
            if not self._connection.poll(_START_S):
                raise DataError(f"the reward {self.name}: its file took longer than {_START_S:g} s to import")
            found = self._received(self._connection)
        except (EOFError, ConnectionResetError) as error:
            self.close()
            raise DataError(f"the reward {self.name}: its process has ended while it imported the file") from error
        except DataError:
            self.close()
            raise
        if found["problem"] is not None:
            self.close()
            raise DataError(f"the reward {self.name} cannot be used: {found['problem']}")
        if (form := found["value"]) is not None:
            self.form = TrlForm(tuple(form["names"]), tuple(form["required"]), form["takes_all"])
        return self._connection


def _is_answer(value: object) -> bool:
    """Whether it has the form of what is answered: a reward, those of several completions, or a function's form."""
    values = value if isinstance(value, list) else [value]
    return isinstance(value, dict) or all(isinstance(one, float | None) for one in values)
