"""One thread that steps a text generator, and hands what it makes to the event loop. Read next: `text_server.py`."""

import asyncio
import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from openpi_train.generation.completion_text import NewText
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.serve.batching import Busy
from openpi_train.serve.openai.api_error import ApiError

logger = logging.getLogger(__name__)

# A step in which nothing is made cannot happen for a request that waits; this keeps a mistake from heating the machine.
_IDLE_S = 0.01


@runtime_checkable
class SteppedTexts(Protocol):
    """What the thread needs of a `TextGenerator`."""

    @property
    def generator(self) -> Any:
        """Its `Generator`: `num_rows`, `num_running`, `num_waiting`."""
        ...

    def submit(
        self, id: Hashable, prompt: Sequence[int], settings: SamplingSettings, *, row: int = 0, num_top: int = 0
    ) -> None:
        """Complete this prompt."""
        ...

    def cancel(self, id: Hashable) -> None:
        """Forget a request."""
        ...

    def step(self) -> list[NewText]:
        """The texts that are new."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedRow:
    """A completion to make."""

    prompt: Sequence[int]
    settings: SamplingSettings
    row: int
    num_top: int


class RowEvents:
    """What comes of the rows of one request, in order: `await next()` gives a row's number and its `NewText`.

    Raises what was given to `fail`, once what came before it is taken.
    """

    def __init__(self, ids: Sequence[int]):
        self._numbers: dict[Any, int] = {id: number for number, id in enumerate(ids)}
        self._queue: asyncio.Queue[tuple[int, NewText] | Exception] = asyncio.Queue()

    @property
    def ids(self) -> Iterator[int]:
        """The identifiers of the rows."""
        return iter(self._numbers)

    def put(self, new: NewText) -> None:
        """Add what a row got."""
        self._queue.put_nowait((self._numbers[new.tokens.id], new))

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._queue.put_nowait(error)

    async def next(self) -> tuple[int, NewText]:
        """The next event."""
        found = await self._queue.get()
        if isinstance(found, Exception):
            raise found
        return found


class GenerationThread:
    """Completes rows with `texts`, which only its thread touches; its methods belong to the event loop's thread.

    Args: `max_waiting` is the most completions that wait for a row. `ran` is told of each step: rows in use, seconds.
    `failed` is called if the generator raises: nothing can be completed any more.
    """

    def __init__(
        self,
        texts: SteppedTexts,
        *,
        max_waiting: int,
        ran: Callable[[int, float], None],
        failed: Callable[[], None],
    ):
        self._texts, self._ran, self._stop = texts, ran, failed
        self._most = texts.generator.num_rows + max_waiting
        self._num_rows = texts.generator.num_rows
        self._ids = itertools.count()
        self._events: dict[int, RowEvents] = {}
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self.error: Exception | None = None

    def start(self) -> None:
        """Start the thread; events come to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_working(self) -> bool:
        """Whether completions can be made."""
        return self.error is None and self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """The completions that have no row yet."""
        return max(0, len(self._events) - self._num_rows)

    @property
    def num_running(self) -> int:
        """The completions that have a row."""
        return min(len(self._events), self._num_rows)

    def check_room(self, count: int) -> None:
        """Raise Busy if there is no room for so many more completions."""
        if len(self._events) + count > self._most:
            raise Busy(
                f"busy: {self.num_waiting} completions are waiting, and {count} more would be beyond the limit of "
                f"{self._most - self._num_rows}; try again later"
            )

    def submit(self, rows: Sequence[AskedRow]) -> RowEvents:
        """Complete the rows. Raises Busy if there is no room for them, ApiError if the generator has failed."""
        self.check_room(len(rows))
        if self.error is not None:
            raise _failed()
        events = RowEvents([next(self._ids) for _ in rows])
        for id, row in zip(events.ids, rows, strict=True):
            self._events[id] = events
            self._command(lambda id=id, row=row: self._submit(id, row))
        return events

    def cancel(self, events: RowEvents) -> None:
        """Free those rows of a request that are not finished."""
        for id in events.ids:
            if self._events.pop(id, None) is not None:
                self._command(lambda id=id: self._texts.cancel(id))

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """End all requests, each with an error of its own: a raised one keeps what its frames hold."""
        for events in dict.fromkeys(self._events.values()):
            self.cancel(events)
            events.fail(error())

    def close(self, wait_s: float) -> bool:
        """Stop the thread; returns whether it ended in this time. The device may be in the middle of a program."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _command(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _submit(self, id: int, row: AskedRow) -> None:
        try:
            self._texts.submit(id, row.prompt, row.settings, row=row.row, num_top=row.num_top)
        except ValueError as error:
            self._call(self._refuse, id, error)

    def _work(self) -> None:
        try:
            while self._obey():
                if self._is_busy:
                    self._step()
        except Exception as error:
            logger.exception("the generator failed: no completion can be made any more")
            self._call(self._break, error)

    def _obey(self) -> bool:
        """Carry out the commands, after waiting for one if there is nothing to do. Returns False if closed."""
        with self._changed:
            while not (self._commands or self._is_busy or self._closed):
                self._changed.wait()
            commands = list(self._commands)
            self._commands.clear()
            if self._closed:
                return False
        for command in commands:
            command()
        return True

    @property
    def _is_busy(self) -> bool:
        return self._texts.generator.num_running + self._texts.generator.num_waiting > 0

    def _step(self) -> None:
        started = time.perf_counter()
        found = self._texts.step()
        seconds = time.perf_counter() - started
        if found:
            self._call(self._tell, found, seconds)
        else:
            time.sleep(_IDLE_S)

    def _call(self, function: Callable[..., None], *given: object) -> None:
        """Call a function in the event loop's thread."""
        try:
            self._loop.call_soon_threadsafe(function, *given)
        except RuntimeError:  # the loop has ended
            logger.info("completions were made that nobody waits for")

    def _tell(self, found: Sequence[NewText], seconds: float) -> None:
        self._ran(len(found), seconds)
        for new in found:
            events = self._events.get(_id(new))
            if events is None:  # cancelled meanwhile
                continue
            if new.tokens.finish_reason is not None:
                del self._events[_id(new)]
            events.put(new)

    def _refuse(self, id: int, error: Exception) -> None:
        if (events := self._events.get(id)) is not None:
            self.cancel(events)
            events.fail(error)

    def _break(self, error: Exception) -> None:
        self.error = error
        self.fail_all(_failed)
        self._stop()


def _failed() -> ApiError:
    return ApiError(500, "the generator failed: see the server's log")


def _id(new: NewText) -> Any:
    return new.tokens.id
