"""Carried connections of jax's clients: bytes as they were said, ends that close together, files that vanish."""

import contextlib
import ctypes
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from openpi_train.runtime import tunnel
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.tunnel import Tunnels, private_socket


@pytest.fixture
def tunnels():
    """Those of process 0, with a service that listens at `path`."""
    made = Tunnels()
    with private_socket() as path, made.starting(path):
        yield made
        made.close()


def ends(stack: contextlib.ExitStack) -> list[socket.socket]:
    pair = socket.socketpair()
    for one in pair:
        one.settimeout(60)
    stack.enter_context(pair[0])
    return list(pair)


def heard(connection: socket.socket) -> bytes:
    """All that is said there until the other end closes."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_megabytes_pass_unaltered_in_both_directions_at_once(tunnels):
    said = [random.Random(seed).randbytes(3_000_000) for seed in range(2)]
    with contextlib.ExitStack() as stack:
        (client, near), (service, far) = ends(stack), ends(stack)
        tunnels.carry(near, far, b"already read, ")
        found: dict[str, bytearray] = {"client": bytearray(), "service": bytearray()}

        def read(name: str, connection: socket.socket, count: int) -> None:
            while len(found[name]) < count:
                found[name] += connection.recv(1 << 16)

        readers = [
            threading.Thread(target=read, args=("client", client, 3_000_000)),
            threading.Thread(target=read, args=("service", service, 3_000_014)),
        ]
        writers = [
            threading.Thread(target=client.sendall, args=(said[0],)),
            threading.Thread(target=service.sendall, args=(said[1],)),
        ]
        for thread in readers + writers:
            thread.start()
        for thread in readers + writers:
            thread.join(60)
    assert bytes(found["service"]) == b"already read, " + said[0] and bytes(found["client"]) == said[1]


@pytest.mark.parametrize("first", ["client", "service"])
def test_an_end_that_closes_closes_the_other_after_its_last_words(tunnels, first):
    with contextlib.ExitStack() as stack:
        (client, near), (service, far) = ends(stack), ends(stack)
        tunnels.carry(near, far, b"")
        leaves, stays = (client, service) if first == "client" else (service, client)
        threading.Thread(target=lambda: (leaves.sendall(b"x" * 1_000_000), leaves.shutdown(socket.SHUT_WR))).start()
        assert len(heard(stays)) == 1_000_000
        assert heard(leaves) == b"", "nobody is left to say anything"


def test_an_end_that_nobody_reads_stops_the_other_and_fills_no_memory(tunnels):
    with contextlib.ExitStack() as stack:
        (client, near), (_, far) = ends(stack), ends(stack)
        tunnels.carry(near, far, b"")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.sendall(b"x" * 20_000_000)


ROUND_TRIP = """
import socket, sys, time
one, other = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
other.settimeout(60)
input()
time.sleep(0.3)
began = time.monotonic()
one.sendall(b"x")
other.recv(1)
print(time.monotonic() - began)
"""


def test_a_call_that_keeps_pythons_lock_stops_nothing_that_is_carried(tunnels):
    """jax's wait for a common step before a stop does, for what other processes say."""
    with contextlib.ExitStack() as stack:
        (client, near), (service, far) = ends(stack), ends(stack)
        tunnels.carry(near, far, b"")
        numbers = [client.fileno(), service.fileno()]
        command = [sys.executable, "-c", ROUND_TRIP, *map(str, numbers)]
        with subprocess.Popen(
            command, pass_fds=numbers, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdin and other.stdout
            other.stdin.write("\n")
            other.stdin.flush()
            ctypes.PyDLL(None).usleep(2_500_000)  # keeps the lock
            assert float(other.stdout.read()) < 1.5


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="Linux tells a process's variables")
def test_the_carrier_finds_pythons_libraries_and_is_no_training_process(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere/lib")
    monkeypatch.setenv("RANK", "1")
    tunnels = Tunnels()
    with private_socket() as path, tunnels.starting(path):
        assert tunnels._carrier is not None
        with open(f"/proc/{tunnels._carrier.pid}/environ", "rb") as file:
            names = {word.partition(b"=")[0] for word in file.read().split(b"\0")}
        tunnels.close()
    assert b"LD_LIBRARY_PATH" in names and b"RANK" not in names


def test_process_zero_hands_on_the_last_words_of_its_service_before_it_leaves():
    tunnels = Tunnels()
    with contextlib.ExitStack() as stack:
        stack.enter_context(tunnels.starting(stack.enter_context(private_socket())))
        (client, near), (service, far) = ends(stack), ends(stack)
        tunnels.carry(near, far, b"")
        threading.Timer(0.2, lambda: (service.sendall(b"y" * 1_000_000), service.close())).start()
        reader = threading.Thread(target=lambda: found.append(heard(client)))
        found: list[bytes] = []
        reader.start()
        tunnels.close()
        reader.join(60)
        assert found == [b"y" * 1_000_000]


def test_callers_before_the_service_listens_wait_without_calling_it_one_by_one(monkeypatch):
    """A thousand that did so kept process 0 from starting jax."""
    tunnels, calls = Tunnels(), []
    call = Tunnels._call_service
    monkeypatch.setattr(Tunnels, "_call_service", lambda of: calls.append(threading.current_thread().name) or call(of))
    with contextlib.ExitStack() as stack:
        callers = [ends(stack) for _ in range(20)]
        waiting = [threading.Thread(target=tunnels.into_service, args=(near, b"I am ")) for _, near in callers]
        for thread in waiting:
            thread.start()
        path = stack.enter_context(private_socket())
        stack.enter_context(tunnels.starting(path))
        time.sleep(0.3)
        assert set(calls) == {"jax's service"}
        service = stack.enter_context(socket.socket(socket.AF_UNIX))
        service.bind(str(path))
        service.listen(64)
        for number, ((client, _), thread) in enumerate(zip(callers, waiting, strict=True)):
            thread.join(60)
            client.sendall(f"caller {number}".encode())
            client.shutdown(socket.SHUT_WR)
        said = set()
        while len(said) < 20:
            with service.accept()[0] as connection:
                connection.settimeout(60)
                said |= {heard(connection)} - {b""}  # b"": whether it listens
        assert said == {f"I am caller {number}".encode() for number in range(20)}
        tunnels.close()


def test_a_service_that_never_listens_is_looked_for_no_longer_than_jax_starts():
    tunnels = Tunnels()
    with private_socket() as path, tunnels.starting(path):
        (looking,) = (thread for thread in threading.enumerate() if thread.name == "jax's service")
    looking.join(60)
    assert not looking.is_alive()
    tunnels.close()


def test_a_client_is_carried_to_the_connection_that_the_door_has_let_in():
    with contextlib.ExitStack() as stack:
        zero, here = ends(stack)
        tunnels = Tunnels(lambda: (here, b"settings "))
        path = stack.enter_context(private_socket())
        with tunnels.starting(path), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(str(path))
            client.sendall(b"call")
            assert zero.recv(4) == b"call" and client.recv(9) == b"settings "
        with socket.socket(socket.AF_UNIX) as late, pytest.raises(OSError, match="refused"):
            late.connect(str(path))
        tunnels.close()


def test_the_socket_is_in_a_folder_of_the_user_alone_that_vanishes():
    with private_socket() as path:
        folder = path.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(str(path))
    assert not folder.exists()


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tunnel.tempfile, "gettempdir", lambda: str(tmp_path))
    code = f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}\nfrom openpi_train.runtime.tunnel import *\n"
    code += "with private_socket() as path: path.touch(); os.kill(os.getpid(), 9)"
    with private_socket() as first:
        subprocess.run([sys.executable, "-c", code], check=False)
        assert len(list(tmp_path.iterdir())) == 2
        with private_socket() as second:
            assert set(tmp_path.iterdir()) == {first.parent, second.parent}


def test_a_folder_whose_path_is_too_long_is_replaced_and_none_at_all_named(tmp_path, monkeypatch):
    (deep := tmp_path / ("d" * 100)).mkdir()
    monkeypatch.setattr(tunnel.tempfile, "gettempdir", lambda: str(deep))
    with private_socket() as path:
        assert deep not in path.parents and len(str(path)) < 60
    assert list(deep.iterdir()) == []
    monkeypatch.setattr(tunnel.tempfile, "mkdtemp", no_space)
    with (
        pytest.raises(UsageError, match=r"can hold a Unix socket.*No space left on device.*set TMPDIR"),
        private_socket(),
    ):
        pass


def no_space(**_):
    raise OSError(28, os.strerror(28))
