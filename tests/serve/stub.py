"""A policy without a model, and a server around it in a thread of this process."""

import asyncio
import contextlib
import itertools
import socket
import threading
import time

import numpy as np

from openpi_train.policy.observation import ObservationError
from openpi_train.serve.server import Limits, PolicyServer


class StubPolicy:
    """Answers the state doubled, after `seconds`; remembers how large its batches were. `gate` holds it up."""

    def __init__(self, seconds=0.0):
        self.metadata = {
            "observation": {"state": {"shape": [2], "dtype": "float32"}},
            "robot": "Stub",
            "action_names": ["x", "y"],
            "state_names": ["x", "y"],
            "history": 1,
            "action_horizon": 2,
            "num_executed": 1,
        }
        self.seconds, self.batches, self.draws = seconds, [], itertools.count()
        self.gate = threading.Event()
        self.gate.set()

    def prepare(self, observation):
        if "state" not in observation:
            raise ObservationError("the observation lacks 'state'")
        if observation.get("bug"):
            raise RuntimeError("secret of the server")
        return observation["state"]

    def answer(self, prepared, draws=None):
        self.batches.append(len(prepared))
        assert self.gate.wait(20)
        time.sleep(self.seconds)
        return [{"actions": 2 * state, "state": state, "draw": next(self.draws)} for state in prepared]


@contextlib.contextmanager
def serving(policy, *, tls=None, **options):
    """Yields the port and the server; stops it at the end, which must not take long."""
    limits = Limits(**{"batch_wait_s": 0.2, "drain_s": 5.0, "open_s": 30.0, **options.pop("limits", {})})
    listener = socket.create_server(("127.0.0.1", 0))
    started, found = threading.Event(), {}

    async def main():
        found["server"], found["loop"] = PolicyServer(policy, limits=limits, **options), asyncio.get_running_loop()
        object.__setattr__(policy, "loop", found["loop"])  # a policy may be frozen
        started.set()
        await found["server"].run(listener, tls)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(10)
    try:
        yield listener.getsockname()[1], lambda: found["loop"].call_soon_threadsafe(found["server"].stop)
    finally:
        with contextlib.suppress(RuntimeError):  # it has stopped already
            found["loop"].call_soon_threadsafe(found["server"].stop)
        thread.join(20)
        assert not thread.is_alive()


def request(value, **more):
    """A request's observation."""
    return {"state": np.full(2, value, np.float32), **more}
