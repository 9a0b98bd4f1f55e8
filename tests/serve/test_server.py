"""The server around a policy without a model: protocol, limits, bad clients, health under load, an orderly end."""

import contextlib
import resource
import socket
import ssl
import subprocess
import threading
import time
import types
import urllib.error
import urllib.request

import numpy as np
import pytest
from stub import StubPolicy, request, serving
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from openpi_train import cli
from openpi_train.policy import wire
from openpi_train.policy.policy import Policy
from openpi_train.policy.record import RequestRecorder, read_record
from openpi_train.runtime.exits import UsageError
from openpi_train.serve import main


@contextlib.contextmanager
def client(port, **options):
    """A connection that has read the metadata."""
    with connect(f"ws://127.0.0.1:{port}", compression=None, **options) as connection:
        assert wire.decode(connection.recv())["robot"] == "Stub"
        yield connection


def ask(connection, message):
    connection.send(wire.encode(message) if isinstance(message, dict) else message)
    answer = connection.recv(timeout=20)
    return answer if isinstance(answer, str) else wire.decode(answer)


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return response.status, response.read()


def test_a_conversation_as_openpis_client_has_it():
    with serving(StubPolicy()) as (port, _), client(port) as connection:
        first, second = ask(connection, request(1)), ask(connection, request(2))
    np.testing.assert_array_equal(first["actions"], np.float32([2, 2]))
    assert first["actions"].dtype == np.float32 and (first["draw"], second["draw"]) == (0, 1)
    assert first["policy_timing"]["infer_ms"] >= 0 and first["server_timing"]["infer_ms"] > 0
    assert "prev_total_ms" not in first["server_timing"] and second["server_timing"]["prev_total_ms"] > 0


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"prompt": "go"}, "lacks 'state'"),
        (b"\xc1", "not msgpack"),
        ("text", "bytes follow its end (is it text?)"),
        (wire.encode([1, 2]), "a request must be a map"),
        (wire.encode({"state": np.zeros(2)})[:-1], "not msgpack"),
    ],
)
def test_a_bad_request_is_answered_with_text_and_the_connection_goes_on(message, says):
    with serving(StubPolicy()) as (port, _), client(port) as connection:
        answer = ask(connection, message)
        assert isinstance(answer, str) and says in answer and "Traceback" not in answer
        assert ask(connection, request(3))["actions"][0] == 6


def test_actions_that_are_no_numbers_are_never_sent_to_a_robot():
    with serving(StubPolicy()) as (port, _), client(port) as connection:
        assert "NaN or infinity" in ask(connection, request(np.nan))
        assert ask(connection, request(1))["draw"] == 1


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    policy = object.__new__(Policy)
    object.__setattr__(policy, "sampler", types.SimpleNamespace(sizes=(1,), seed=0, num_steps=1, guidance=None))
    monkeypatch.setattr(Policy, "metadata", {})
    with contextlib.closing(RequestRecorder(tmp_path / "answers.rec", policy)) as recorder:
        yield recorder


def test_what_has_no_form_in_the_record_is_left_out_of_it_and_answered(recorder, tmp_path, monkeypatch):
    def write(observations, answers, write=recorder.write):
        write([{**one, "more": object()} if "more" in one else one for one in observations], answers)

    monkeypatch.setattr(recorder, "write", write)
    with serving(StubPolicy(), recorder=recorder) as (port, _), client(port) as connection:
        answer = ask(connection, request(1, more=1))
        assert not isinstance(answer, str), answer
        assert ask(connection, request(1))["draw"] == 1
    assert [batch["draws"] for batch in read_record(tmp_path / "answers.rec")[1]] == [[1]]


def test_robots_are_answered_when_the_records_disk_is_full_and_what_it_holds_is_whole(recorder, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with serving(StubPolicy(), recorder=recorder) as (port, _), client(port) as connection:
        ask(connection, request(0))
        room = (tmp_path / "answers.rec").stat().st_size + 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            draws = [ask(connection, request(0))["draw"] for _ in range(2)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert draws == [1, 2]
    assert [batch["draws"] for batch in read_record(tmp_path / "answers.rec")[1]] == [[0]]


@pytest.mark.parametrize("flag", ["--idle-s=nan", "--drain-s=-1", "--batch-wait-ms=inf"])
def test_times_that_are_none_are_refused(flag, capsys):
    assert cli.run(["serve", "nowhere", flag]) == 2
    assert "is not a valid time" in capsys.readouterr().err


def test_an_error_of_ours_shows_no_traceback_and_ends_the_connection():
    with serving(StubPolicy()) as (port, _), client(port) as connection:
        answer = ask(connection, request(1, bug=True))
        assert answer.startswith("internal error") and "secret" not in answer
        with pytest.raises(ConnectionClosedError) as closed:
            connection.recv(timeout=10)
        assert closed.value.rcvd.code == 1011
        with client(port) as other:
            assert ask(other, request(1))["actions"][0] == 2


@pytest.mark.slow
def test_a_client_of_bad_requests_alone_is_sent_away():
    with serving(StubPolicy()) as (port, _), client(port) as connection, pytest.raises(ConnectionClosedError) as closed:
        for _ in range(101):
            ask(connection, b"\xc1")
    assert closed.value.rcvd.code == 1008


def test_a_message_beyond_the_limit_closes_that_connection_alone():
    with serving(StubPolicy(), limits={"max_message_bytes": 1000}) as (port, _), client(port) as other:
        with client(port) as connection, pytest.raises(ConnectionClosedError) as closed:
            ask(connection, {"state": np.zeros(1000)})
        assert closed.value.rcvd.code == 1009
        assert ask(other, request(1))["actions"][0] == 2


def test_health_and_metrics_answer_while_a_request_runs():
    policy = StubPolicy()
    with serving(policy) as (port, _), client(port) as connection:
        policy.gate.clear()
        connection.send(wire.encode(request(1)))
        wait_for(lambda: policy.batches)
        assert get(port, "/healthz") == (200, b"OK\n")
        assert b"openpi_train_clients 1.0" in get(port, "/metrics")[1]
        policy.gate.set()
        assert wire.decode(connection.recv())["actions"][0] == 2
        text = get(port, "/metrics")[1].decode()
    assert 'openpi_train_requests_total{outcome="answered"} 1.0' in text
    assert "openpi_train_request_seconds_count 1.0" in text
    assert 'openpi_train_recent_seconds{of="request",quantile="0.95"}' in text


def test_other_paths_are_not_there():
    with serving(StubPolicy()) as (port, _), pytest.raises(urllib.error.HTTPError, match="404"):
        get(port, "/etc/passwd")


def test_clients_that_ask_together_are_answered_in_one_batch_each_with_its_own():
    policy = StubPolicy()
    with serving(policy, limits={"max_batch": 4}) as (port, _), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client(port)) for _ in range(6)]
        policy.gate.clear()
        for number, connection in enumerate(clients):
            connection.send(wire.encode(request(number)))
        wait_for(lambda: policy.batches)
        policy.gate.set()
        for number, connection in enumerate(clients):
            assert wire.decode(connection.recv())["actions"][0] == 2 * number
    assert sum(policy.batches) == 6 and policy.batches[0] > 1 and max(policy.batches) <= 4


def test_a_full_queue_is_told_at_once_and_the_others_are_answered():
    policy = StubPolicy()
    with serving(policy, limits={"max_batch": 1, "max_queue": 1}) as (port, _), contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(client(port)) for _ in range(3))
        policy.gate.clear()
        first.send(wire.encode(request(1)))
        wait_for(lambda: policy.batches)
        second.send(wire.encode(request(2)))
        wait_for(lambda: b"queue_requests 1.0" in get(port, "/metrics")[1])
        assert ask(third, request(3)).startswith("busy: 1 requests are waiting")
        policy.gate.set()
        assert [wire.decode(one.recv())["actions"][0] for one in (first, second)] == [2, 4]
        assert ask(third, request(3))["actions"][0] == 6


def test_more_clients_than_allowed_are_turned_away():
    with serving(StubPolicy(), limits={"max_clients": 1}) as (port, _), client(port) as connection:
        with pytest.raises(InvalidStatus, match="503"), client(port):
            pass
        assert ask(connection, request(1))["actions"][0] == 2


def test_only_who_has_the_key_comes_in():
    with serving(StubPolicy(), api_key="s3cret") as (port, _):
        for headers in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": "Bearer s3cret"}):
            with pytest.raises(InvalidStatus, match="401"), client(port, additional_headers=headers):
                pass
        with client(port, additional_headers={"Authorization": "Api-Key s3cret"}) as connection:
            assert ask(connection, request(1))["actions"][0] == 2
        assert get(port, "/healthz")[0] == 200


@pytest.mark.slow
def test_an_idle_client_and_half_a_handshake_are_closed_in_time():
    with serving(StubPolicy(), limits={"idle_s": 0.5}) as (port, _):
        with client(port) as connection, pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=10)
        assert closed.value.rcvd.code == 1001
    with serving(StubPolicy(), limits={"open_s": 0.5}) as (port, _):
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.settimeout(10)
            half.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
            while half.recv(1000):
                pass


@pytest.mark.slow
def test_half_a_message_does_not_hold_up_others_and_is_given_up():
    with serving(StubPolicy(), limits={"ping_s": 0.5}) as (port, _), client(port) as other:
        with client(port) as connection:
            connection.socket.sendall(b"\x82\xff" + (10_000).to_bytes(8, "big") + b"\0\0\0\0" + b"part")
            assert ask(other, request(1))["actions"][0] == 2
            with pytest.raises(ConnectionClosed):
                connection.recv(timeout=10)
        assert ask(other, request(1))["actions"][0] == 2


def test_a_stop_finishes_what_runs_and_takes_nothing_new():
    policy = StubPolicy()
    with serving(policy) as (port, stop), client(port) as busy, client(port) as idle:
        policy.gate.clear()
        busy.send(wire.encode(request(1)))
        wait_for(lambda: policy.batches)
        stop()
        with pytest.raises(ConnectionClosed):
            idle.recv(timeout=10)
        wait_for(lambda: refused(port))
        policy.gate.set()
        assert wire.decode(busy.recv(timeout=10))["actions"][0] == 2
        with pytest.raises(ConnectionClosed) as closed:
            busy.recv(timeout=10)
    assert closed.value.rcvd.code == 1001


def test_a_stop_does_not_wait_for_ever():
    policy = StubPolicy()
    with serving(policy, limits={"drain_s": 0.3}) as (port, stop), client(port) as connection:
        policy.gate.clear()
        connection.send(wire.encode(request(1)))
        wait_for(lambda: policy.batches)
        stop()
        assert connection.recv(timeout=10) == "the server is stopping"
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=10)
        policy.gate.set()


def test_tls(tmp_path):
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    with serving(StubPolicy(), tls=context) as (port, _):
        with connect(f"wss://127.0.0.1:{port}", ssl=trust, server_hostname="localhost") as connection:
            assert wire.decode(connection.recv())["robot"] == "Stub"
            assert ask(connection, request(1))["actions"][0] == 2


def test_many_threads_of_clients_get_their_own_answers():
    wrong = []

    def talk(port, number):
        with client(port) as connection:
            for step in range(20):
                value = 100 * number + step
                if ask(connection, request(value))["actions"][0] != 2 * value:
                    wrong.append(value)

    with serving(StubPolicy(0.001), limits={"batch_wait_s": 0.002}) as (port, _):
        threads = [threading.Thread(target=talk, args=(port, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert not wrong


def wait_for(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def refused(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except ConnectionRefusedError:
        return True
    return False


def test_of_two_servers_on_one_port_the_later_is_told():
    first = main._bind("127.0.0.1", 0)
    second = main._bind("127.0.0.1", first.getsockname()[1])
    with first, second:
        main._listen(first)
        with pytest.raises(UsageError, match="was taken by another program meanwhile"):
            main._listen(second)
