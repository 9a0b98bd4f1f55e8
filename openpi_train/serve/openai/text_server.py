"""Text server with OpenAI's HTTP API: routes, admission, answers and streams, and graceful shutdown.

    GET  /v1/models, /v1/models/NAME               the model that is served
    POST /v1/completions, /v1/chat/completions     JSON, or server-sent events with `stream`
    GET  /healthz, /metrics                        200, on the same port, while requests run

Bodies are parsed, and prompts encoded, in threads, to keep the event loop free. Read next: `text_request.py`,
`generation_thread.py`, `http_connection.py`.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import logging
import math
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from openpi_train.data.text.message_content import text_of
from openpi_train.generation.completion_text import NewText
from openpi_train.generation.text_generator import TextGenerator
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import DataError
from openpi_train.serve.api_key import ApiKey
from openpi_train.serve.batching import Busy
from openpi_train.serve.connection import ConnectionSlots
from openpi_train.serve.limits import TextLimits
from openpi_train.serve.openai.answers import Answers, ChatAnswers, CompletionAnswers
from openpi_train.serve.openai.api_error import ApiError, invalid
from openpi_train.serve.openai.generation_thread import AskedRow, GenerationThread, RowEvents
from openpi_train.serve.openai.http_connection import HttpConnection
from openpi_train.serve.openai.http_exchange import JSON, ClientGone, HttpExchange, Receive, Scope, Send, to_json
from openpi_train.serve.openai.json_body import read_object
from openpi_train.serve.openai.text_measures import TextMeasures
from openpi_train.serve.openai.text_request import TextRequest, chat_request, completion_request
from openpi_train.serve.openai.token_texts import TokenTexts

logger = logging.getLogger(__name__)

_TEXT, _METRICS = "text/plain; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"
_MODELS = "/v1/models"
# More characters of a prompt for each token of the context cannot fit; it is refused before it is encoded.
_MOST_CHARACTERS_PER_TOKEN = 64
_FROM_A_PAGE = "requests with the header Origin are a browser's; this server answers none"
# Log-probabilities of a request: each takes some hundred bytes until it is sent.
_MOST_LOG_PROBS = 200_000
# What clients get to read an error when the server stops.
_LAST_WORDS_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request that can be completed: rows by prompt and choice, and how it is answered."""

    rows: Sequence[AskedRow]
    num_prompt_tokens: int
    stream: bool
    include_usage: bool
    answers: Answers


class TextServer:
    """Serves `texts`, which should be warmed up, as the model `name`. `api_key` None: no authentication."""

    def __init__(self, texts: TextGenerator, *, name: str, limits: TextLimits, api_key: str | None = None):
        self._texts, self._name, self._limits = texts, name, limits
        self._key = ApiKey(api_key, "Bearer")
        self._tokens = TokenTexts(texts.tokenizer)
        self._created = int(time.time())
        self._fingerprint = _fingerprint(name, importlib.metadata.version("jax"), texts.generator.num_rows)
        self._places = ConnectionSlots(limits.max_clients, limits.max_opening)
        self._threads = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="request")
        self._num_answered_now = 0
        self._stopping, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._generation = GenerationThread(
            texts,
            max_waiting=limits.max_queue,
            ran=lambda rows, seconds: self.measures.ran(rows, seconds),
            failed=self.stop,
        )
        self.measures = TextMeasures(
            lambda: self._generation.num_waiting,
            lambda: self._generation.num_running,
            lambda: self._places.num_clients,
        )
        self._posts: Mapping[str, tuple[Callable[[JsonObject], TextRequest], type[Answers]]] = {
            "/v1/completions": (completion_request, CompletionAnswers),
            "/v1/chat/completions": (chat_request, ChatAnswers),
        }

    def stop(self) -> None:
        """Make `run` refuse new requests, finish the running ones and return."""
        self._stopping.set()

    async def run(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> bool:
        """Serve on the bound socket until `stop`.

        Returns whether all running requests were finished, and the generator's thread ended.
        """
        config = uvicorn.Config(
            _no_app, http="h11", ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
            timeout_keep_alive=math.ceil(self._limits.idle_s) + 1,
        )  # fmt: skip
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()
        self._generation.start()
        server = await loop.create_server(
            lambda: HttpConnection(
                places=self._places,
                limits=self._limits,
                handle=self._handle,
                config=config,
                server_state=state,
                app_state={},
            ),
            sock=listener,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._limits.open_s,
        )
        await self._stopping.wait()
        server.close()
        finished = await self._finish()
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        self._threads.shutdown(wait=False, cancel_futures=True)
        ended = await asyncio.to_thread(self._generation.close, self._limits.drain_s)
        return finished and ended and self._generation.error is None

    async def _finish(self) -> bool:
        """Wait for running requests; those that are not answered in time are told so."""
        logger.info("stopping: no new requests; %d clients are waiting for an answer", self._num_answered_now)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._limits.drain_s)
        if not self._num_answered_now:
            return True
        logger.warning("%d clients were not answered within %g s", self._num_answered_now, self._limits.drain_s)
        self._generation.fail_all(_stopping)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _LAST_WORDS_S)
        return False

    async def _handle(self, connection: HttpConnection, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = HttpExchange(connection, scope, receive, send, self._limits)
        async with connection.turn:
            try:
                await self._route(connection, exchange)
            except ClientGone:
                self.measures.requests.labels("left").inc()
                exchange.drop()
            except ApiError as error:
                self._count(error)
                await self._tell(exchange, error)
            except Exception:
                logger.exception("a request failed")
                error = ApiError(500, "internal error: see the server's log")
                self._count(error)
                await self._tell(exchange, error)

    async def _tell(self, exchange: HttpExchange, error: ApiError) -> None:
        """Send an error: as the answer, or as the last event of a stream."""
        with contextlib.suppress(ClientGone):
            if not exchange.is_started:
                return await exchange.answer_json(error.status, error.body, error.headers)
            await exchange.event(error.body)
            await exchange.end_events(is_whole=False)

    async def _route(self, connection: HttpConnection, exchange: HttpExchange) -> None:
        if exchange.headers(b"origin"):
            raise ApiError(403, _FROM_A_PAGE)
        path = exchange.path
        if path in ("/healthz", "/metrics"):
            _check_method(exchange, "GET", "HEAD")
            return await self._monitored(exchange)
        if not path.startswith("/v1/"):
            raise ApiError(404, f"there is no {path[:100]!r}: there are /v1/..., /healthz and /metrics")
        if not self._key.admits(exchange.headers(b"authorization")):
            raise ApiError(401, "the header Authorization: Bearer KEY is wrong", code="invalid_api_key")
        if path in self._posts:
            _check_method(exchange, "POST")
            with self._place(connection):
                return await self._complete(exchange, *self._posts[path])
        if path == _MODELS or path.startswith(f"{_MODELS}/"):
            _check_method(exchange, "GET", "HEAD")
            return await exchange.answer_json(200, self._model(path.removeprefix(_MODELS)))
        names = ", ".join([_MODELS, *self._posts])
        raise ApiError(404, f"there is no {path[:100]!r}: there are {names}")

    async def _monitored(self, exchange: HttpExchange) -> None:
        if exchange.path == "/metrics":
            return await exchange.answer(200, self.measures.text(), _METRICS)
        if not self._generation.is_working:
            return await exchange.answer(503, b"the generator failed\n", _TEXT)
        await exchange.answer(200, b"OK\n", _TEXT)

    def _model(self, rest: str) -> dict[str, Any]:
        """The models, or the one that the rest of the path names."""
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "openpi_train"}
        if not rest:
            return {"object": "list", "data": [model]}
        self._check_model(rest[1:])
        return {**model, "max_model_len": self._texts.generator.max_length}

    def _check_model(self, name: str) -> None:
        if name != self._name:
            message = f"the model {name[:100]!r} is not served here; the one that is is {self._name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @contextlib.contextmanager
    def _place(self, connection: HttpConnection) -> Iterator[None]:
        """A place for a request. Raises ApiError if there is none."""
        if self._stopping.is_set():
            raise _stopping()
        if not self._places.take(connection):
            raise ApiError(503, f"the server has {self._places.num_clients} clients, which is the limit")
        self._num_answered_now += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._places.left(connection)
            if not connection.transport.is_closing():
                self._places.came(connection)
            self._num_answered_now -= 1
            if not self._num_answered_now:
                self._idle.set()

    async def _complete(
        self, exchange: HttpExchange, read: Callable[[JsonObject], TextRequest], form: type[Answers]
    ) -> None:
        started = time.perf_counter()
        body = await exchange.body()
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._threads, self._understood, body, read, form)
        del body
        try:
            events = self._generation.submit(asked.rows)
        except Busy as error:
            raise ApiError(429, str(error), code="rate_limit_exceeded") from error
        leaving = asyncio.create_task(_fail_when_gone(exchange, events))
        limit = loop.call_later(self._limits.request_s, lambda: events.fail(_too_slow(self._limits.request_s)))
        try:
            await (self._stream if asked.stream else self._answer)(exchange, asked, events, started)
        finally:
            limit.cancel()
            leaving.cancel()
            self._generation.cancel(events)
        self.measures.answered(time.perf_counter() - started)

    async def _answer(self, exchange: HttpExchange, asked: _Asked, events: RowEvents, started: float) -> None:
        parts: list[list[NewText]] = [[] for _ in asked.rows]
        async for index, new in self._news(asked, events, started):
            parts[index].append(new)
        usage = self._usage(asked, [sum(new.num_made for new in own) for own in parts])
        content = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: to_json(asked.answers.whole(parts, usage))
        )
        await exchange.answer(200, content, JSON)

    async def _stream(self, exchange: HttpExchange, asked: _Asked, events: RowEvents, started: float) -> None:
        lengths, counts = [0] * len(asked.rows), [0] * len(asked.rows)
        async for index, new in self._news(asked, events, started):
            if not exchange.is_started:
                for chunk in asked.answers.opening(len(asked.rows)):
                    await exchange.event(chunk)
            if new.text or new.tokens.tokens or new.tokens.finish_reason:
                await exchange.event(asked.answers.chunk(index, new, lengths[index]))
            lengths[index] += len(new.text)
            counts[index] += new.num_made
        usage = self._usage(asked, counts)
        if asked.include_usage:
            await exchange.event(asked.answers.usage_chunk(usage))
        await exchange.end_events(is_whole=True)

    async def _news(self, asked: _Asked, events: RowEvents, started: float) -> AsyncIterator[tuple[int, NewText]]:
        """The events of a request until all its rows have ended."""
        left, is_first = len(asked.rows), True
        while left:
            index, new = await events.next()
            if is_first:
                self.measures.first_text(time.perf_counter() - started)
            is_first = False
            left -= new.tokens.finish_reason is not None
            yield index, new

    def _usage(self, asked: _Asked, counts: Sequence[int]) -> dict[str, int]:
        prompt, completion = asked.num_prompt_tokens, sum(counts)
        self.measures.counted(prompt, completion)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _understood(self, body: bytes, read: Callable[[JsonObject], TextRequest], form: type[Answers]) -> _Asked:
        """The rows that a body asks for; runs in a thread. Raises ApiError."""
        request = read(read_object(body))
        self._check_model(request.model)
        count, most = len(request.prompts) * request.num_choices, self._limits.max_queue
        if count > most:
            raise invalid(f"the request asks for {count} completions; the most are {most} (--max-queue)", "n")
        prompts = [self._tokens_of(prompt, request) for prompt in request.prompts]
        rows: list[AskedRow] = []
        for tokens in prompts:
            settings = self._settings(tokens, request)
            # Numbered through the whole request: equal prompts have their own random numbers.
            rows += [
                AskedRow(prompt=tokens, settings=settings, row=len(rows) + number, num_top=request.num_top or 0)
                for number in range(request.num_choices)
            ]
        if request.num_top is not None:
            _check_log_probs(sum(row.settings.max_new_tokens for row in rows) * (1 + request.num_top))
        answers = form(
            self._tokens,
            model=self._name,
            fingerprint=self._fingerprint,
            num_top=request.num_top,
            include_usage=request.include_usage,
        )
        return _Asked(
            rows=rows,
            num_prompt_tokens=sum(map(len, prompts)),
            stream=request.stream,
            include_usage=request.include_usage,
            answers=answers,
        )

    def _tokens_of(self, prompt: Any, request: TextRequest) -> list[int]:
        """The tokens of a prompt in any form."""
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not isinstance(prompt, str) and not is_chat:
            return list(prompt)
        most = _MOST_CHARACTERS_PER_TOKEN * self._texts.generator.max_length
        values = [prompt] if isinstance(prompt, str) else [value for message in prompt for value in message.values()]
        if (count := sum(len(text_of(value)) for value in values)) > most:
            raise self._too_long(f"your prompt has {count} characters, more than {most}")
        if is_chat and not self._texts.templates:
            raise invalid("this model has no chat template; use /v1/completions", "messages")
        try:
            return self._texts.prompt_of(prompt, request.template_variables)
        except (ValueError, DataError) as error:
            raise invalid(str(error), "messages" if is_chat else "prompt") from error

    def _settings(self, tokens: Sequence[int], request: TextRequest) -> Any:
        """The settings of a prompt's completions, with the number of tokens that they may have."""
        room = self._texts.generator.max_length - len(tokens)
        wanted = request.max_tokens
        if room < (1 if wanted is None else wanted):
            more = "" if wanted is None else f" and {wanted} in the completion"
            raise self._too_long(f"your request has {len(tokens)} tokens in the prompt{more}")
        settings = dataclasses.replace(request.settings, max_new_tokens=room if wanted is None else wanted)
        if problems := self._texts.check(tokens, settings):
            raise invalid("; ".join(problems))
        return settings

    def _too_long(self, what: str) -> ApiError:
        message = f"the model's context has {self._texts.generator.max_length} tokens (--max-length), and {what}"
        return invalid(message, code="context_length_exceeded")

    def _count(self, error: ApiError) -> None:
        outcome = {401: "unauthorized", 403: "unauthorized", 429: "busy", 500: "failed", 503: "turned away"}
        self.measures.requests.labels(outcome.get(error.status, "refused")).inc()


async def _no_app(scope: object, receive: object, send: object) -> None:
    """uvicorn wants an application; `HttpConnection` has its own."""


async def _fail_when_gone(exchange: HttpExchange, events: RowEvents) -> None:
    await exchange.gone()
    events.fail(ClientGone())


def _fingerprint(*of: object) -> str:
    return f"fp_{hashlib.sha256(repr(of).encode()).hexdigest()[:12]}"


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping")


def _check_log_probs(count: int) -> None:
    if count > _MOST_LOG_PROBS:
        raise invalid(
            f"the request asks for up to {count:,} log-probabilities; the most are {_MOST_LOG_PROBS:,}: ask for fewer "
            "tokens (max_tokens), completions or alternatives",
            "top_logprobs",
        )


def _too_slow(seconds: float) -> ApiError:
    return ApiError(503, f"the answer took more than {seconds:g} s, the limit of a request", code="timeout")


def _check_method(exchange: HttpExchange, *allowed: str) -> None:
    if exchange.method not in allowed:
        names = ", ".join(allowed)
        raise ApiError(405, f"{exchange.path} takes {names}, not {exchange.method[:20]}", allow=names)
