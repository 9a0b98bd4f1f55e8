"""A run that starts in a fraction of a transformer's time: for tests of processes, checkpoints and faults.

On the command line it is `SMALL`, and its directory `runs/small/x`. `--data.pause-s 0.05` makes steps long without
keeping a processor busy. `--data.fault` does harm to the process `--data.process`.
"""

import dataclasses
import os
import signal
import time
from pathlib import Path

import orbax.checkpoint as ocp
from flax import nnx
from runs import own_experiment

from openpi_train.evaluation import held_out_loss
from openpi_train.evaluation.measure import Evaluations
from openpi_train.models.model_config import ModelConfig
from openpi_train.parallel.strategy import ShardingConfig
from openpi_train.training import device_speed, run

SMALL = f"{Path(__file__).resolve()}:small"
WIDTH = 256
# The rows that are read before a fault.
READ = 40
# Of step 23, if a batch has 8 rows.
POISONED_ROW = 8 * 22 + 5


@dataclasses.dataclass(frozen=True)
class PausingPoints(own_experiment.Points):
    pause_s: float
    fault: str
    # Rows that were read.
    read: list = dataclasses.field(default_factory=list)

    def batch(self, positions):
        time.sleep(self.pause_s)
        self.read.extend(positions)
        if len(self.read) > READ and self.fault == "raises":
            raise RuntimeError("the camera is broken")
        if len(self.read) > READ and self.fault == "hangs":
            time.sleep(600)
        if self.fault == "is slow":
            time.sleep(0.3)
        if self.fault == "kills" and POISONED_ROW in positions:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.fault == "waits" and POISONED_ROW in positions and not Path(os.environ["GATE"]).exists():
            time.sleep(0.05)
        if self.fault == "hangs at first step" and self.first == 0:
            time.sleep(600)
        return super().batch(positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedPausingPoints(own_experiment.OpenedPoints):
    pause_s: float
    fault: str

    def rows(self, first):
        return PausingPoints(self.num_samples, first, self.pause_s, self.fault)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PausingPointData(own_experiment.PointData):
    pause_s: float = 0.0
    # "slow to open", "save fails", "one save fails", "raises", "hangs", "kills", "waits", "is slow", "is busy",
    # and "hangs at " with a place below
    fault: str = ""
    process: str = "1"

    def open(self, request):
        fault = self.fault if os.environ.get("RANK", "") == self.process else ""
        if fault == "slow to open":
            print("the dataset is being opened", flush=True)
            time.sleep(600)
        if self.fault in ("is slow", "is busy"):  # and the device of another process
            _time_products(0.5 * (os.environ.get("RANK", "") == "2"))
        if fault == "is busy":
            note = run.Run.note
            run.Run.note = lambda *arguments: (time.sleep(0.3), note(*arguments))
        if fault == "hangs at opening":
            time.sleep(600)
        if fault == "hangs at evaluation":
            held_out_loss.HeldOutLoss.__call__ = lambda *arguments: time.sleep(600)
        if fault == "hangs at save":
            ocp.PyTreeCheckpointHandler.save = lambda *arguments, **named: time.sleep(600)
        if fault in ("save fails", "one save fails"):
            write = ocp.PyTreeCheckpointHandler.save

            def fail(*arguments, **named):
                if fault == "one save fails":
                    ocp.PyTreeCheckpointHandler.save = write
                raise OSError(5, "Input/output error")

            ocp.PyTreeCheckpointHandler.save = fail
        return OpenedPausingPoints(num_samples=self.num_points, pause_s=self.pause_s, fault=fault)


def _time_products(more_s: float) -> None:
    """Time small products of the processors at each log interval, as if they took longer by this."""
    timed = device_speed.timed
    device_speed.EVERY_S, device_speed.SIZE = 0.0, 16
    device_speed.num_products = lambda kind: 1
    device_speed.timed = lambda products: [1.0 + more_s + 1e-3 * seconds for seconds in timed(products)]
    device_speed.gpu_state = lambda gpu: f"GPU {gpu} is hot"


class WideClassifierConfig(ModelConfig):
    """Large enough that halves of its parameters are told from the whole."""

    def build(self, rngs):
        module = own_experiment.Classifier(rngs)
        module.inputs = nnx.Linear(own_experiment.INPUTS, WIDTH, rngs=rngs)
        module.outputs = nnx.Linear(WIDTH, 1, rngs=rngs)
        return module


small = dataclasses.replace(
    own_experiment.own,
    model=WideClassifierConfig(),
    data=PausingPointData(),
    eval=Evaluations(interval=0, num_rows=8),
    sharding=ShardingConfig(),
    batch_size=8,
    grad_accum=1,
    num_train_steps=10,
    save_interval=5,
    ema_decay=0.99,
)
"""Points inside and outside of a ball."""
