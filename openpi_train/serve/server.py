"""Policy server with openpi's websocket protocol: connections, health, metrics, and graceful shutdown.

    connect                 -> one binary message: the policy's metadata
    binary message          -> binary message: `actions`, `state`, `draw`, `policy_timing`, `server_timing`
    `prefix` and `delay` in it -> the actions continue the prefix (real-time chunking, `policy/observation.py`)
    a bad request           -> text message with the error; the connection stays open (openpi's client raises the text)
    GET /healthz, /metrics  -> 200, on the same port, while requests run; /healthz 503 before the policy is ready

At the path /vla-eval it speaks the protocol of vla-evaluation-harness (`evaluation_harness.py`).

Messages are in the format of `policy/wire.py`; a connection has one request at a time, several connections make a
batch. Decoding and image processing run in threads, to keep the event loop free.
Read next: `dialogue.py`, `connection.py`, `batching.py`, `main.py`.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import http
import logging
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from openpi_train.json_object import JsonObject
from openpi_train.policy import wire
from openpi_train.policy.observation import ObservationError
from openpi_train.policy.record import RequestRecorder
from openpi_train.serve.api_key import ApiKey
from openpi_train.serve.batching import Batching, Busy
from openpi_train.serve.connection import Connection, ConnectionSlots
from openpi_train.serve.dialogue import Dialogue, OpenpiDialogue
from openpi_train.serve.evaluation_harness import HARNESS_PATH, HarnessDialogue, HarnessForm
from openpi_train.serve.limits import Limits
from openpi_train.serve.serve_metrics import Measures
from openpi_train.serve.starting import RETRY_AFTER_S, StartProgress

logger = logging.getLogger(__name__)

_GOING_AWAY, _POLICY_VIOLATION, _INTERNAL_ERROR = 1001, 1008, 1011
_MOST_BAD_IN_A_ROW = 100


@runtime_checkable
class Served(Protocol):
    """Interface of a served policy; see `policy/policy.py: Policy`."""

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata sent to clients."""
        ...

    def prepare(self, observation: Mapping[str, object]) -> Any:
        """Prepare an observation for the device; called in any thread."""
        ...

    def answer(self, prepared: Sequence[Any]) -> list[dict[str, Any]]:
        """The answers to a batch; called in one thread."""
        ...


class PolicyServer:
    """Serves `policy`, which should be warmed up. `api_key` None: no authentication; `recorder` records all answers.

    A `StartProgress` in place of the policy: clients connect, and wait for the metadata until `begin`.
    """

    def __init__(
        self,
        policy: Served | StartProgress,
        *,
        limits: Limits,
        api_key: str | None = None,
        recorder: RequestRecorder | None = None,
        harness: HarnessForm | None = None,
        metadata: JsonObject | None = None,
    ):
        self._limits, self._more = limits, metadata or {}
        self._progress = policy if isinstance(policy, StartProgress) else None
        self._harness: HarnessForm | None = None
        self._key = ApiKey(api_key, "Api-Key")
        self._ready = asyncio.Event()
        if not isinstance(policy, StartProgress):
            self.begin(policy, recorder, harness)
        self._places = ConnectionSlots(limits.max_clients, limits.max_opening)
        self._busy_clients = 0
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="request")
        self._batching = Batching(
            self._run_batch,
            max_batch=limits.max_batch,
            max_queue=limits.max_queue,
            wait_s=limits.batch_wait_s,
            num_clients=lambda: self._places.num_clients,
        )
        self.measures = Measures(lambda: self._batching.num_waiting, lambda: self._places.num_clients)

    def begin(
        self, policy: Served, recorder: RequestRecorder | None = None, harness: HarnessForm | None = None
    ) -> None:
        """Serve this policy from now on; with `harness` to vla-evaluation-harness, too."""
        self._policy, self._recorder, self._harness = policy, recorder, harness
        self._metadata = wire.encode({**policy.metadata, **self._more})
        self._progress = None
        self._ready.set()

    def stop(self) -> None:
        """Make `run` refuse new requests, finish the running ones and return."""
        self._stopping.set()

    async def run(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> bool:
        """Serve on the bound socket until `stop`; returns whether all running requests were finished."""
        limits = self._limits
        self._batching.start()
        async with serve(
            self._converse,
            sock=listener,
            ssl=tls,
            create_connection=functools.partial(Connection, places=self._places),  # pyright: ignore[reportArgumentType]
            process_request=self._admit,
            compression=None,  # decompression could make a small message large
            max_size=limits.max_message_bytes,
            max_queue=0,
            open_timeout=limits.open_s,
            ping_interval=limits.ping_s,
            ping_timeout=limits.ping_s,
            close_timeout=5,
            server_header=None,
            logger=_quiet,
        ) as server:
            await self._stopping.wait()
            finished = await self._finish(server)
            await self._batching.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        return finished

    async def _finish(self, server: Server) -> bool:
        if self._ready.is_set():
            logger.info("stopping: no new requests; %d clients are waiting for an answer", self._busy_clients)
        server.close(close_connections=False)
        try:
            await asyncio.wait_for(self._idle.wait(), self._limits.drain_s)
        except TimeoutError:
            logger.warning("%d clients were not answered within %g s", self._busy_clients, self._limits.drain_s)
            return False
        return True

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """The response to plain HTTP requests and to refused clients; None for accepted clients."""
        if "Origin" in request.headers:
            self.measures.requests.labels("unauthorized").inc()
            return _respond(http.HTTPStatus.FORBIDDEN, _FROM_A_PAGE)
        path = _path(request)
        if path == "/healthz" and self._progress is not None:
            return _not_ready(self._progress)
        if path == "/healthz":
            return _respond(http.HTTPStatus.OK, b"OK\n")
        if path == "/metrics":
            return _respond(http.HTTPStatus.OK, self.measures.text(), "text/plain; version=0.0.4; charset=utf-8")
        if path == HARNESS_PATH and self._progress is not None:  # its client waits for half a minute, but tries again
            return _not_ready(self._progress)
        if path != "/" and (path != HARNESS_PATH or self._harness is None):
            return _respond(http.HTTPStatus.NOT_FOUND, b"there are /, /healthz, /metrics and /vla-eval\n")
        given = request.headers.get_all("Authorization")
        if not self._key.admits([one.encode("utf-8", "surrogateescape") for one in given]):
            self.measures.requests.labels("unauthorized").inc()
            return _respond(http.HTTPStatus.UNAUTHORIZED, b"the header Authorization: Api-Key KEY is wrong\n")
        if self._stopping.is_set() or not self._places.take(connection):
            self.measures.requests.labels("turned away").inc()
            number = self._places.num_clients
            why = "is stopping" if self._stopping.is_set() else f"has {number} clients, which is the limit"
            return _respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"the server {why}\n".encode())
        if path == HARNESS_PATH:
            connection.ping_interval = None  # a simulator holds up its client, which then answers no ping
        return None

    async def _converse(self, connection: ServerConnection) -> None:
        assert isinstance(connection, Connection)
        with contextlib.suppress(ConnectionClosed, TimeoutError):  # the client left, or does not read
            if not await self._becomes_ready(connection):
                return
            assert connection.request is not None, "its handshake is over"
            if self._harness is not None and _path(connection.request) == HARNESS_PATH:
                return await self._answer_all(connection, HarnessDialogue(self._harness))
            await self._send(connection, self._metadata)
            await self._answer_all(connection, OpenpiDialogue())

    async def _becomes_ready(self, connection: ServerConnection) -> bool:
        """Wait until there is a policy; False if the client left or the server stops before."""
        waits = [
            asyncio.ensure_future(one) for one in (self._ready.wait(), self._stopping.wait(), connection.wait_closed())
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if not self._ready.is_set():
            await connection.close(_GOING_AWAY, "the server is stopping")
        return self._ready.is_set()

    async def _answer_all(self, connection: Connection, dialogue: Dialogue) -> None:
        """Answer request after request until the client leaves, is idle for too long, or the server stops."""
        previous_s, bad = None, 0
        while True:
            message = await self._next(connection)
            if message is None:
                return
            started = time.perf_counter()
            with self._under_way(connection):
                answer = await self._reply(dialogue, message, started, previous_s)
                del message  # it may be as large as the next message
                if answer is not None:
                    await self._send(connection, dialogue.refusal(answer) if isinstance(answer, str) else answer)
            previous_s = time.perf_counter() - started
            bad = bad + 1 if isinstance(answer, str) else 0
            if answer == _INTERNAL:
                return await connection.close(_INTERNAL_ERROR, "internal error")
            if bad >= _MOST_BAD_IN_A_ROW:
                return await connection.close(_POLICY_VIOLATION, f"{bad} bad requests in a row")

    async def _next(self, connection: ServerConnection) -> bytes | None:
        """The next message; None if the connection was closed instead."""
        receive = asyncio.ensure_future(connection.recv(decode=False))  # decoded text could take four times its bytes
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({receive, stop}, timeout=self._limits.idle_s, return_when=asyncio.FIRST_COMPLETED)
            if receive.done():
                return await receive
        finally:
            for task in (receive, stop):
                task.cancel()
            await asyncio.gather(receive, stop, return_exceptions=True)
        reason = "the server is stopping" if self._stopping.is_set() else f"idle for {self._limits.idle_s:.0f} s"
        await connection.close(_GOING_AWAY, reason)
        return None

    async def _reply(
        self, dialogue: Dialogue, message: bytes, started: float, previous_s: float | None
    ) -> str | bytes | None:
        """The answer to a message, or the text of an error; None if there is nothing to say."""
        if self._stopping.is_set():
            return self._refused("turned away", "the server is stopping")
        loop = asyncio.get_running_loop()
        try:
            asked = await loop.run_in_executor(self._threads, self._read, dialogue, message)
            if not isinstance(asked, tuple):
                return asked
            answer, infer_s, rows = await self._batching.submit(asked)
            if not np.isfinite(answer["actions"]).all():
                return self._refused("failed", _NOT_FINITE)
        except (wire.WireError, ObservationError) as error:
            return self._refused("refused", str(error))
        except Busy as error:
            return self._refused("busy", str(error))
        except Exception:
            logger.exception("a request failed")
            return self._refused("failed", _INTERNAL)
        timing = {"infer_ms": 1e3 * (time.perf_counter() - started), "batch_rows": rows}
        if previous_s is not None:
            timing["prev_total_ms"] = 1e3 * previous_s
        self.measures.answered(time.perf_counter() - started)
        return dialogue.answer(answer, {"policy_timing": {"infer_ms": 1e3 * infer_s}, "server_timing": timing})

    def _read(self, dialogue: Dialogue, message: bytes) -> tuple[Any, Any] | bytes | None:
        """The observation of a message, and the result of `Policy.prepare` on it, or what is said without the policy;
        runs in a thread."""
        asked = dialogue.read(message)
        return asked if asked is None or isinstance(asked, bytes) else (asked, self._policy.prepare(asked))

    def _run_batch(self, asked: Sequence[tuple[object, object]]) -> list[tuple[Any, float, int]]:
        """The answers, with the seconds until they were on the host; runs in the device's thread."""
        started = time.perf_counter()
        answers = self._policy.answer([prepared for _, prepared in asked])
        seconds = time.perf_counter() - started
        self.measures.ran(len(asked), seconds)
        self._record([observation for observation, _ in asked], answers)
        return [(answer, seconds, len(asked)) for answer in answers]

    def _record(self, observations: Sequence[Any], answers: Sequence[Any]) -> None:
        """Record a batch; if that fails, log it and still answer the clients."""
        if self._recorder is None:
            return
        try:
            self._recorder.write(observations, answers)
        except OSError as error:
            self._recorder = None
            logger.error("the record cannot be written (%s): it ends here, serving continues", error.strerror)
        except (TypeError, ValueError) as error:
            logger.warning("a batch of %d requests is missing from the record: %s", len(answers), error)

    def _refused(self, outcome: str, text: str) -> str:
        self.measures.requests.labels(outcome).inc()
        return text

    async def _send(self, connection: ServerConnection, message: str | bytes) -> None:
        try:
            await asyncio.wait_for(connection.send(message), self._limits.send_s)
        except TimeoutError:  # it does not read, so it would not answer a close either
            connection.transport.abort()
            raise

    @contextlib.contextmanager
    def _under_way(self, connection: Connection):
        self._busy_clients += 1
        self._idle.clear()
        connection.begin_request()
        try:
            yield
        finally:
            connection.end_request()
            self._busy_clients -= 1
            if not self._busy_clients:
                self._idle.set()


_INTERNAL = "internal error: see the server's log"
_FROM_A_PAGE = (
    b"requests with the header Origin are a browser's: no page may move the robot "
    b"(the package websocket-client sends none with suppress_origin=True)\n"
)
_NOT_FINITE = "the policy's actions hold NaN or infinity and are not sent"
# The library logs every failed handshake with a traceback: clients could fill the disk.
_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.CRITICAL)


def _not_ready(progress: StartProgress) -> Response:
    response = _respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{progress.line}\n".encode())
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _path(request: Request) -> str:
    return request.path.partition("?")[0]


def _respond(status: http.HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> Response:
    headers = Headers(
        {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close", "Cache-Control": "no-store"}
    )
    return Response(status.value, status.phrase, headers, body)
