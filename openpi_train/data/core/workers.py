"""Code of the data worker processes: local batches by number. Must import neither jax nor a dataset library.

Read next: `feed.py`, which starts the workers.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
from absl import flags

from openpi_train.data.core.interface import RowSource

# grain reads absl flags in its workers and in the process that starts them; absl requires them to be parsed first, but
# our entry points do not parse them. (UnparsedFlagAccessError; seen with grain 0.2.18.)
if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()

_ENDLESS = 1 << 40
# These go to the whole process group, and only the main process decides how to react.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class LocalBatches:
    """A grain data source: element k is this process's part of batch k behind the first `rows_before` rows.

    `row_numbers` are the rows of the global batch that this process's devices hold.
    """

    def __init__(self, rows: RowSource, batch_size: int, row_numbers: np.ndarray, rows_before: int = 0):
        self.rows, self.batch_size, self.row_numbers, self.rows_before = rows, batch_size, row_numbers, rows_before

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: Any) -> dict[str, Any]:
        first = self.rows_before + int(index) * self.batch_size
        columns, skipped = self.rows.batch(first + self.row_numbers)
        columns = self.rows.cut(columns, first + np.arange(self.batch_size))
        return {"columns": columns | {"row": self.row_numbers.astype(np.int32)}, "skipped": skipped}


def start_worker(index: int, count: int) -> None:
    """Initialise a worker: ignore stop signals, and exit when the parent process ends, however it ends.

    Slurm sends signals to every process of a job, but the main process still needs batches to finish its step.
    """
    del index, count
    for signum in _STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def block_stop_signals() -> None:
    """Block stop signals in this thread and in the processes it starts, until `start_worker` ignores them."""
    # Started first, because its start would unblock the signals.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
