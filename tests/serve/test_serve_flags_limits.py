"""The limits of `serve`: the flag's number is the most that a client meets at the socket, and one more is refused."""

import contextlib

import numpy as np
import pytest
from command_line import admitted, answer, ask, metrics, serve, wait_for
from stub import request
from websockets.exceptions import ConnectionClosed, InvalidStatus

from openpi_train.policy import wire
from openpi_train.serve.server import Limits


def sends(connection, value):
    """Send a request whose answer is read later."""
    connection.send(wire.encode(request(value)))


def test_limits_are_those_of_the_flags_in_the_units_of_their_names():
    given = "--max-batch=3 --batch-wait-ms=7 --max-queue=5 --max-clients=6 --max-message-mib=2 --idle-s=11 --drain-s=13"
    expected = {"max_batch": 3, "batch_wait_s": 0.007, "max_queue": 5, "max_clients": 6}
    expected |= {"max_message_bytes": 2 * 1024 * 1024, "idle_s": 11.0, "drain_s": 13.0}

    def limits(server):
        return {name: getattr(server.limits, name) for name in expected}

    assert serve("run", "--port=0", *given.split(), talk=limits).talked == expected
    assert serve("run", "--port=0", talk=limits).talked == {name: getattr(Limits(), name) for name in expected}


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (3, [1, 3]), (4, [1, 4]), (5, [1, 4, 5]), (16, [1, 4, 16]), (20, [1, 4, 16, 20])]
)
def test_the_largest_batch_is_the_largest_program(largest, sizes):
    def talk(server):
        return server.policy.options["batch_sizes"], server.limits.max_batch

    assert serve("run", "--port=0", "--max-batch", largest, talk=talk).talked == (sizes, largest)


def test_a_batch_holds_as_many_requests_as_it_may():
    def talk(server):
        with contextlib.ExitStack() as stack:
            first, *others = [stack.enter_context(server.connect()) for _ in range(6)]
            for one in (first, *others):
                answer(one)
            server.policy.gate.clear()
            sends(first, 0)
            wait_for(lambda: server.policy.batches)
            for one in others:
                sends(one, 0)
            wait_for(lambda: "queue_requests 5.0" in metrics(server))
            server.policy.gate.set()
            return sorted(answer(one)["server_timing"]["batch_rows"] for one in (first, *others))

    assert serve("run", "--port=0", "--max-batch=3", "--batch-wait-ms=0", talk=talk).talked == [1, 2, 2, 3, 3, 3]


def test_a_batch_waits_for_the_clients_there_are_and_no_others():
    def talk(server):
        with server.connect() as first:
            answer(first)
            assert ask(first, request(1))["server_timing"]["batch_rows"] == 1  # nobody to wait for
            with server.connect() as second:
                answer(second)
                sends(first, 1)
                wait_for(lambda: "queue_requests 1.0" in metrics(server))
                with pytest.raises(TimeoutError):
                    first.recv(timeout=0.3)
                sends(second, 1)
                return [answer(one)["server_timing"]["batch_rows"] for one in (first, second)]

    assert serve("run", "--port=0", "--batch-wait-ms=600000", "--drain-s=1", talk=talk).talked == [2, 2]


def test_a_batch_that_may_not_wait_goes_alone():
    def talk(server):
        with server.connect() as first, server.connect():
            answer(first)
            return ask(first, request(1))["server_timing"]["batch_rows"]

    assert serve("run", "--port=0", "--batch-wait-ms=0", talk=talk).talked == 1


def test_so_many_requests_wait_and_the_next_is_told():
    def talk(server):
        with contextlib.ExitStack() as stack:
            running, *waiting, late = [stack.enter_context(server.connect()) for _ in range(4)]
            for one in (running, *waiting, late):
                answer(one)
            server.policy.gate.clear()
            sends(running, 0)
            wait_for(lambda: server.policy.batches)
            for number, one in enumerate(waiting):
                sends(one, 0)
                wait_for(lambda number=number: f"queue_requests {number + 1}.0" in metrics(server))
            told = ask(late, request(0))
            server.policy.gate.set()
            assert [answer(one)["draw"] for one in (running, *waiting)] == [0, 1, 2], "whoever came first is first"
            return told

    words = ("--max-batch=1", "--max-queue=2", "--batch-wait-ms=0")
    assert serve("run", "--port=0", *words, talk=talk).talked.startswith("busy: 2 requests are waiting")


def test_so_many_clients_come_in_and_another_when_one_has_left():
    def talk(server):
        with server.connect() as first:
            answer(first)
            with server.connect() as second:
                answer(second)
                with pytest.raises(InvalidStatus) as refused:
                    server.connect()
                assert refused.value.response.status_code == 503
                assert b"2 clients" in refused.value.response.body
            wait_for(lambda: "openpi_train_clients 1.0" in metrics(server))
            assert admitted(server)

    assert serve("run", "--port=0", "--max-clients=2", talk=talk).code == 0


def test_a_message_of_so_many_bytes_is_read_and_one_more_is_not():
    def message(padding):
        return wire.encode(request(1, pad=np.zeros(padding, np.uint8)))

    def talk(server):
        around = len(message(1 << 16)) - (1 << 16)
        fits = message((1 << 20) - around)
        assert len(fits) == 1 << 20
        with server.connect() as connection:
            answer(connection)
            assert ask(connection, fits)["draw"] == 0
            with pytest.raises(ConnectionClosed) as closed:
                ask(connection, message((1 << 20) - around + 1))
        return closed.value.rcvd.code

    assert serve("run", "--port=0", "--max-message-mib=1", talk=talk).talked == 1009


@pytest.mark.slow
def test_a_connection_without_requests_is_closed():
    def talk(server):
        with server.connect() as connection:
            answer(connection)
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=10)
        return closed.value.rcvd.code, closed.value.rcvd.reason

    assert serve("run", "--port=0", "--idle-s=1", talk=talk).talked == (1001, "idle for 1 s")


@contextlib.contextmanager
def stopped_meanwhile(server):
    """A connection whose request is under way while the server is told to stop."""
    with server.connect() as connection:
        answer(connection)
        server.policy.gate.clear()
        sends(connection, 1)
        wait_for(lambda: server.policy.batches)
        server.stop()
        yield connection


def test_an_end_waits_for_answers_under_way():
    def talk(server):
        with stopped_meanwhile(server) as connection:
            wait_for(lambda: "stopping: no new requests; 1 clients are waiting for an answer" in server.log)
            with pytest.raises(TimeoutError):
                connection.recv(timeout=0.3)
            server.policy.gate.set()
            return answer(connection)["draw"]

    ended = serve("run", "--port=0", "--drain-s=60", talk=talk)
    assert (ended.code, ended.talked) == (0, 0)


def test_an_end_waits_no_longer_than_it_may_and_the_code_says_so():
    def talk(server):
        with stopped_meanwhile(server) as connection:
            return answer(connection)

    ended = serve("run", "--port=0", "--drain-s=0.25", talk=talk)
    assert (ended.code, ended.talked) == (1, "the server is stopping")
    assert "1 clients were not answered within 0.25 s" in ended.log
