"""Shows progress: a live bar on a terminal, otherwise one log line per interval.

Read next: `metrics.py` (the same numbers in files).
"""

import logging

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from openpi_train.json_object import JsonObject
from openpi_train.runtime.waiting import duration
from openpi_train.training.device_memory import fullest_device

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

    def report(self, values: JsonObject) -> str:
        """The line for the interval since the last report; shown on process 0.

        Args:
            values: metrics. Shown are, where given, `loss`, what `_of_rollouts` takes, `samples_per_s`, `time/step_s`,
                `time/acting_share` and `data/wait_s`.
        """
        parts = [f"step {self._step}/{self._num_steps}"]
        if "loss" in values:
            parts.append(f"loss {float(values['loss']):.4f}")
        parts += _of_rollouts(values)
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
        if (memory := fullest_device()) is not None:
            parts.append(memory.line())
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


def _of_rollouts(values: JsonObject) -> list[str]:
    """What says whether a run on own rollouts learns, which its loss does not; nothing for other runs.

    The reward and its standard deviation, the divergences from the acting policy (`approx_kl`) and from the reference
    (`kl`), and the units of a rollout: each where the run measures it.
    """
    if values.get("rl/reward") is None:
        return []
    spread = values.get("rl/reward_std")
    parts = [f"reward {float(values['rl/reward']):.4g}" + ("" if spread is None else f" +- {float(spread):.2g}")]
    parts += [f"{name} {float(values[name]):.2g}" for name in ("approx_kl", "kl") if values.get(name) is not None]
    if values.get("rl/length_mean") is not None:
        parts.append(f"length {float(values['rl/length_mean']):.1f}")
    return parts
