"""Every way in which processes can fail to meet has its own message, on every process."""

import contextlib
import dataclasses
import logging
import re
import socket
import threading
import time

import pytest
from rendezvous_caller import admitted, heard

from openpi_train.runtime import job_token, waiting
from openpi_train.runtime.exits import PeerLostError, RunError, UsageError
from openpi_train.runtime.handshake import Signing
from openpi_train.runtime.job_token import TokenFile
from openpi_train.runtime.peer import Peer
from openpi_train.runtime.rendezvous import meet
from openpi_train.runtime.rendezvous_server import Guest, Hello, _unreachable_names
from openpi_train.runtime.world import World

FACTS = {"experiment": "abc"}


def world_of(port, index, count, *, token="", host="127.0.0.1"):
    return World(
        process_index=index,
        process_count=count,
        local_index=index,
        local_count=None,
        coordinator=f"{host}:{port}",
        source="flags",
        token=token,
        token_is_secret=bool(token),
    )


def meet_all(*worlds, facts=None, timeout_s=240.0, shared_folder=None):
    """What `meet` raised for each world, None where it returned; all at once, in threads."""
    results: list[RunError | None] = [None] * len(worlds)

    def one(position, world):
        try:
            meet(world, (facts or {}).get(position, FACTS), timeout_s=timeout_s, shared_folder=shared_folder)
        except RunError as error:
            results[position] = error

    threads = [threading.Thread(target=one, args=item) for item in enumerate(worlds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def reach(port) -> socket.socket:
    """A connection to the server, once it is there."""
    deadline = time.monotonic() + 240
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def say(port, data: bytes) -> bytes:
    """What the server answers to whoever says `data` and then leaves."""
    with reach(port) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096)


def test_four_processes_that_agree_meet(free_port):
    assert meet_all(*(world_of(free_port, index, 4) for index in range(4))) == [None] * 4


@pytest.mark.slow
def test_a_missing_process_is_named_and_so_are_those_present(free_port):
    errors = meet_all(world_of(free_port, 0, 4), world_of(free_port, 2, 4), timeout_s=3.0)
    assert all(isinstance(error, PeerLostError) for error in errors)
    host = socket.gethostname()
    assert (
        str(errors[0])
        == str(errors[1])
        == (
            f"waiting for 2 of 4 processes (here: process 0 on {host}, process 2 on {host}): "
            "processes 1, 3, which never came within 3 s"
        )
    )


@pytest.mark.slow
def test_of_many_present_a_few_are_named_and_the_others_counted(free_port):
    error, *_ = meet_all(*(world_of(free_port, index, 12) for index in range(10)), timeout_s=3.0)
    here = ", ".join(f"process {index} on {socket.gethostname()}" for index in range(7))
    assert f"waiting for 2 of 12 processes (here: {here}, 3 more): processes 10, 11, which" in str(error)


@pytest.mark.slow
def test_missing_hosts_are_named_where_the_launcher_knows_them(free_port):
    world = dataclasses.replace(world_of(free_port, 0, 6), hosts=("node1", "node2", "node3"))
    (error,) = meet_all(world, timeout_s=1.0)
    assert ": node1 (process 1), node2 (processes 2, 3), node3 (processes 4, 5), which never came within 1 s" in str(
        error
    )


@pytest.mark.slow
def test_a_missing_process_zero_is_named_with_what_to_check(free_port):
    (error,) = meet_all(world_of(free_port, 1, 2), timeout_s=1.0)
    assert isinstance(error, PeerLostError)
    assert f"could not reach process 0 at 127.0.0.1, port {free_port} within 1 s" in str(error)
    assert "firewall" in str(error)


def test_a_busy_port_is_named(free_port):
    with socket.create_server(("127.0.0.1", free_port), reuse_port=True):
        (error,) = meet_all(world_of(free_port, 0, 2))
    assert isinstance(error, UsageError)
    assert f"port {free_port} on" in str(error) and "give another port" in str(error)


def test_different_world_sizes_are_named_on_both_sides(free_port):
    errors = meet_all(world_of(free_port, 0, 2), world_of(free_port, 1, 3))
    for error in errors:
        assert isinstance(error, UsageError)
        assert "was started for 2 processes and process 1 on" in str(error) and "for 3: give" in str(error)


def test_an_id_given_twice_is_named(free_port):
    errors = meet_all(world_of(free_port, 0, 3), world_of(free_port, 1, 3), world_of(free_port, 1, 3))
    for error in errors:
        assert isinstance(error, UsageError) and "process id 1 was given twice" in str(error)


def test_a_second_process_zero_elsewhere_is_named(free_port):
    hello = Hello(process_index=0, process_count=2, host="elsewhere", facts=FACTS)
    verdicts = []

    def come():
        with reach(free_port) as connection:
            nonces = admitted(connection, dataclasses.asdict(hello), "ours")
            verdicts.append(heard(connection, "ours", nonces))

    guest = threading.Thread(target=come)
    guest.start()
    (error,) = meet_all(world_of(free_port, 0, 2, token="ours"))
    guest.join()
    assert "process id 0 was given twice" in str(error) and "elsewhere" in str(error)
    assert verdicts[0]["error"] == str(error)


def test_different_code_or_configuration_is_named_with_both_values(free_port):
    other = {"experiment": "xyz", "extra": "1"}
    errors = meet_all(world_of(free_port, 0, 2), world_of(free_port, 1, 2), facts={1: other})
    for error in errors:
        assert isinstance(error, UsageError)
        assert "experiment is abc there and xyz here; extra is absent there and 1 here" in str(error)


def test_a_host_name_that_does_not_resolve_is_named(free_port):
    (error,) = meet_all(world_of(free_port, 1, 2, host="no-such-host.invalid"))
    assert isinstance(error, UsageError) and "'no-such-host.invalid' does not resolve" in str(error)


def test_garbage_on_the_port_is_survived(free_port, caplog):
    garbage = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xfe", b"[]\n", b'{"process_index": "1"}\n', b"")
    strangers = [threading.Thread(target=say, args=(free_port, data)) for data in garbage]
    for stranger in strangers:
        stranger.start()

    def come_late(results):
        for stranger in strangers:
            stranger.join()
        results.extend(meet_all(world_of(free_port, 1, 2)))

    late: list = []
    thread = threading.Thread(target=come_late, args=(late,))
    thread.start()
    assert meet_all(world_of(free_port, 0, 2)) == [None]
    thread.join()
    assert late == [None]
    assert sum("ignored a stranger" in record.message for record in caplog.records) == len(garbage)


def test_a_process_of_another_job_is_turned_away_and_the_run_starts(free_port):
    first: list = []
    zero = threading.Thread(target=lambda: first.extend(meet_all(world_of(free_port, 0, 2, token="ours"))))
    zero.start()
    (error,) = meet_all(world_of(free_port, 1, 2, token="theirs"))
    assert "is another job" in str(error)
    assert meet_all(world_of(free_port, 1, 2, token="ours")) == [None]
    zero.join()
    assert first == [None]


def test_a_stray_process_is_turned_away_after_the_start(free_port):
    assert meet_all(world_of(free_port, 0, 2), world_of(free_port, 1, 2)) == [None, None]
    (error,) = meet_all(world_of(free_port, 1, 2))
    assert isinstance(error, UsageError) and "has started already with all its processes" in str(error)


def test_a_process_that_leaves_and_comes_again_is_no_duplicate(free_port, caplog):
    hello = Hello(process_index=1, process_count=3, host="here", facts=FACTS)
    first: list = []
    zero = threading.Thread(target=lambda: first.extend(meet_all(world_of(free_port, 0, 3))))
    zero.start()
    with reach(free_port) as connection:
        admitted(connection, dataclasses.asdict(hello), "")
    deadline = time.monotonic() + 240
    while not any("left before all had come" in record.message for record in caplog.records):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert meet_all(world_of(free_port, 1, 3), world_of(free_port, 2, 3)) == [None, None]
    zero.join()
    assert first == [None]


@pytest.mark.slow
def test_waits_say_what_they_wait_for(free_port, caplog, monkeypatch):
    monkeypatch.setattr(waiting, "REPORT_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)
    meet_all(world_of(free_port, 0, 3), world_of(free_port, 1, 3), timeout_s=3.0)
    messages = [record.message for record in caplog.records]
    assert any("waiting for 1 of 3 processes" in text and "process 2 missing since" in text for text in messages)
    assert any("is connected and waits until all 3 processes are here" in text for text in messages)


def test_gloo_on_a_loopback_host_name_is_refused_across_hosts():
    own = Hello(process_index=0, process_count=2, host="a", facts={}, local_name_is_loopback=True)
    hello = Hello(process_index=1, process_count=2, host="b", facts={})
    with socket.socket() as connection:
        signing = Signing(token="", side="process 0", nonces=("", ""))
        fields = {"hello": hello, "peer": Peer(1, "b", connection), "connection": connection, "signing": signing}
        near, far = Guest(**fields, same_machine=True), Guest(**fields, same_machine=False)
        assert _unreachable_names(own, [near]) is None
        assert "host name of a resolves to a loopback address" in (_unreachable_names(own, [near, far]) or "")


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", UsageError, "another program answers"),
        (b'{"nonce": "1", "token_file": "../../etc/passwd", "started": false}\n', UsageError, "is no name of a file"),
        (b"", PeerLostError, "closed the rendezvous without a word"),
    ],
)
def test_a_coordinator_that_is_none_of_ours_is_recognised(free_port, reply, kind, message, tmp_path):
    server = socket.create_server(("127.0.0.1", free_port))

    def answer():
        with contextlib.suppress(OSError):  # until it is shut down
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    (error,) = meet_all(world_of(free_port, 1, 2), timeout_s=0.5, shared_folder=tmp_path)
    server.shutdown(socket.SHUT_RDWR)
    thread.join()
    server.close()
    assert isinstance(error, kind) and re.search(message, str(error))


def test_without_a_launcher_process_zero_shares_a_secret_in_the_runs_folder(free_port, tmp_path, monkeypatch, caplog):
    written, write = [], TokenFile.write
    monkeypatch.setattr(TokenFile, "write", lambda folder: written.append(write(folder)) or written[-1])
    folder = tmp_path / "runs"
    assert meet_all(*(world_of(free_port, index, 3) for index in range(3)), shared_folder=folder) == [None] * 3
    assert len(written[0].token) == 32 and not folder.exists(), "it is gone after the meeting"
    assert "share no secret" not in caplog.text


def test_a_process_that_sees_another_folder_is_told_so_and_ends_no_start(free_port, tmp_path, monkeypatch):
    monkeypatch.setattr(job_token, "_LIMIT_S", 0.2)
    results: list = []
    zero = threading.Thread(
        target=lambda: results.extend(meet_all(world_of(free_port, 0, 2), shared_folder=tmp_path / "here"))
    )
    zero.start()
    reach(free_port).close()
    (error,) = meet_all(world_of(free_port, 1, 2), shared_folder=tmp_path / "there")
    assert isinstance(error, UsageError) and "the same --checkpoint-base-dir" in str(error)
    (error,) = meet_all(world_of(free_port, 1, 2))  # without any: a stranger
    assert "is another job" in str(error)
    assert meet_all(world_of(free_port, 1, 2), shared_folder=tmp_path / "here") == [None]
    zero.join()
    assert results == [None]


@pytest.mark.parametrize("folder", [None, "a file"])
def test_a_start_without_a_secret_says_so_once(folder, free_port, tmp_path, caplog):
    (tmp_path / "a file").touch()
    folder = folder and tmp_path / folder
    assert meet_all(world_of(free_port, 0, 2), world_of(free_port, 1, 2), shared_folder=folder) == [None, None]
    (told,) = [record.message for record in caplog.records if "share no secret" in record.message]
    assert f"whoever reaches port {free_port} can end this run" in told


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([5], "process 5"),
        ([2, 1], "processes 1, 2"),
        ([7, 1, 2, 3], "processes 1-3, 7"),
        (range(1, 1024), "processes 1-1023"),
    ],
)
def test_many_processes_are_named_in_few_words(indices, text):
    assert waiting.processes(indices) == text
