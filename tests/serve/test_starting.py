"""A server that is not ready: its port is open, it says what it does, and real clients wait for it."""

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request

import httpx2
import openai
import pytest
import websockets.sync.client

from openpi_train.policy import wire
from openpi_train.serve.limits import Limits
from openpi_train.serve.server import PolicyServer
from openpi_train.serve.starting import StartProgress, answer_not_ready


class Stub:
    """A policy without a model."""

    @property
    def metadata(self):
        return {"robot": "stub"}

    def prepare(self, observation):
        return observation

    def answer(self, prepared):
        raise NotImplementedError


@contextlib.contextmanager
def in_a_loop(begin):
    """Runs `begin(listener)`, a coroutine that serves, in a thread; yields the port and a way into its loop."""
    listener, loop = socket.create_server(("127.0.0.1", 0)), asyncio.new_event_loop()

    async def run():
        await begin(listener)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0.1)  # transports close

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        yield listener.getsockname()[1], loop.call_soon_threadsafe
    finally:
        thread.join(20)
        loop.close()
        listener.close()


@contextlib.contextmanager
def policy_server():
    """A policy server without a policy, its port, and a way to call it in its loop."""
    made = {}

    async def begin(listener):
        made["server"] = PolicyServer(StartProgress(), limits=Limits(drain_s=1))
        await made["server"].run(listener)

    with in_a_loop(begin) as (port, call):
        while "server" not in made:
            time.sleep(0.01)
        try:
            yield made["server"], port, call
        finally:
            call(made["server"].stop)


def health(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as response:
            return response.status, None, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Retry-After"], error.read()


def connected(port):
    """As openpi's client connects."""
    return websockets.sync.client.connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None)


def test_a_policy_server_takes_clients_at_once_and_tells_them_the_metadata_when_it_is_ready():
    with policy_server() as (server, port, call):
        code, retry, body = health(port)
        assert (code, retry) == (503, "5") and body.startswith(b"starting: loading the checkpoint since 0 s")
        with connected(port) as client:
            with pytest.raises(TimeoutError):
                client.recv(timeout=0.3)
            call(server.begin, Stub())
            assert wire.decode(client.recv(timeout=10)) == {"robot": "stub"}
        assert health(port) == (200, None, b"OK\n")


def test_a_client_that_waits_is_told_when_the_server_stops():
    with policy_server() as (server, port, call), connected(port) as client:
        call(server.stop)
        with pytest.raises(websockets.exceptions.ConnectionClosed, match=r"1001.*the server is stopping"):
            client.recv(timeout=10)


def test_a_client_that_leaves_meanwhile_does_not_keep_its_place():
    with policy_server() as (server, port, _):
        with connected(port):
            assert server._places.num_clients == 1
        deadline = time.monotonic() + 20
        while server._places.num_clients:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_language_servers_clients_are_told_to_come_again():
    """OpenAI's client raises what it is told; left to itself it tries again after Retry-After."""
    progress, stopped = StartProgress(), []

    async def begin(listener):
        stopped.append(asyncio.Event())
        server = await answer_not_ready(listener, progress)
        await stopped[0].wait()
        server.close()
        assert listener.fileno() >= 0  # for the server that follows

    with in_a_loop(begin) as (port, call):
        while not stopped:
            time.sleep(0.01)
        progress.now("compiling")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        try:
            with pytest.raises(openai.APIStatusError, match=r"starting: compiling since \d+ s") as told:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a" * 1_000_000}])
            assert told.value.status_code == 503 and told.value.response.headers["Retry-After"] == "5"
            found = httpx2.get(f"http://127.0.0.1:{port}/healthz")
            assert found.status_code == 503 and found.json()["error"]["code"] == "starting"
        finally:
            call(stopped[0].set)
