"""Batching of requests from several clients for the device: a bounded queue and one worker. Read next: `server.py`."""

import asyncio
import collections
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

Answer = Callable[[Sequence[Any]], Sequence[Any]]


class Busy(Exception):
    """The queue is full, or closed."""


class Batching:
    """Passes submitted requests to `answer`, at most `max_batch` at a time, in a separate thread.

    Requests whose batch fails are passed to it again one by one: one that cannot be answered fails alone.
    While one batch runs, the next one is collected. A batch that is not full waits up to `wait_s` for other clients:
    the `num_clients` connected ones were usually answered together, so their next requests come together.
    """

    def __init__(
        self, answer: Answer, *, max_batch: int, max_queue: int, wait_s: float, num_clients: Callable[[], int]
    ):
        self._answer, self._num_clients = answer, num_clients
        self._max_batch, self._max_queue, self._wait_s = max_batch, max_queue, wait_s
        self._waiting: collections.deque[tuple[Any, asyncio.Future[Any]]] = collections.deque()
        self._running: Sequence[asyncio.Future[Any]] = ()
        self._arrived = asyncio.Event()
        self._device = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="device")
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the worker in the running event loop."""
        self._worker = asyncio.create_task(self._work())

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not yet in a batch."""
        return len(self._waiting)

    async def submit(self, request: object) -> Any:
        """The answer to the request. Raises Busy at once if the queue is full, and whatever `answer` raises."""
        if len(self._waiting) >= self._max_queue:
            raise Busy(f"busy: {len(self._waiting)} requests are waiting, which is the limit; try again later")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._arrived.set()
        return await future

    async def close(self) -> None:
        """Stop the worker at once: unanswered requests raise Busy. Does not wait for the running batch."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for future in (*self._running, *(future for _, future in self._waiting)):
            if not future.done():
                future.set_exception(Busy("the server is stopping"))
        self._device.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            requests, self._running = zip(*await self._gather(), strict=True)
            try:
                answers = await loop.run_in_executor(self._device, self._answers, requests)
            finally:
                del requests  # they are large, and the next batch may come much later
            for future, answer in zip(self._running, answers, strict=True):
                if future.done():  # the client has left
                    continue
                if isinstance(answer, Exception):  # the next batch may succeed
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _answers(self, requests: Sequence[object]) -> list[Any]:
        """What is answered to each request, or the error that was raised; runs in the device's thread."""
        try:
            answers = list(self._answer(requests))
            if len(answers) != len(requests):
                raise RuntimeError(f"{len(answers)} answers to {len(requests)} requests")
            return answers
        except Exception as error:
            if len(requests) == 1:
                return [error]
        return [answer for request in requests for answer in self._answers([request])]

    async def _gather(self) -> list[tuple[Any, asyncio.Future[Any]]]:
        """The next batch: at least one request."""
        await self._until(1, None)
        await self._until(min(self._max_batch, self._num_clients()), time.monotonic() + self._wait_s)
        taken = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
        return [(request, future) for request, future in taken if not future.done()] or await self._gather()

    async def _until(self, count: int, deadline: float | None) -> None:
        """Wait until `count` requests are waiting, or until the deadline."""
        while len(self._waiting) < count:
            self._arrived.clear()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return
