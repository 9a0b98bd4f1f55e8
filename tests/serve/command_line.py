"""`serve` as its command line starts it, in this process: the real parser, the real `run`, real sockets and signals.

The policy is without a model, unless a test loads a real one. Signals reach the main thread, so the server runs in the
test's own thread and `talk` in another.
"""

import concurrent.futures
import dataclasses
import logging
import os
import re
import signal
import threading
import time
import types
import urllib.request
from typing import Any

import pytest
from stub import StubPolicy
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from openpi_train import cli
from openpi_train.policy import record, wire
from openpi_train.policy.policy import Policy
from openpi_train.serve import main, server
from openpi_train.serve.request import API_KEY_VARIABLE


class LoadedStub(StubPolicy, Policy):
    """In place of what `load_policy` loads: `options` are what it was given. An answer is 2 state + seed + draw."""

    metadata: Any = None

    def __init__(self, directory, **options):
        super().__init__()
        self.options = options
        seed, num_steps = options["seed"], options["num_sample_steps"]
        sampler = types.SimpleNamespace(
            sizes=tuple(options["batch_sizes"]),
            seed=42 if seed is None else seed,
            num_steps=10 if num_steps is None else num_steps,
            guidance=options.get("guidance"),
        )
        object.__setattr__(self, "sampler", sampler)  # fields of a frozen dataclass
        object.__setattr__(self, "checkpoint", directory)

    def answer(self, prepared, draws=None):
        answers = super().answer(prepared)
        for answer, draw in zip(answers, draws or [one["draw"] for one in answers], strict=True):
            answer |= {"actions": answer["actions"] + self.sampler.seed + draw, "draw": draw}
        return answers

    def replay(self, path):
        return record.replay(self, path)

    def warm_up(self, *, prefixes=None):
        self.options["prefixes"] = prefixes


@dataclasses.dataclass
class Started:
    """A server that let clients in: where it says it is, its policy and its limits, and what it logged so far."""

    scheme: str
    host: str
    port: int
    policy: Any
    limits: server.Limits
    log: list[str]
    stopped: bool = False

    def connect(self, key=None, host=None, **options):
        """A connection, by `with`; its first message is the metadata."""
        headers = {} if key is None else {"Authorization": f"Api-Key {key}"}
        url = f"{self.scheme}://{host or self.host}:{self.port}"
        return connect(url, compression=None, additional_headers=headers, open_timeout=10, **options)

    def stop(self):
        """What a supervisor does."""
        if not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGTERM)


@dataclasses.dataclass
class Ended:
    """A server that ended: its exit code, what it logged, and what `talk` returned."""

    code: int
    log: list[str]
    talked: Any


def ask(connection, message):
    """The answer to a request: a dictionary, or the text of what is wrong."""
    connection.send(wire.encode(message) if isinstance(message, dict) else message)
    return answer(connection)


def answer(connection):
    received = connection.recv(timeout=10)
    return received if isinstance(received, str) else wire.decode(received)


def metrics(server):
    """What `/metrics` says."""
    with urllib.request.urlopen(f"http://{server.host}:{server.port}/metrics", timeout=10) as response:
        return response.read().decode()


def admitted(server, key=None, **options):
    """Whether a client with this key is let in."""
    try:
        with server.connect(key, **options) as connection:
            return wire.decode(connection.recv(timeout=10))["robot"] == "Stub"
    except InvalidStatus as refused:
        assert refused.response.status_code == 401
        return False


def wait_for(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what is waited for did not come"
        time.sleep(0.01)


def serve(*words, talk=lambda server: None, load=LoadedStub, key=None):
    """Run `serve` with this command line, `key` in the environment, until `talk(server)` is over; returns `Ended`."""
    log, policies, limits, over = [], [], [], threading.Event()
    handler = logging.Handler()
    handler.emit = lambda line: log.append(line.getMessage())
    logger = logging.getLogger("openpi_train.serve")

    def loaded(*given, **options):
        policies.append(load(*given, **options))
        return policies[-1]

    class Remembered(server.Limits):
        def __init__(self, **fields):
            super().__init__(**fields)
            limits.append(self)

    def conversation():
        said = re.compile(r"ready after .* s of compiling: .* on (wss?|https?)://(.*):(\d+), ")
        started = None
        try:
            wait_for(lambda: over.is_set() or any(map(said.search, log)), seconds=60)
            found = next(filter(None, map(said.search, log)), None)
            if found is None:  # it ended before
                return None
            own = (*(policies or [None]), *(limits or [None]))  # none of a language model
            started = Started(found[1], found[2], int(found[3]), *own, log)
            return talk(started)
        finally:
            for policy in policies:
                if isinstance(policy, StubPolicy):
                    policy.gate.set()
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT) if started is None else started.stop()

    def end(code):
        raise SystemExit(code)

    with pytest.MonkeyPatch.context() as patch, concurrent.futures.ThreadPoolExecutor(1) as thread:
        patch.setattr(main, "load_policy", loaded)
        patch.setattr(main, "_start", lambda: None)  # this process's log and cache are the suite's
        patch.setattr(main, "end", end)
        patch.setattr(server, "Limits", Remembered)
        patch.setattr(logger, "handlers", [*logger.handlers, handler])
        patch.setattr(logger, "level", logging.INFO)
        logger.manager._clear_cache()
        patch.delenv(API_KEY_VARIABLE, raising=False)
        if key is not None:
            patch.setenv(API_KEY_VARIABLE, key)
        talking = thread.submit(conversation)
        try:
            code = cli.run(["serve", *map(str, words)])
        except SystemExit as ending:
            code = ending.code
        finally:
            over.set()
        return Ended(code, log, talking.result())
