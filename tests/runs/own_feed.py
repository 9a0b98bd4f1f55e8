"""`own_experiment` with a feed that chooses its batches with the present parameters, for three steps at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from own_experiment import OpenedPoints, Pairs, PointData, Points, own

from openpi_train.data.core.interface import Feed
from openpi_train.data.core.placement import local_rows, on_devices
from openpi_train.parallel.params import merge_module
from openpi_train.types import tree_of

STEPS = 3


class HardPoints(Feed):
    """Of four times as many points as a batch has, those that the classifier is least sure of; each three times."""

    def __init__(self, model, batch_size, sharding, **_):
        self._points, self._batch_size, self._sharding = Points(1000, 0), batch_size, sharding
        self._graphdef = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0]
        self._margins = jax.jit(self._margins_of, out_shardings=jax.sharding.NamedSharding(sharding.mesh, jax.P()))
        self._iteration = self._step = 0

    def _margins_of(self, params, points):
        return jnp.abs(merge_module(self._graphdef, params)(points))

    def next(self, state=None):
        if self._step % STEPS == 0:
            first = self._iteration * 4 * self._batch_size
            columns, _ = self._points.batch(first + np.arange(4 * self._batch_size))
            margins = jax.device_get(self._margins(state.params, columns["points"]))
            hardest = np.sort(np.argsort(margins, kind="stable")[: self._batch_size])
            self._columns = {name: column[hardest] for name, column in columns.items()}
            self._columns["row"] = np.arange(self._batch_size, dtype=np.int32)
            self._iteration += 1
        self._step += 1
        mine = local_rows(self._sharding, self._batch_size)
        place = {name: on_devices(x[mine], self._sharding, self._batch_size, mine) for name, x in self._columns.items()}
        return tree_of(Pairs, **place)

    @property
    def can_be_saved(self):
        return self._step % STEPS == 0

    def position(self):
        return {"iteration": self._iteration}

    def seek(self, position):
        self._iteration, self._step = position["iteration"], 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedHardPoints(OpenedPoints):
    model: Any

    def feed(self, first=0, **how):
        return HardPoints(self.model, **how) if "cores" in how else super().feed(first, **how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardPointData(PointData):
    def open(self, request):
        return OpenedHardPoints(model=request.model, num_samples=self.num_points)


hard = dataclasses.replace(own, data=HardPointData(), num_train_steps=10, keep_last=5)
"""The points that the present parameters find hard."""
