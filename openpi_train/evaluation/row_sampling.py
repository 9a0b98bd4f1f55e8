"""`RowSampling`: what a policy draws for observations of this process, computed by all devices of a plan together.

Every device always computes on the same number of rows, padded with empty ones, and a row always has the same position:
so results do not depend on the number of processes, bit for bit. Read next: `closed_loop_success.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from openpi_train.data.core.placement import from_devices, local_rows, on_devices
from openpi_train.evaluation.measure import TrainerView
from openpi_train.evaluation.sums import CompiledPrograms
from openpi_train.parallel.params import Params, merge_module
from openpi_train.types import Observation
from openpi_train.types import observation as observation_of

# (model, observations, a key per row) -> what is drawn: an array, or a tree of arrays, with rows on the first axis.
Draw = Callable[[Any, Observation, Key[Array, " b"]], Any]


class RowSampling:
    """Draws for batches of rows.

    Attributes: `batch_size`, the rows over all devices; `rows`, those of this process.
    """

    def __init__(self, trainer: TrainerView, draw: Draw, *, rows_per_device: int):
        self._trainer = trainer
        self.batch_size = rows_per_device * trainer.plan.num_row_groups
        self.rows = local_rows(trainer.plan.batch, self.batch_size)
        self._programs = CompiledPrograms({"policy": program(trainer, draw)})

    def __call__(self, params: Params, columns: Mapping[str, np.ndarray], keys: Key[Array, " b"]) -> Any:
        """What is drawn for this process's rows, and for empty ones if there are fewer.

        All processes must call it equally often.
        """
        batch = observation_of({name: self._placed(column) for name, column in columns.items()})
        data = self._placed(np.asarray(jax.random.key_data(keys)))
        return jax.tree.map(from_devices, self._programs("policy", params, batch, data))

    def _placed(self, column: np.ndarray) -> jax.Array:
        filled = np.zeros((len(self.rows), *column.shape[1:]), column.dtype)
        filled[: len(column)] = column
        return on_devices(filled, self._trainer.plan.batch, self.batch_size, self.rows)


def program(trainer: TrainerView, draw: Draw) -> Callable[[Params, Observation, Any], Any]:
    """What draws for rows on all devices: a function of parameters by path, observations, and the data of a key per
    row.
    """

    def drawn(params: Params, observation: object, key_data: object) -> Any:
        def share(params, batch, rest):
            model: Any = merge_module(trainer.graphdef, params)
            observation, data = batch
            return draw(model, observation, jax.random.wrap_key_data(data))

        return trainer.devices.rows(share, params, (observation, key_data), None)

    return drawn
