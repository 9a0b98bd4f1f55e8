"""`LoweredGenerator`: the programs of a generator, for devices that need not be there. Nothing is run.

Read next: `generation/generator.py`.
"""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from flax import nnx

from openpi_train.generation.generation_size import GenerationSize, dtype_held
from openpi_train.generation.generator import Generator, RowProgram
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.params import Params, module_params
from openpi_train.parallel.strategy import Plan
from openpi_train.types import Tree


class LoweredGenerator(Generator):
    """A generator of as much as `size` on every device of `plan`, or on every tensor group, that has only shapes."""

    def __init__(self, size: GenerationSize, plan: Plan):
        module = nnx.eval_shape(lambda: size.language.build(nnx.Rngs(0)))
        graphdef = nnx.split(module)[0]
        super().__init__(
            graphdef,
            module_params(module),
            Devices(plan=plan, dtype=size.language.compute.dtype, graphdef=graphdef),
            num_rows=size.rows * plan.num_row_groups,
            max_length=size.length,
            end_ids=(0,),
        )

    def reading(self) -> Any:
        """The program that reads the prompts of all rows, the longest possible: a `jax.stages.Lowered`."""
        self._take({}, self.num_rows // self._groups, self._rounded(self.max_length))
        return self._lowered

    def decoding(self) -> Any:
        """The program that makes tokens in all rows, with all slots of the cache in use."""
        self._call(*self._decoding(self._rounded(self.max_length), with_top=False), None)
        return self._lowered

    def use(self, params: Params) -> None:
        plan = self._devices.plan
        shardings = plan.tree("copy", params)
        self._params = {
            path: jax.ShapeDtypeStruct(
                leaf.shape, dtype_held(path, leaf, self._devices.dtype), sharding=shardings[path]
            )
            for path, leaf in params.items()
        }

        def placed(sharding: jax.sharding.Sharding, part: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part)

        self._rows = jax.tree.map(placed, self._row_shardings(), jax.eval_shape(self._make_rows))

    def _on_devices(self, value: np.ndarray) -> Any:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self._devices.plan.batch)

    def _call(self, key: Hashable, function: RowProgram, given: object) -> None:
        with jax.set_mesh(self._devices.plan.real_mesh):
            self._lowered = self._program(key, function).lower(self._params, given, self._rows)
