"""The values of observations by a trained value function (`objectives/return_distribution.py`).

Read next: `tools/label_advantages.py`, the caller; `sampler.py`, the same for actions.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from openpi_train.nn.return_head import mean_return
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.params import ParamLeaves, merge_module
from openpi_train.policy.policy import Policy
from openpi_train.types import Network, Observation, observation


@dataclasses.dataclass(frozen=True)
class Values:
    """The values that the loaded run `loaded` gives, `batch_size` observations at a time."""

    loaded: Policy
    batch_size: int
    _programs: dict[int, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, observations: Sequence[Mapping[str, object]]) -> np.ndarray:
        """The value of each observation in [-1, 0], float32 [n]. Raises ObservationError as `Policy.infer` does."""
        rows = [self.loaded.prepare(one).row for one in observations]
        found = [self._of_batch(rows[start : start + self.size]) for start in range(0, len(rows), self.size)]
        return np.concatenate(found)

    @property
    def size(self) -> int:
        """`batch_size`, rounded up to a multiple of the number of devices."""
        unit = self.loaded.sampler.plan.num_row_groups
        return -(-self.batch_size // unit) * unit

    def _of_batch(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        sampler = self.loaded.sampler
        filled = [*rows, *[rows[-1]] * (self.size - len(rows))]
        columns = {name: np.stack([row[name] for row in filled]) for name in sampler.row_spec()}
        with jax.set_mesh(sampler.plan.real_mesh):
            seen = jax.device_put(observation(columns), sampler.plan.batch)
            if not self._programs:
                self._programs[self.size] = jax.jit(self._program()).lower(sampler.params, seen).compile()
            return np.asarray(jax.device_get(self._programs[self.size](sampler.params, seen)))[: len(rows)]

    def _program(self) -> Any:
        sampler = self.loaded.sampler
        graphdef = nnx.split(nnx.eval_shape(lambda: sampler.model.build(nnx.Rngs(0))))[0]

        def share(params: ParamLeaves, seen: Observation, rest: None) -> jax.Array:
            network: Network = merge_module(graphdef, params)
            return mean_return(network.return_logits(sampler.action_sampler.seen(seen)))

        devices = Devices(sampler.plan, sampler.model.compute.dtype, graphdef)
        return lambda params, seen: devices.rows(share, params, seen, None)
