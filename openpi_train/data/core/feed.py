"""Data loading: workers make this process's rows, and one global array is assembled per entry, one step ahead.

The feed's only state is the step and the number of rows before it: they say which rows follow, so `seek` is an
assignment. The rows before a step are `batch_size` times the step, unless the run went on with another batch size.
Read next: `robot/rows.py`, which makes the rows, and `training/loop.py`, which consumes the batches.
"""

import concurrent.futures
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

# Imported here and not where it is used, in a thread: while grain is imported, etils makes every import of the process
# lazy, and jax, which imports inside functions, fails in whatever the main thread traces meanwhile (observed once).
import grain
import jax
import numpy as np

from openpi_train.data.core.interface import Feed, RowSource
from openpi_train.data.core.placement import local_rows, on_devices
from openpi_train.data.core.source import BadRecord
from openpi_train.data.core.tuning import WorkerTuner, usable_cores
from openpi_train.data.core.workers import LocalBatches, block_stop_signals, start_worker
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import DataError
from openpi_train.runtime.passing_errors import patiently
from openpi_train.types import action_batch

logger = logging.getLogger(__name__)

# Number of batches that a worker (or, without workers, all reading threads together) may prefetch.
_BATCHES_AHEAD = 2
_MAX_THREADS = 16
_MEASURED_ROWS = 32
# Files that a message lists.
_LISTED = 3
_SHARED_MEMORY = Path("/dev/shm")


class RowFeed(Feed):
    """Global batches of `batch_size` rows, distributed over the devices by `sharding` (of the batch axis).

    Each process reads only the rows that its devices hold. `num_workers` 0 reads in threads, N in N processes (started
    by spawning, so the main module must be importable), "auto" in as many as are needed (see `tune`), leaving one of
    `cores` (None: all usable cores) to the loop. `assemble` makes the batch from the named global arrays.

    Raises ValueError if the devices do not divide the batch, DataError if /dev/shm is too small for the workers. Call
    it from one thread; `close` when done.
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        batch_size: int,
        sharding: jax.sharding.Sharding,
        num_workers: int | Literal["auto"] = 0,
        cores: int | None = None,
        assemble: Callable[[dict[str, jax.Array]], object] = action_batch,
    ):
        self._rows, self._batch_size, self._sharding = rows, batch_size, sharding
        self._assemble = assemble
        self._row_numbers = local_rows(sharding, batch_size)
        self._num_workers = 0 if num_workers == "auto" else num_workers
        self._tuner: WorkerTuner | None = None
        self._step = self._tuned_step = 0
        # The step that this start continues from, and the rows of all steps up to it.
        self._began_at = (0, 0)
        self._iterator: Any = None
        self._ahead: concurrent.futures.Future | None = None
        self._transfer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="feed")
        if num_workers == "auto":
            cores = usable_cores() if cores is None else cores
            self._tuner = WorkerTuner(max(0, min(cores - 1, self._workers_with_room())))
        elif num_workers:
            self._check_shared_memory()

    def start(self) -> None:
        """Start to load the next batch in the background, so that workers start while the step is being compiled."""
        if self.reads_ahead:
            self._ahead = self._ahead or self._transfer.submit(self._load)

    def next(self, state: object = None) -> Any:
        """The batch of the next step. All processes must call it the same number of times; it does not communicate.

        Raises DataError if the data cannot be read or do not fit the model; the position is then unchanged.
        """
        del state  # offline data does not depend on the policy
        started = time.monotonic()
        if not self.reads_ahead:
            self._stop_reading()
            batch = self.batch(self._step)
            self.wait_s += time.monotonic() - started
            self._step += 1
            return batch
        try:
            batch, skipped = patiently(self._read_ahead, "reading the data")
        except (ValueError, BadRecord) as error:
            raise DataError(str(error)) from error
        self.wait_s += time.monotonic() - started
        self._count(skipped)
        self._step += 1
        self._ahead = None
        self.start()
        return batch

    def _read_ahead(self) -> tuple[Any, list[str]]:
        """The batch that is read in the background; after an error it is read anew."""
        self.start()
        assert self._ahead is not None
        try:
            return self._ahead.result()
        except Exception:
            self._stop_reading()
            raise

    def tune(self, *, step_s: float, wait_s: float) -> None:
        """Report the duration of the steps since the last call and their wait for data; "auto" may then add workers."""
        num_steps, self._tuned_step = self._step - self._tuned_step, self._step
        if self._tuner is not None and self._tuner.look(num_steps, step_s, wait_s, self._read_s):
            self._stop_reading()
            self._num_workers = self._tuner.num_workers
            self.start()

    def batch(self, step: int) -> Any:
        """The batch of any step, made in this thread; the position is unchanged. For evaluation on fixed rows."""
        try:
            element = LocalBatches(self._rows, self._batch_size, self._row_numbers, self._rows_before(step))[0]
        except (ValueError, BadRecord) as error:
            raise DataError(str(error)) from error
        self._count(element["skipped"])
        return self._on_devices(element["columns"])

    def first(self, num_rows: int, mask: Callable[[Any, Any], object]) -> list[Any]:
        """The first `num_rows` rows, or all if there are fewer, as batches, always the same; the position is unchanged.

        `mask(batch, real)` is compiled and returns the batch with the rows masked where `real` [b] is False, which fill
        up the last batch.
        """
        num_rows = min(num_rows, self._rows.num_samples)

        @jax.jit
        def mask_filler(batch, start):
            return mask(batch, batch.row + start < num_rows)

        starts = range(0, num_rows, self._batch_size)
        return [mask_filler(self.batch(index), start) for index, start in enumerate(starts)]

    def position(self) -> dict[str, Any]:
        files = {"files": dict(self._rows.sources)} if self._rows.sources else {}
        rows_before = self._rows_before(self._step)
        # Runs that have had one batch size have no entry.
        seen = {} if rows_before == self._step * self._batch_size else {"rows": rows_before}
        return {"step": self._step, "batch_size": self._batch_size, **seen, "data": self._rows.identity, **files}

    def seek(self, position: JsonObject) -> None:
        changed = differences({"data": position["data"]}, {"data": self._rows.identity})
        if changed:
            raise ValueError(
                "the data position belongs to other data than this run's, so its rows cannot be continued:\n  "
                + "\n  ".join([*changed, *changed_files(position.get("files"), self._rows.sources)])
                + "\nrestore these settings, or start a new run from the checkpoint's weights"
            )
        rows_before = rows_of(position)
        if position["batch_size"] != self._batch_size:
            logger.info(
                "data: the run had batches of %d rows and goes on with %d, behind the %d rows that it has seen",
                *(position["batch_size"], self._batch_size, rows_before),
            )
        self._stop_reading()
        self._step = self._tuned_step = int(position["step"])
        self._began_at = (self._step, rows_before)

    def rows(self, step: int) -> list[str]:
        """Dataset, file, episode and control step of every row of the global batch at `step`; empty if it may have had
        another size."""
        if step < self._began_at[0] and self._rows_before(0):
            return []
        return self._rows.describe(self._rows_before(step) + np.arange(self._batch_size))

    def proportions(self) -> dict[str, float]:
        """Each dataset's share of all rows up to the current step; at step 0, of the first batch."""
        return self._rows.proportions(self._rows_before(self._step) or self._batch_size)

    def close(self) -> None:
        self._stop_reading()
        self._transfer.shutdown()

    def _rows_before(self, step: int) -> int:
        """The number of rows of all steps before this one."""
        first_step, rows_before = self._began_at
        return rows_before + (step - first_step) * self._batch_size

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            concurrent.futures.wait([self._ahead])
            self._ahead = None
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _load(self) -> tuple[Any, list[str]]:
        if self._iterator is None:
            self._iterator = self._start_reading(self._step)
        element = next(self._iterator)
        return self._on_devices(element["columns"]), element["skipped"]

    def _start_reading(self, start: int) -> Any:
        source = LocalBatches(self._rows, self._batch_size, self._row_numbers, self._rows_before(start))
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        threads = max(1, threads // self._num_workers) if self._num_workers else threads
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(_BATCHES_AHEAD, threads))
        dataset = grain.MapDataset.source(source).to_iter_dataset(options)
        if self._num_workers:
            block_stop_signals()
            # Spawned workers read whole batches in turn, so their number does not change the batches.
            workers = grain.MultiprocessingOptions(num_workers=self._num_workers, per_worker_buffer_size=_BATCHES_AHEAD)
            dataset = dataset.mp_prefetch(workers, worker_init_fn=start_worker)
        return iter(dataset)

    def _check_shared_memory(self) -> None:
        """Raise DataError if /dev/shm is too small: workers die of SIGBUS if it is full (often 64 MB in containers)."""
        needed = self._worker_bytes() * self._num_workers
        if _SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(_SHARED_MEMORY).free) < needed:
            raise DataError(
                f"{self._num_workers} data workers need about {needed >> 20} MB of {_SHARED_MEMORY}, which has "
                f"{free >> 20} MB free; use --num-workers 0 (threads), or enlarge it (docker: --shm-size)"
            )

    def _worker_bytes(self) -> int:
        """Bytes of shared memory that one worker needs."""
        row_bytes = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self._rows.spec.values())
        return row_bytes * len(self._row_numbers) * (_BATCHES_AHEAD + 2)

    def _workers_with_room(self) -> int:
        """Number of workers that fit into half of the free shared memory, which the processes of a host share."""
        free = shutil.disk_usage(_SHARED_MEMORY).free // 2 if _SHARED_MEMORY.is_dir() else 0
        return free // self._worker_bytes()

    def _read_s(self) -> float:
        """CPU seconds that one thread needs for this process's rows of a batch, measured on rows already read."""
        numbers = self._row_numbers[:_MEASURED_ROWS]
        began = time.thread_time()
        self._rows.batch(self._rows_before(max(self._step - 1, self._began_at[0])) + numbers)
        return (time.thread_time() - began) * len(self._row_numbers) / len(numbers)

    def _on_devices(self, columns: dict[str, np.ndarray]) -> Any:
        # CPU devices would use a worker's shared memory in place, and hold it as long as the batch lives.
        in_place = self._num_workers and any(device.platform == "cpu" for device in self._sharding.device_set)

        def place(values: np.ndarray) -> jax.Array:
            values = np.array(values) if in_place else values
            return on_devices(values, self._sharding, self._batch_size, self._row_numbers)

        return self._assemble({name: place(values) for name, values in columns.items()})

    def _count(self, skipped: list[str]) -> None:
        for message in skipped:
            self.bad_records += 1
            logger.warning("bad record %d, row replaced: %s", self.bad_records, message)


def rows_of(position: JsonObject) -> int:
    """The number of rows that a run has seen at this `position` of its `RowFeed`."""
    return int(position.get("rows", position["step"] * position["batch_size"]))


def changed_files(saved: Mapping[str, str] | None, present: Mapping[str, str]) -> list[str]:
    """A line for each way in which `RowSource.sources` differ, with the first files; none if `saved` is not known."""
    if saved is None:
        return []
    kinds = {
        "of other content than then": [name for name in saved if present.get(name, saved[name]) != saved[name]],
        "not there any more": [name for name in saved if name not in present],
        "new": [name for name in present if name not in saved],
    }
    return [f"files that are {kind}: {_listed(names)}" for kind, names in kinds.items() if names]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


# Texts up to so many characters are shown whole.
_LONG = 200


def differences(saved: object, present: object, path: str = "") -> list[str]:
    """One line for every entry in which two JSON values differ."""
    if isinstance(saved, dict) and isinstance(present, dict):
        names = sorted({*saved, *present})
        return [line for name in names for line in differences(saved.get(name), present.get(name), f"{path}.{name}")]
    if isinstance(saved, list) and isinstance(present, list) and len(saved) == len(present):
        pairs = enumerate(zip(saved, present, strict=True))
        return [line for number, (a, b) in pairs for line in differences(a, b, f"{path}.{number}")]
    if saved == present:
        return []
    if isinstance(saved, str) and isinstance(present, str) and len(saved) > _LONG:
        saved, present = _cut(saved, present)
    return [f"{path.lstrip('.')}: then {saved!r}, now {present!r}"]


def _cut(first: str, second: str, kept: int = 40) -> tuple[str, str]:
    """Both from `kept` characters before they differ to as many behind, such as two robots with one other field."""

    def alike(left: str, right: str) -> int:
        pairs = enumerate(zip(left, right, strict=False))
        return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))

    start = alike(first, second)
    end = alike(first[start:][::-1], second[start:][::-1])
    start, end = max(start - kept, 0), max(end - kept, 0)

    def part(text: str) -> str:
        return ("..." if start else "") + text[start : len(text) - end] + ("..." if end else "")

    return part(first), part(second)
