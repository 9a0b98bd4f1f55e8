"""The `serve` command: listen, load, warm up, serve until SIGTERM. Read next: `server.py`, `openai/text_server.py`."""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import errno
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from openpi_train.policy.loading import BATCH_SIZES, load_policy
from openpi_train.policy.policy import Policy
from openpi_train.policy.text_model import gives_texts
from openpi_train.runtime import compile_cache, logs
from openpi_train.runtime.exits import BUG, DONE, NUMBERS, UsageError, end
from openpi_train.runtime.listening import listening_process
from openpi_train.runtime.private_file import warn_if_others_can_read
from openpi_train.runtime.world import is_loopback
from openpi_train.serve.limits import limits_of
from openpi_train.serve.request import API_KEY_VARIABLE, ServeRequest, TextFlags
from openpi_train.serve.starting import StartProgress, answer_not_ready

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
# Between lines of the log while a server starts.
_TELL_S = 15.0

# glibc's M_MMAP_THRESHOLD, and the size from which freed blocks are returned to the system at once. By default glibc
# raises that size to the largest block seen, and keeps memory of the size of a picture for the next request.
_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES = -3, 1 << 20


def run(flags: ServeRequest, texts: TextFlags) -> int:
    """Serve until SIGTERM or Ctrl-C: a robot policy or a language model, as the checkpoint is. Returns 0."""
    _start()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    try:
        import openpi_train.serve.server  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'openpi_train[serve]'") from error
    if flags.record and not Path(flags.record).absolute().parent.is_dir():
        raise UsageError(f"--record {flags.record}: there is no folder {Path(flags.record).parent}; create it first")
    key, tls = _api_key(flags.api_key_file), _tls(flags.tls_cert, flags.tls_key)
    if key is None and not is_loopback(flags.host):
        logger.warning(
            "--host %s without a key: whoever reaches port %d of this machine is answered. Give --api-key-file FILE "
            "(or %s), or --host 127.0.0.1 and a tunnel",
            *(flags.host, flags.port, API_KEY_VARIABLE),
        )
    with _bind(flags.host, flags.port) as listener:
        if gives_texts(flags.checkpoint, flags.experiment):
            return _serve_texts(flags, texts, listener, key, tls)
        if given := texts.given():
            raise UsageError(f"{flags.checkpoint} is no language model, so it has no {', '.join(given)}")
        return _serve(flags, listener, key, tls)


def _serve(flags: ServeRequest, listener: socket.socket, key: str | None, tls: ssl.SSLContext | None) -> int:
    from openpi_train.policy.record import RequestRecorder
    from openpi_train.serve.evaluation_harness import HarnessForm
    from openpi_train.serve.server import Limits, PolicyServer

    sizes = sorted({*(size for size in BATCH_SIZES if size < flags.max_batch), flags.max_batch})
    limits = limits_of(Limits, flags, max_batch=flags.max_batch, batch_wait_s=flags.batch_wait_ms / 1e3)
    told: dict[str, Any] = {} if flags.reset_pose is None else {"reset_pose": list(flags.reset_pose)}
    progress = StartProgress()

    def open_policy() -> tuple[Policy, RequestRecorder | None, HarnessForm, float]:
        policy = _load(flags, batch_sizes=sizes)
        harness = HarnessForm(policy.metadata, names=flags.vla_eval_names, execute=flags.vla_eval_execute)
        recorder = RequestRecorder(flags.record, policy) if flags.record else None
        started = time.monotonic()
        what = f"compiling for batches of {', '.join(map(str, policy.sampler.sizes))}"
        logger.info("%s", what)
        progress.now(what)
        policy.warm_up(prefixes=flags.real_time_chunking or None)
        return policy, recorder, harness, time.monotonic() - started

    async def serve() -> bool | None:
        stop = _stop_signals()
        server = PolicyServer(progress, limits=limits, api_key=key, metadata=told)
        where = _listen(listener)
        running = asyncio.create_task(server.run(listener, tls))
        try:
            opened = await _opened(open_policy, stop, progress)
            if opened is None:
                return None
            policy, recorder, harness, compiled_s = opened
            server.begin(policy, recorder, harness)
            _tell_ready(_Ready(compiled_s, policy.checkpoint, "ws", key), where, tls)
            await stop.wait()
            server.stop()
            try:
                finished = await running
            finally:
                if recorder is not None:
                    recorder.close()
            logger.info("stopped; %s", server.measures.summary())
            return finished
        finally:
            server.stop()
            await running

    return _ended(asyncio.run(serve()))


def _serve_texts(
    flags: ServeRequest, texts: TextFlags, listener: socket.socket, key: str | None, tls: ssl.SSLContext | None
) -> int:
    try:
        from openpi_train.serve.openai.text_main import open_server
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'openpi_train[serve,text]'") from error
    if given := flags.only_of_robots():
        raise UsageError(f"{flags.checkpoint} is a language model, so it has no {', '.join(given)}")
    progress = StartProgress()

    async def serve() -> bool | None:
        stop = _stop_signals()
        where = _listen(listener)
        starting = await answer_not_ready(listener, progress, tls)
        try:
            opened = await _opened(lambda: open_server(flags, texts, key, progress), stop, progress)
        finally:
            starting.close()
        if opened is None:
            return None
        server = opened.make()
        stopped = asyncio.create_task(stop.wait())
        stopped.add_done_callback(lambda _: server.stop())
        _tell_ready(_Ready(opened.compiled_s, opened.description, "http", key), where, tls)
        finished = await server.run(listener, tls)
        stopped.cancel()
        logger.info("stopped; %s", server.measures.summary())
        return finished

    return _ended(asyncio.run(serve()))


@dataclasses.dataclass(frozen=True)
class _Ready:
    """What the log says of a server that is ready."""

    compiled_s: float
    what: str
    scheme: str
    key: str | None


def _stop_signals() -> asyncio.Event:
    """Set by SIGTERM and Ctrl-C."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _opened(load: Callable[[], Loaded], stop: asyncio.Event, progress: StartProgress) -> Loaded | None:
    """What `load` returns, in a thread; None if `stop` comes before. Logs the progress, and raises what it raises."""
    thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="load")
    loading = asyncio.get_running_loop().run_in_executor(thread, load)
    stopped = asyncio.create_task(stop.wait())
    while True:
        done, _ = await asyncio.wait({loading, stopped}, timeout=_TELL_S, return_when=asyncio.FIRST_COMPLETED)
        if loading in done:
            stopped.cancel()
            thread.shutdown()
            return loading.result()
        if stopped in done:
            return None
        logger.info("%s", progress.line)


def _tell_ready(ready: _Ready, where: tuple[str, int], tls: ssl.SSLContext | None) -> None:
    logger.info(
        "ready after %.1f s of compiling: %s on %s://%s:%d, %s",
        *(ready.compiled_s, ready.what, ready.scheme + ("s" if tls else ""), *where),
        "with an API key" if ready.key else "without authentication",
    )


def _ended(finished: bool | None) -> int:
    """The exit code; ends the process where Python would wait for a thread that loads or computes."""
    if finished is None:
        logger.info("stopped before it was ready")
        end(DONE)
    if not finished:
        end(BUG)
    return DONE


def replay(flags: ServeRequest, file: str) -> int:
    """Replay the record in `file` and print the result. Returns 0 if all answers are equal."""
    _start()
    from openpi_train.policy.record import read_record

    header, _ = read_record(file)
    flags = dataclasses.replace(
        flags, seed=header["seed"], num_sample_steps=header["num_sample_steps"], guidance=header.get("guidance")
    )
    found = _load(flags, batch_sizes=header["batch_sizes"]).replay(file)
    if found.different:
        shown = ", ".join(map(str, found.different[:10]))
        print(f"{len(found.different)} of {found.answers} answers differ: draws {shown}")
        return NUMBERS
    print(f"all {found.answers} answers are equal, bit for bit")
    return DONE


def _start() -> None:
    logs.configure(0)
    compile_cache.use(jax.default_backend())


def _load(flags: ServeRequest, batch_sizes: list[int]) -> Policy:
    wanted = flags.dataset
    return load_policy(
        flags.checkpoint,
        experiment=flags.experiment,
        dataset=int(wanted) if wanted is not None and wanted.isdecimal() else wanted,
        prompt=flags.prompt,
        average=flags.average,
        dtype=flags.dtype,
        merge_lora=flags.merge_lora,
        num_sample_steps=flags.num_sample_steps,
        guidance=flags.guidance,
        batch_sizes=batch_sizes,
        seed=flags.seed,
        tokenizer=flags.tokenizer,
        cut_prompts=flags.cut_prompts,
    )


def _api_key(file: str | None) -> str | None:
    """The API key that clients must send; None for no authentication."""
    try:
        key = os.environ.get(API_KEY_VARIABLE) if file is None else Path(file).read_text(encoding="utf-8")
        if file is not None:
            warn_if_others_can_read(Path(file), "--api-key-file")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file} cannot be read: {error}") from error
    if key is not None and not key.strip():
        raise UsageError(f"the API key in {file or API_KEY_VARIABLE} is empty")
    return None if key is None else key.strip()


def _tls(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    if cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # No client resumes a session, and its ticket would come while a client with threads, such as openpi's, sends its
    # first request. Python 3.11's `ssl` does not keep these apart: two of 1,684 clients waited in vain, none of 3,600
    # without tickets.
    context.num_tickets = 0
    try:
        context.load_cert_chain(cert, key)
        if key is not None:
            warn_if_others_can_read(Path(key), "--tls-key")
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-cert {cert} with --tls-key {key} cannot be used: {error}") from error
    return context


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            undo.pop_all()
    except OSError as error:
        remedy = ""
        if error.errno == errno.EADDRINUSE:
            pid = listening_process(port)
            remedy = f". Give another --port, or end what listens there{f', the process {pid}' if pid else ''}"
        raise UsageError(f"--host {host} --port {port} cannot be listened on: {error}{remedy}") from error
    return listener


def _listen(listener: socket.socket) -> tuple[str, int]:
    """Start to listen, and log and return the address.

    Raises UsageError if another program that had also bound the port was faster.
    """
    host, port = listener.getsockname()[:2]
    try:
        listener.listen()
    except OSError as error:
        raise UsageError(f"{host}:{port} was taken by another program meanwhile: {error}") from error
    logger.info("port %d of %s is open; until it is ready, /healthz says what is done", port, host)
    return host, port
