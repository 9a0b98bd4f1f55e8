"""Collects what steps report, without waiting for the devices, and reads it once per log interval.

Read next: `loop.py`, `metrics.py` (where the lines go).
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from openpi_train.runtime.exits import NumbersError

# How many steps the host may be ahead of the devices: enough to hide dispatch, few enough to bound queued batches.
MAX_STEPS_AHEAD = 2


class Recorder:
    """Metrics of the steps since the last read, and the time they took."""

    def __init__(
        self,
        *,
        batch_size: int,
        flops_per_step: float,
        peak_flops: float | None,
        wait_s: Callable[[], float],
        row_names: Callable[[int], list[str]],
        stop_on_nan: bool,
    ):
        """`flops_per_step` are the model's own (forward and backward, no recomputation); `peak_flops` all devices'.

        `wait_s()` is the total time that the loop waited for data so far; `row_names(step)` names a batch's rows.
        """
        self._batch_size = batch_size
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops
        self._wait_s = wait_s
        self._row_names = row_names
        self._stop_on_nan = stop_on_nan
        self._pending: dict[int, Any] = {}
        self._ahead: collections.deque[Any] = collections.deque()
        self.num_skipped = 0
        self.restart_clock()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note a step's metrics (device arrays). Blocks only while the devices are far behind."""
        self._pending[step] = metrics
        self._ahead.append(metrics["loss"])
        if len(self._ahead) > MAX_STEPS_AHEAD:
            jax.block_until_ready(self._ahead.popleft())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in here (evaluation, saving) is not counted as step time."""
        started = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - started

    def restart_clock(self) -> None:
        """Start timing now: compiling the first step is no step time."""
        self._started, self._waited, self._paused_s = time.perf_counter(), self._wait_s(), 0.0
        self._last = self._started

    def last_step_s(self) -> float:
        """Seconds since the call before, or since the clock was restarted."""
        before, self._last = self._last, time.perf_counter() - self._paused_s
        return self._last - before

    def read(self) -> dict[str, float | None]:
        """Means over the steps since the last read; `mfu` is None where the devices' peak is unknown.

        Raises NumbersError where an update was NaN or Inf.
        """
        values = jax.device_get(self._pending)
        elapsed = time.perf_counter() - self._started - self._paused_s
        waited = self._wait_s() - self._waited
        self._pending = {}
        self._ahead.clear()
        self.restart_clock()
        self._check(values)
        good = [metrics for metrics in values.values() if not metrics["skipped"]]
        count = len(values)
        result: dict[str, float | None] = {
            name: sum(float(metrics[name]) for metrics in good) / len(good)
            for name in (good[0] if good else {})
            if name != "skipped"
        }
        step_s = elapsed / count
        result |= {
            "time/step_s": step_s,
            "data/wait_s": waited / count,
            "samples_per_s": self._batch_size / step_s,
            "mfu": self._flops_per_step / step_s / self._peak_flops if self._peak_flops else None,
            "skipped_steps": float(self.num_skipped),
        }
        return result

    def check(self) -> None:
        """Raise NumbersError now if a step since the last read was bad; before anything is saved."""
        self._check(jax.device_get(self._pending), count=False)

    def _check(self, values: Mapping[int, Mapping[str, Any]], count: bool = True) -> None:
        bad = [step for step, metrics in values.items() if metrics["skipped"]]
        if count:
            self.num_skipped += len(bad)
        if bad and self._stop_on_nan:
            step, metrics = bad[0], values[bad[0]]
            rows = "\n  ".join(self._row_names(step - 1))
            raise NumbersError(
                f"step {step}: loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}. The update "
                "was not applied. Lower --lr-schedule.peak-lr, look at the rows below, or go on with --on-nan skip.\n"
                f"Rows of the batch:\n  {rows}"
            )
