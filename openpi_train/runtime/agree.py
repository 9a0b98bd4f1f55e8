"""Agreement between processes: barrier, broadcast, gather of small JSON values. Read next: `session.py`.

Everything goes through jax's coordination service, so it works without devices, files or a compiled program: each
process sets a key, all wait at a barrier, process 0 reads the keys of all at once and sets one key with what they hold,
and each reads that. Each call is named; all processes must make the same calls in the same order, from the main thread.
If processes are at different names, the call fails at once; if a process does not come, it names the missing ones after
the time-out. `tell` and `heard` are for other threads, which have no order.
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
from openpi_train.runtime.waiting import Wait, processes

# Enough to read one's share of a large model's checkpoint, on a slow file system.
DEFAULT_TIMEOUT_S = 1800.0
_SLICE_S = 2.0  # between looks whether to tell who is missing
# jax's own limit of a barrier must not expire first: it would fail for all, without saying who is missing.
_BARRIER_SLACK_S, _LONGEST_BARRIER_S = 600.0, 30 * 24 * 3600.0
_BARRIER = "openpi_train/agree"
_TOLD = "openpi_train/told/"

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


@phases.point()
def broadcast(name: str, value: object = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Return process 0's `value` on every process; values of the others are ignored.

    Each reads this one value, so that process 0 does not see whether the others are at another call; they do. Raises
    like `gather`.
    """
    process_index, process_count = _place()
    if process_count == 1:
        return json.loads(json.dumps(value))
    call = _meet(name, value if process_index == 0 else None, timeout_s)
    return _same_call(name, {0: _read(name, _key(call, 0), timeout_s)})[0]


@phases.point()
def gather(name: str, value: object, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
    """Return the values of all processes, by process index, on every process.

    Values are JSON: tuples come back as lists, keys of dictionaries as strings.

    Raises:
        PeerLostError: a process did not come within `timeout_s`, is at another call, or the service is gone.
    """
    if _place()[1] == 1:
        return [json.loads(json.dumps(value))]
    call = _meet(name, value, timeout_s)
    together = f"{_folder(call)}all"
    if _place()[0] > 0:
        everyone = _read(name, together, timeout_s)
    else:
        # One text for all: to parse a thousand keys would take each of a thousand processes longer than all else here.
        with _told(name):
            said = _said(call)
            text = f"[{', '.join(said[index] for index in sorted(said))}]"
            _client().key_value_set(together, text)
        everyone = json.loads(text)
    return _same_call(name, dict(enumerate(everyone)))


def tell(name: str, value: object) -> None:
    """Say `value` under a name of its own, for `heard` on other processes; from any thread, and without waiting."""
    if _place()[1] > 1:
        with _told(name):
            _client().key_value_set(f"{_TOLD}{name}", json.dumps(value))


def heard(name: str, timeout_s: float) -> Any:
    """What another process tells under this name; from any thread. Raises PeerLostError if it does not in time."""
    with _told(name):
        return json.loads(_client().blocking_key_value_get(f"{_TOLD}{name}", int(1000 * timeout_s)))


def forget(name: str) -> None:
    """Delete what was told under this name, and under those that it is the folder of."""
    if _place()[1] > 1:
        with _told(name):
            _client().key_value_delete(f"{_TOLD}{name}")


def _meet(name: str, value: object, timeout_s: float) -> int:
    """Say `value`, and return the number of this call once all processes have said theirs."""
    global _calls_made
    assert threading.current_thread() is threading.main_thread(), "agreement is for the main thread only"
    process_index, _ = _place()
    call = _calls_made
    _calls_made += 1
    with _told(name):
        _client().key_value_set(_key(call, process_index), json.dumps({"name": name, "value": value}))
    _await_all(name, call, timeout_s)
    if process_index == 0 and call > 0:  # all have left the last call, so nobody reads what was said there
        with _told(name):
            _client().key_value_delete(_folder(call - 1))
    return call


def _await_all(name: str, call: int, timeout_s: float) -> None:
    """Wait at a barrier, in a thread of its own: Python handles signals only between calls into the service."""
    client, wait, errors = _client(), Wait(timeout_s), []
    limit_s = min(timeout_s + _BARRIER_SLACK_S, _LONGEST_BARRIER_S)

    def arrive() -> None:
        try:
            client.wait_at_barrier(_BARRIER, int(1000 * limit_s))
        except Exception as error:
            errors.append(error)

    arrival = threading.Thread(target=arrive, name="barrier", daemon=True)
    arrival.start()
    while True:
        arrival.join(min(_SLICE_S, wait.remaining_s()))
        if not arrival.is_alive():
            break
        if wait.is_over():
            raise PeerLostError(f"{_missing(call)} did not reach {name!r} within {timeout_s:g} s")
        wait.report(lambda: f"waiting at {name!r} for {_missing(call)}")
    with _told(name):
        for error in errors:
            raise error


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Errors of the service as PeerLostErrors."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> PeerLostError:
    where = f"process 0 on {_hosts[0]}" if _hosts else "process 0"
    return PeerLostError(f"the coordination service of {where} failed at {name!r}: {brief(error)}")


def _said(call: int) -> dict[int, str]:
    """What each process has said at a call, by its index."""
    found = [(key.rpartition("/")[2], said) for key, said in _client().key_value_dir_get(_folder(call))]
    return {int(index): said for index, said in found if index.isdecimal()}


def _read(name: str, key: str, timeout_s: float) -> Any:
    """The value of a key that process 0 sets at once. Python carries it there (`tunnel.py`), and may be in C code for
    some seconds."""
    wait = Wait(timeout_s)
    while True:
        try:
            return json.loads(_client().blocking_key_value_get(key, int(1000 * _SLICE_S)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or wait.is_over():
                raise _failed(name, error) from error
        wait.report(lambda: f"waiting at {name!r} for what process 0 says")


def _same_call(name: str, messages: dict[int, Any]) -> list[Any]:
    """What processes passed to this call, by what they have said."""
    for index, message in messages.items():
        if message["name"] != name:
            raise PeerLostError(
                f"the processes have gone different ways: this one is at {name!r}, process {index} at "
                f"{message['name']!r}"
            )
    return [message["value"] for message in messages.values()]


def _missing(call: int) -> str:
    present = _said(call)
    missing = [index for index in range(_place()[1]) if index not in present]
    if not missing:  # it has come since
        return "what another process says"
    on: dict[str, list[int]] = {}
    for index in missing:
        on.setdefault(f" on {_hosts[index]}" if _hosts else "", []).append(index)
    return ", ".join(f"{processes(there)}{host}" for host, there in on.items())


def _client() -> Any:
    return distributed.global_state.client


def _folder(call: int) -> str:
    return f"openpi_train/agree/{call}/"


def _key(call: int, index: int) -> str:
    return f"{_folder(call)}{index}"


def process_index() -> int:
    """This process's index in the run; 0 before the run has met. Starts no devices, as jax's own would."""
    return _place()[0]


def process_count() -> int:
    """The number of the run's processes; 1 before the run has met."""
    return _place()[1]


def _place() -> tuple[int, int]:
    state = distributed.global_state
    if state.client is None:  # jax was not started as part of a run: a test or a tool, alone
        return 0, 1
    return state.process_id, state.num_processes
