"""A run that is no robot's, in one file: its own data, batch, model, objective and evaluation, and nothing else."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from openpi_train.data.core.feed import RowFeed
from openpi_train.data.core.interface import Data, OpenedData, RowSource
from openpi_train.evaluation.measure import Evaluations
from openpi_train.evaluation.sums import Ratio
from openpi_train.experiment import Experiment
from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.objective import Objective
from openpi_train.optim import LRSchedule
from openpi_train.parallel.strategy import ShardingConfig
from openpi_train.types import pytree, tree_of

WIDTH, INPUTS = 16, 6


@pytree
class Pairs:
    """Points and their labels; rows that do not count only fill a batch."""

    points: Float[Array, "b n"]
    labels: Bool[Array, " b"]
    counts: Bool[Array, " b"]
    row: Int[Array, " b"]


@dataclasses.dataclass(frozen=True)
class Points(RowSource):
    """Points inside and outside of a ball, each by its number."""

    num_samples: int
    first: int
    spec: ClassVar = {"points": ((INPUTS,), "float32"), "labels": ((), "bool"), "counts": ((), "bool")}

    @property
    def identity(self):
        return {"points": [self.first, self.num_samples]}

    def batch(self, positions):
        numbers = self.first + positions % self.num_samples
        points = np.stack([np.random.default_rng(number).normal(size=INPUTS) for number in numbers.tolist()])
        labels = np.square(points).sum(-1) < INPUTS
        return {"points": points.astype(np.float32), "labels": labels, "counts": np.ones(len(points), bool)}, []


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedPoints(OpenedData):
    def rows(self, first):
        return Points(self.num_samples, first)

    def feed(self, first=0, **how):
        return RowFeed(self.rows(first), **how, assemble=lambda columns: tree_of(Pairs, **columns))

    def held_out(self, num_rows, batch_size, sharding):
        feed = self.feed(first=1_000_000, batch_size=batch_size, sharding=sharding)
        return feed.first(num_rows, lambda batch, real: dataclasses.replace(batch, counts=batch.counts & real))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointData(Data):
    num_points: int = 100

    def batch_spec(self, model, batch_size):
        spec = {**Points.spec, "row": ((), "int32")}
        shapes = {name: jax.ShapeDtypeStruct((batch_size, *shape), dtype) for name, (shape, dtype) in spec.items()}
        return tree_of(Pairs, **shapes)

    def open(self, request):
        return OpenedPoints(num_samples=self.num_points)


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.inputs, self.outputs = nnx.Linear(INPUTS, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, points):
        return self.outputs(jnp.tanh(self.inputs(points)))[:, 0]


class ClassifierConfig(ModelConfig):
    def build(self, rngs):
        return Classifier(rngs)


class LogLoss(Objective):
    def norms(self, batch):
        return {"rows": batch.counts.sum().astype(jnp.float32)}

    def loss(self, model, batch, norms, keys, train=True):
        margin = model(batch.points) * jnp.where(batch.labels, 1.0, -1.0)
        loss = (jax.nn.softplus(-margin) * batch.counts).sum() / norms["rows"]
        return loss, {"loss": loss}


def hits(model, batch, first):
    return (((model(batch.points) > 0) == batch.labels) & batch.counts).sum(), batch.counts.sum()


class Accuracy(Evaluations):
    def measures(self, running):
        return [Ratio(running, "accuracy", hits)]


own = Experiment(
    model=ClassifierConfig(), objective=LogLoss(), data=PointData(), eval=Accuracy(interval=4, num_rows=50),
    batch_size=16, grad_accum=2, num_train_steps=8, save_interval=4, log_interval=1, num_workers=0, ema_decay=None,
    lr_schedule=LRSchedule(warmup_steps=1, peak_lr=0.05, decay_steps=8, decay_lr=0.01),
    sharding=ShardingConfig(strategy="zero3", min_shard_mib=0),
)  # fmt: skip
"""Points inside and outside of a ball."""
