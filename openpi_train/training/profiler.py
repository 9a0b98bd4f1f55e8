"""`--profile N`: a trace of N steps in `<run>/profile`, for TensorBoard, XProf or Perfetto.

Read next: `traced_steps.py`, which reads it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from openpi_train.runtime.phases import phase

logger = logging.getLogger(__name__)

# Steps of this start before the traced ones: by then the data workers run ahead.
_STEPS_BEFORE = 3


class Profiler:
    """Traces `num_steps` steps of this process, beginning a few after `first_step`; with 0 steps it does nothing.

    `wait()` returns when the devices have finished all queued steps.
    """

    def __init__(self, directory: Path, num_steps: int, first_step: int, wait: Callable[[], None]):
        self._directory, self._wait = directory, wait
        self._first = first_step + _STEPS_BEFORE
        self._last = self._first + num_steps - 1
        self._waits, self._runs = num_steps > 0, False
        self._traced, self._written = 0, False

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step."""
        if self._waits and step == self._first:
            self._wait()
            self._start()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        self._traced += self._runs
        if step == self._last:
            self._stop()

    @property
    def is_tracing(self) -> bool:
        """Whether what the devices do now is in the trace."""
        return self._runs

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing every Python call would slow the host down
        jax.profiler.start_trace(self._directory, profiler_options=options)
        self._waits, self._runs = False, True

    def close(self) -> None:
        """Write the steps traced so far, if the run ends before the last of them."""
        self._stop()
        if self._waits:
            logger.warning("--profile: the run ended before step %d, where the trace was to begin", self._first)

    def take_trace(self) -> tuple[Path, int] | None:
        """The file of the trace and the number of its steps, once after it is written."""
        if not self._written or not self._traced:
            return None
        self._written = False
        return max(self._directory.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime), self._traced

    def _stop(self) -> None:
        if self._runs:
            self._runs, self._written = False, True
            with phase("writing the profile"):
                self._wait()
                jax.profiler.stop_trace()
            logger.info("wrote a profile to %s (for xprof, or TensorBoard's profile plugin)", self._directory)
