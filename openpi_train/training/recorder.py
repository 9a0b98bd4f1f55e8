"""Collects metrics of steps without waiting for the devices, and reads them once per log interval.

Read next: `loop.py`, `metrics.py` (where the lines go), `docs/reference/metrics.md` (what each number is).
"""

import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from openpi_train.json_object import JsonObject
from openpi_train.runtime import step_times
from openpi_train.runtime.exits import NumbersError
from openpi_train.training.lateness import Lateness
from openpi_train.training.program import Program
from openpi_train.training.time_split import Part, TimeSplit
from openpi_train.types import Tree

logger = logging.getLogger(__name__)

# How many steps the host may be ahead of the devices: enough to hide dispatch, few enough to limit queued batches.
MAX_STEPS_AHEAD = 2
# Metrics for which a mean over steps is meaningless.
_STATES = ("skipped", "overflow", "loss_scale", "tokens")


class Recorder:
    """Metrics of the steps since the last read, and the time they took."""

    def __init__(
        self,
        *,
        batch_size: int,
        peak_flops: float | None,
        counted_s: Mapping[Part, Callable[[], float]],
        row_names: Callable[[int], list[str]],
        stop_on_nan: bool,
        unread: JsonObject | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`peak_flops` is the sum over all devices, None if unknown.

        `counted_s` gives the total time so far of parts that others measure, with `data`; `row_names(step)` names a
        batch's rows. `unread` is the result of `unread()` when the state that the run continues from was saved.
        """
        self._batch_size = batch_size
        self._peak_flops = peak_flops
        self._row_names = row_names
        self._stop_on_nan = stop_on_nan
        self._pending: dict[int, Any] = {}
        self._programs: list[Program] = []
        self._ahead: collections.deque[Any] = collections.deque()
        unread = unread or {"steps": [], "skipped_steps": 0, "tokens": 0.0}
        # From the start before this one. JSON cannot represent non-finite values: they are strings that `float` reads.
        self._before = [{name: float(value) for name, value in step.items()} for step in unread["steps"]]
        self.num_skipped: int = unread["skipped_steps"]
        # None: the start before this one was of a version that did not count them.
        self._tokens: float | None = unread.get("tokens")
        self._split = TimeSplit(counted_s, clock)
        self._counted_s = counted_s
        self.lateness = Lateness()
        self._num_steps = 0
        self._last_step_at = 0.0

    def add(self, step: int, metrics: Mapping[str, object], program: Program | None = None) -> None:
        """Record a step's metrics (device arrays) and program. Blocks only while the devices are far behind."""
        self._pending[step] = metrics
        self._programs += [] if program is None else [program]
        self._ahead.append(metrics["loss"])
        self._num_steps += 1
        data_s = self._counted_s["data"]() if "data" in self._counted_s else 0.0
        step_times.note(steps=self._num_steps, late_s=self.lateness.late_s, data_s=data_s)
        if len(self._ahead) > MAX_STEPS_AHEAD:
            with self._split.of("device"):
                jax.block_until_ready(self._ahead.popleft())

    def begin(self) -> None:
        """Start timing: the first step begins now."""
        self._last_step_at = 0.0
        self._split.restart()

    def paused(self, part: Part) -> contextlib.AbstractContextManager[None]:
        """Time spent in here, evaluating or saving, is not counted as step time."""
        self.lateness.pause()
        return self._split.of(part)

    def wait(self) -> None:
        """Wait until the devices have finished all steps so far."""
        with self._split.of("device"):
            jax.block_until_ready(list(self._ahead))

    def last_step_s(self) -> float:
        """Seconds since the call before, or since the last `read`."""
        before, self._last_step_at = self._last_step_at, self._split.stepping_s()
        return self._last_step_at - before

    def read(self) -> dict[str, float | None]:
        """Means over the steps since the last read, and where their time went.

        `loss_scale` is that of the last step. Raises NumbersError if an update was NaN or Inf, unless the loss scale
        handles it.
        """
        with self._split.of("device"):
            values = jax.device_get(self._pending)
        parts, stepping_s = self._split.lap()
        self._pending, self._last_step_at = {}, 0.0
        self._ahead.clear()
        self._check(values)
        good, self._before = [*self._before, *_good(values)], []
        last: Mapping[str, Any] = next(reversed(values.values()), {})
        result: dict[str, float | None] = {
            name: sum(metrics[name] for metrics in good) / len(good)
            for name in (good[-1] if good else {})
            if all(name in metrics for metrics in good)
        }
        if "loss_scale" in last:
            result["loss_scale"] = float(last["loss_scale"])
        if "tokens" in last:
            tokens = _tokens(values)
            result["tokens_per_s"] = tokens / stepping_s
            if self._tokens is not None:
                self._tokens += tokens
                result["tokens"] = self._tokens
        return result | self._speed(parts, stepping_s, len(values)) | {"skipped_steps": float(self.num_skipped)}

    def _speed(self, parts: Mapping[str, float], stepping_s: float, num_steps: int) -> dict[str, float | None]:
        """The interval's times and rates; `mfu` and `hfu` are None if the peak is unknown."""
        interval_s, step_s = sum(parts.values()), stepping_s / num_steps
        programs, self._programs = self._programs, []
        possible = stepping_s * self._peak_flops if self._peak_flops and programs else None
        return {
            "time/step_s": step_s,
            "data/wait_s": parts["data"] / num_steps,
            "time/interval_s": interval_s,
            **{f"time/{part}_share": seconds / interval_s for part, seconds in parts.items()},
            "samples_per_s": self._batch_size / step_s,
            "mfu": sum(program.model_flops for program in programs) / possible if possible else None,
            "hfu": sum(program.executed_flops for program in programs) / possible if possible else None,
        }

    def unread(self) -> dict[str, Any]:
        """The values, as JSON, with which a run that continues from here writes the same next line, except for
        times."""
        values = jax.device_get(self._pending)
        num_skipped = sum(bool(metrics["skipped"]) for metrics in values.values())
        steps = [
            {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
            for metrics in (*self._before, *_good(values))
        ]
        unread = {"steps": steps, "skipped_steps": self.num_skipped + num_skipped}
        return unread if self._tokens is None else {**unread, "tokens": self._tokens + _tokens(values)}

    def check(self) -> None:
        """Raise NumbersError now if a step since the last read was bad; before anything is saved."""
        with self._split.of("device"):
            values = jax.device_get(self._pending)
        self._check(values, count=False)

    def _check(self, values: Mapping[int, Mapping[str, Tree]], count: bool = True) -> None:
        skipped = {step: metrics for step, metrics in values.items() if metrics["skipped"]}
        if count:
            self.num_skipped += len(skipped)
            if len(skipped) == len(values) > 1:
                logger.warning(
                    "no update was applied in the last %d steps: the gradient overflowed in each. If the loss scale "
                    "does not come down to what fits, lower --loss-scaling.initial or --lr-schedule.peak-lr, or use "
                    "--model.dtype bfloat16",
                    len(values),
                )
        bad = [step for step, metrics in skipped.items() if not metrics.get("overflow")]
        if bad and self._stop_on_nan:
            step, metrics = bad[0], values[bad[0]]
            scale = " at the least --loss-scaling.minimum" if "loss_scale" in metrics else ""
            rows = "\n  ".join(self._row_names(step - 1))
            raise NumbersError(
                f"step {step}: loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}{scale}. The "
                "update was not applied. Lower --lr-schedule.peak-lr, look at the rows, or go on with --on-nan skip.\n"
                f"Rows of the batch:\n  {rows}"
            )


def _good(values: Mapping[int, Mapping[str, Tree]]) -> list[dict[str, float]]:
    """The metrics that enter the means: those of steps whose update was applied."""
    return [
        {name: float(value) for name, value in metrics.items() if name not in _STATES}
        for metrics in values.values()
        if not metrics["skipped"]
    ]


def _tokens(values: Mapping[int, Mapping[str, Tree]]) -> float:
    """The tokens of these steps; 0 of models that have none."""
    return sum(float(metrics.get("tokens", 0.0)) for metrics in values.values())
