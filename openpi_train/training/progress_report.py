"""Shows progress: a live bar on a terminal, otherwise one log line per interval.

Read next: `metrics.py` (the same numbers in files).
"""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

_MIN_STEPS_FOR_PERCENTILES = 10


class ProgressReport:
    """Shows the progress of a run on process 0. Call `advance` after every step, `report` every log interval.

    Args:
        num_steps: the step at which the run ends.
        start_step: the step it starts from.
        console: where the bar goes if it is a terminal; by default standard error.
    """

    def __init__(self, num_steps: int, *, start_step: int = 0, process_index: int = 0, console: Console | None = None):
        self._num_steps, self._step = num_steps, start_step
        self._step_s: list[float] = []
        self._shows = process_index == 0
        console = console or Console(stderr=True)
        self._bar: Progress | None = None
        if self._shows and console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=num_steps, completed=start_step)
            self._bar.start()

    def advance(self, step: int, *, step_s: float) -> None:
        """Record that `step` steps are done, the last one in `step_s` seconds."""
        self._step = step
        self._step_s.append(step_s)
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, values: Mapping[str, Any]) -> str:
        """The line for the interval since the last report; shown on process 0.

        Args:
            values: metrics. Shown are, where given, `loss`, `samples_per_s`, `time/step_s`, `time/acting_share` and
                `data/wait_s`.
        """
        parts = [f"step {self._step}/{self._num_steps}"]
        if "loss" in values:
            parts.append(f"loss {float(values['loss']):.4f}")
        if "samples_per_s" in values:
            parts.append(f"{float(values['samples_per_s']):.1f} samples/s")
        if "time/step_s" in values:
            step_s = float(values["time/step_s"])
            if "time/acting_share" in values:
                parts.append(f"acting {float(values['time/acting_share']):.0%}")
            parts.append(f"data wait {100 * float(values.get('data/wait_s', 0.0)) / max(step_s, 1e-9):.0f}%")
            # The host runs ahead of the devices by a step or two, so step times are meaningful only over many steps.
            if len(self._step_s) >= _MIN_STEPS_FOR_PERCENTILES:
                half, most = np.percentile(self._step_s, [50, 95])
                parts.append(f"step p50 {1000 * half:.0f} ms p95 {1000 * most:.0f} ms")
            else:
                parts.append(f"step {1000 * step_s:.0f} ms")
            parts.append(f"ETA {duration((self._num_steps - self._step) * step_s)}")
        memory = device_memory()
        if memory:
            parts.append(memory)
        self._step_s = []
        line = " | ".join(parts)
        if self._bar is not None:
            self._bar.update(self._task, description=" | ".join(parts[1:]))
        elif self._shows:
            logger.info("%s", line)
        return line

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """Seconds for people: `42s`, `3m20s`, `2h05m`, `3d04h`."""
    total = max(round(seconds), 0)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{total % 60:02d}s" if minutes else f"{total}s"


def device_memory() -> str:
    """Peak memory of the fullest local device; empty if the platform does not report it (CPU)."""
    found = [device.memory_stats() for device in jax.local_devices()]
    peaks = [(stats["peak_bytes_in_use"], stats.get("bytes_limit", 0)) for stats in found if stats]
    if not peaks:
        return ""
    peak, limit = max(peaks)
    return f"device memory {peak / 2**30:.1f}" + (f"/{limit / 2**30:.1f} GiB" if limit else " GiB")
