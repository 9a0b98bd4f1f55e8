"""Agreement between processes: barrier, broadcast, gather of small JSON values. Read next: `session.py`.

Everything goes through jax's coordination service, so it works without devices, files or a compiled program. Each call
is named; all processes must make the same calls in the same order, from the main thread. If processes are at
different names, the call fails at once; if a process does not come, it names the missing ones after the time-out.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name yet (jax 0.10 to 0.12)

from openpi_train.runtime import phases
from openpi_train.runtime.exits import PeerLostError, brief
from openpi_train.runtime.waiting import Wait

# Enough for process 0 to read a checkpoint of a large model back for its checksums, on a slow file system.
DEFAULT_TIMEOUT_S = 1800.0
_SLICE_MS = 2000  # Python handles signals only between calls into the service

_calls_made = 0
_hosts: list[str] = []


def name_hosts(hosts: list[str]) -> None:
    """Set the host of each process, by process index, for messages."""
    _hosts[:] = hosts


def barrier(name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Return once every process has called `barrier(name)`. Raises like `gather`."""
    gather(name, None, timeout_s)


@contextlib.contextmanager
def process_0_first(what: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[None]:
    """Run a block on process 0 first, then on the others, which can use what it made. Every process must call it."""
    is_first = _place()[0] == 0
    if not is_first:
        barrier(f"process 0 {what}", timeout_s)
    yield
    if is_first:
        barrier(f"process 0 {what}", timeout_s)


def broadcast(name: str, value: Any = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Return process 0's `value` on every process; values of the others are ignored. Raises like `gather`."""
    return gather(name, value if _place()[0] == 0 else None, timeout_s)[0]


@phases.point()
def gather(name: str, value: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
    """Return the values of all processes, by process index, on every process.

    Values are JSON: tuples come back as lists, keys of dictionaries as strings.

    Raises:
        PeerLostError: a process did not come within `timeout_s`, is at another call, or the service is gone.
    """
    global _calls_made
    process_index, process_count = _place()
    if process_count == 1:
        return [json.loads(json.dumps(value))]
    assert threading.current_thread() is threading.main_thread(), "agreement is for the main thread only"
    client: Any = distributed.global_state.client
    call = _calls_made
    _calls_made += 1
    client.key_value_set(_key(call, process_index), json.dumps({"name": name, "value": value}))
    if call >= 2:
        # A process in this call has left the last one, so all have entered that one, and none reads the one before.
        client.key_value_delete(_key(call - 2, process_index))
    wait = Wait(timeout_s)
    return [_value_of(client, name, call, index, process_count, wait) for index in range(process_count)]


def _value_of(client: Any, name: str, call: int, index: int, process_count: int, wait: Wait) -> Any:
    """What process `index` passed to this call."""
    while True:
        slice_ms = max(1, min(_SLICE_MS, int(1000 * wait.remaining_s())))
        try:
            message = json.loads(client.blocking_key_value_get(_key(call, index), slice_ms))
            break
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise PeerLostError(f"the coordination service failed at {name!r}: {brief(error)}") from error
        if wait.is_over():
            missing = _missing(client, call, process_count)
            raise PeerLostError(f"{missing} did not reach {name!r} within {wait.timeout_s:g} s")
        wait.report(lambda: f"waiting at {name!r} for {_missing(client, call, process_count)}")
    if message["name"] != name:
        raise PeerLostError(
            f"the processes have gone different ways: this one is at {name!r}, process {index} at {message['name']!r}"
        )
    return message["value"]


def _missing(client: Any, call: int, process_count: int) -> str:
    present = {key.rpartition("/")[2] for key, _ in client.key_value_dir_get(_key(call, ""))}
    missing = [index for index in range(process_count) if str(index) not in present]
    if not missing:  # it has come since
        return "what another process says"
    names = [f"{index} on {_hosts[index]}" if _hosts else str(index) for index in missing]
    return f"process{'es' if len(missing) > 1 else ''} {', '.join(names)}"


def _key(call: int, index: int | str) -> str:
    return f"openpi_train/agree/{call}/{index}"


def _place() -> tuple[int, int]:
    state = distributed.global_state
    if state.client is None:  # jax was not started as part of a run: a test or a tool, alone
        return 0, 1
    return state.process_id, state.num_processes
