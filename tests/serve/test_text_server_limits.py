"""What one client may take of a text server: places, time, memory, rows; on real sockets, the generator is a rule."""

import contextlib
import gc
import json
import socket
import ssl
import subprocess
import threading
import time
import tracemalloc

import openai
import pytest
from text_stub import NAME, rule_texts, serving

from benchmarks import hostile_http
from benchmarks.hostile_http import CHAT, COMPLETIONS, held_open, post, wait_until
from openpi_train.serve.openai.http_connection import HttpConnection

GOOD = json.dumps({"model": NAME, "prompt": "say yes", "max_tokens": 9}).encode()
LONG = json.dumps({"model": NAME, "prompt": "go on", "max_tokens": 20_000, "stream": True}).encode()
KINDS = hostile_http.kinds(NAME)


def raw(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def answer(client):
    """Status and JSON of an answer."""
    head, _, body = hostile_http._answer(client).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if b"application/json" in head else body


def ask(port, body=GOOD, path=COMPLETIONS):
    with raw(port) as client:
        client.sendall(post(path, body))
        return answer(client)


def says_yes(port):
    status, found = ask(port)
    return (status, found["choices"][0]["text"]) == (200, "yes")


def metric(port, line):
    with raw(port) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return line in answer(client)[1].decode()


def gone(client):
    """Whether the other end closes the connection."""
    with contextlib.suppress(ConnectionError):
        try:
            while client.recv(1 << 16):
                pass
        except TimeoutError:
            return False
    return True


@pytest.fixture(scope="module")
def server():
    with serving(limits={"open_s": 5.0}) as found:  # after which half a request is closed
        yield found


# The suite sends a part of them; `python -m benchmarks serving_texts` all, over and over.
@pytest.mark.parametrize("name", list(KINDS)[::3])
def test_a_hostile_request_is_refused_and_others_are_answered(server, name):
    hostile_http.send(server.port, name, KINDS[name])


def test_after_all_that_the_server_answers_and_holds_nothing(server):
    assert says_yes(server.port)
    wait_until(lambda: server.generator.num_running == 0)
    wait_until(lambda: metric(server.port, "openpi_train_clients 0.0"))
    assert metric(server.port, 'outcome="refused"') and not metric(server.port, 'outcome="failed"')


def test_a_body_beyond_the_limit_is_refused_unread_and_the_connection_goes_on():
    with serving(limits={"max_message_bytes": 1000}) as server, raw(server.port) as client:
        for size in (1001, 5000):
            client.sendall(post(COMPLETIONS, b" " * size))
            status, found = answer(client)
            assert status == 413 and f"{size} bytes; the limit is 1000" in found["error"]["message"]
        client.sendall(post(COMPLETIONS, GOOD.ljust(1000)))
        assert answer(client)[0] == 200


def test_a_refused_body_is_not_read_without_end():
    with serving(limits={"max_message_bytes": 1000}) as server, raw(server.port) as client:
        client.sendall(post(COMPLETIONS, b"", length=1 << 40))
        assert answer(client)[0] == 413
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 64 << 20:
                sent += client.send(bytes(1 << 16))
        assert sent < 64 << 20


def test_half_requests_are_closed_in_time_and_do_not_hold_up_others():
    head = post(COMPLETIONS, GOOD)
    with serving(limits={"open_s": 2.0, "send_s": 2.0}) as server:
        for data in (b"", head[:20], head[:-5]):
            with held_open(server.port, 3, data) as clients:
                assert says_yes(server.port)
                assert all(gone(client) for client in clients)
        wait_until(lambda: metric(server.port, "openpi_train_clients 0.0"))


def test_an_idle_connection_is_closed_and_the_next_request_has_its_own_time():
    with serving(limits={"idle_s": 0.3, "open_s": 60.0}) as server, raw(server.port) as client:
        client.sendall(post(COMPLETIONS, GOOD))
        assert answer(client)[0] == 200
        assert gone(client)
    with serving(limits={"idle_s": 60.0, "open_s": 2.0}) as server, raw(server.port) as client:
        client.sendall(post(COMPLETIONS, GOOD))
        assert answer(client)[0] == 200
        with contextlib.suppress(ConnectionError):
            for byte in post(COMPLETIONS, GOOD)[:60]:  # each byte in time, and the whole never
                client.sendall(bytes([byte]))
                time.sleep(0.05)
        assert gone(client)


def test_of_too_many_idle_connections_the_oldest_go_and_requests_are_answered():
    with serving(limits={"max_opening": 4, "open_s": 60.0}) as server:
        with held_open(server.port, 8, b"POST") as clients:
            assert all(gone(client) for client in clients[:4])
            assert says_yes(server.port)


def test_more_clients_than_allowed_are_turned_away_and_places_come_free():
    texts = rule_texts()
    with serving(texts, limits={"max_clients": 2}) as server:
        texts.generator.gate.clear()
        with held_open(server.port, 2, post(COMPLETIONS, GOOD)) as clients:
            wait_until(lambda: metric(server.port, "openpi_train_clients 2.0"))
            status, found = ask(server.port)
            assert status == 503 and "2 clients, which is the limit" in found["error"]["message"]
            texts.generator.gate.set()
            assert [answer(client)[0] for client in clients] == [200, 200]
            wait_until(lambda: metric(server.port, "openpi_train_clients 0.0"))
            for client in clients:  # connections that are kept have no place, and get one again
                client.sendall(post(COMPLETIONS, GOOD))
                assert answer(client)[0] == 200


def test_a_slow_reader_holds_no_row_and_is_dropped_in_the_end(monkeypatch):
    def connection_made(self, transport, made=HttpConnection.connection_made):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(HttpConnection, "connection_made", connection_made)
    texts = rule_texts(num_rows=1, max_length=2_000)
    asked = {"model": NAME, "prompt": "go on", "max_tokens": 1_500, "stream": True, "logprobs": 20}
    with serving(texts, limits={"send_s": 1.0}) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(post(COMPLETIONS, json.dumps(asked).encode()))
        wait_until(lambda: texts.generator.most_running == 1)
        assert says_yes(server.port), "it waits for the only row, and gets it"
        wait_until(lambda: metric(server.port, 'requests_total{outcome="left"} 1.0'))
        assert metric(server.port, "openpi_train_clients 0.0")
        assert texts.generator.num_running == 0


def test_a_stream_does_not_hold_up_another():
    texts = rule_texts(num_rows=2, max_length=100_000, seconds=0.005)
    with serving(texts) as server, raw(server.port) as client:
        client.sendall(post(COMPLETIONS, LONG))
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert says_yes(server.port) and says_yes(server.port)
        assert texts.generator.num_running == 1


def test_a_client_that_is_reset_frees_its_row():
    texts = rule_texts(num_rows=1, max_length=100_000, seconds=0.005)
    with serving(texts) as server:
        hostile_http.send(server.port, "reset", hostile_http.Hostile(post(COMPLETIONS, LONG), None, "peek"))
        assert says_yes(server.port)


@pytest.mark.slow
def test_nothing_is_kept_of_connections_that_are_gone():
    def kept():
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, HttpConnection)]

    whole, half = post(COMPLETIONS, GOOD), post(COMPLETIONS, GOOD[:-5], length=len(GOOD))
    stream, bad = post(COMPLETIONS, LONG), post(COMPLETIONS, b"no JSON")
    with serving(rule_texts(max_length=100_000)) as server:
        for then, all_data in {
            "read": (whole, bad),
            "peek": (whole, stream, bad),
            "leave": (whole, stream, bad, half),
            "reset": (whole, stream, bad, half),
        }.items():
            for data in all_data:
                hostile_http.send(server.port, then, hostile_http.Hostile(data, None, then))
        wait_until(lambda: not kept())
        assert says_yes(server.port)


def test_requests_that_come_together_get_no_more_room_than_there_is():
    texts = rule_texts(num_rows=2)
    with serving(texts, limits={"max_queue": 3}) as server:
        texts.generator.gate.clear()
        with held_open(server.port, 20, post(COMPLETIONS, GOOD)) as clients:
            wait_until(lambda: metric(server.port, 'requests_total{outcome="busy"} 15.0'))
            texts.generator.gate.set()
            assert sorted(answer(client)[0] for client in clients) == [200] * 5 + [429] * 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times"),
    [
        *[
            (f"chat: {name}", 8.0)
            for name in ("100,000 lists", "300,000 keys", "a million texts", "two million numbers")
        ],
        *[(f"chat: {name}", 8.0) for name in ("lists 100,000 deep", "escaped quotes", "a prompt of wide letters")],
    ],
)
def test_a_request_takes_no_more_memory_than_some_times_its_bytes(server, name, times):
    one = KINDS[name]
    gc.collect()
    tracemalloc.start()
    try:
        hostile_http.send(server.port, name, one)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < times * len(one.data) + (2 << 20)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    texts = rule_texts()
    monkeypatch.setattr(texts, "prompt_of", lambda *_, **__: pytest.fail("it was encoded"))
    with serving(texts) as server:
        body = {"model": NAME, "messages": [{"role": "user", "content": "x" * 1000}] * 50}
        status, found = ask(server.port, json.dumps(body).encode(), CHAT)
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


def test_health_is_told_while_large_requests_are_read(server):
    body = b'{"model": "tiny", "prompt": [' + b"1," * 900_000 + b"1]}"
    over, longest = threading.Event(), []

    def look():
        while not over.is_set():
            started = time.perf_counter()
            with raw(server.port) as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert answer(client)[0] == 200
            longest.append(time.perf_counter() - started)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(3):
        assert ask(server.port, body)[0] == 400
    over.set()
    thread.join(20)
    assert len(longest) > 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_tls_serves_https_and_half_handshakes_end_in_time(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    trust = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    with serving(tls=context, limits={"open_s": 0.5}) as server:
        with raw(server.port) as half, raw(server.port) as clear:
            half.sendall(b"\x16\x03\x01")
            clear.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert gone(half) and gone(clear)
        http = openai.DefaultHttpxClient(verify=trust)
        with openai.OpenAI(base_url=f"https://localhost:{server.port}/v1", api_key="x", http_client=http) as client:
            found = client.completions.create(model=NAME, prompt="say yes", stream=True)
            assert "".join(part.choices[0].text for part in found) == "yes"
