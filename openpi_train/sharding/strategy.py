"""Which parts of the state are cut over the `fsdp` axis, and along which array dim. Read next: `training/step.py`.

A strategy is a row of a table, not a class: DDP is `replicated`, DeepSpeed's ZeRO stages 1, 2 and 3 cut the optimizer
state, also the gradients, also the parameters. With more devices than `fsdp_devices` the rest are replicas (HSDP).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from openpi_train.sharding.mesh import FSDP, batch_sharding, replicated

Part = Literal["params", "grads", "opt"]
Strategy = Literal["replicated", "zero1", "zero2", "zero3"]

CUT: Mapping[Strategy, frozenset[Part]] = {
    "replicated": frozenset(),
    "zero1": frozenset({"opt"}),
    "zero2": frozenset({"opt", "grads"}),
    "zero3": frozenset({"opt", "grads", "params"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How the state is laid out over `--fsdp-devices` devices; without effect where that is 1.

    Arrays below `min_shard_mib` MiB stay whole (openpi's rule and default, 4): a small gather costs more than it saves.
    """

    # Which of optimizer state, gradients and parameters are cut.
    strategy: Strategy = "zero3"
    # Smaller arrays stay whole, MiB.
    min_shard_mib: float = 4.0


def shard_dim(shape: tuple[int, ...], itemsize: int, num_shards: int, min_bytes: float) -> int | None:
    """The dim to cut, or None: the largest one that divides, ties to the last.

    The rule of openpi (`training/sharding.py` at 15a9616), whose results `golden/misc_fsdp.json` lists.
    """
    if num_shards == 1 or len(shape) < 2 or math.prod(shape) * itemsize < min_bytes:
        return None
    for dim in np.argsort(shape)[::-1]:
        if shape[dim] % num_shards == 0:
            return int(dim)
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A mesh, and what is cut on it."""

    mesh: Mesh
    config: ShardingConfig

    def spec(self, leaf: Any) -> PartitionSpec:
        """How one array (or its shape) is cut where its part is cut at all."""
        min_bytes = self.config.min_shard_mib * 2**20
        dim = shard_dim(leaf.shape, leaf.dtype.itemsize, self.mesh.shape[FSDP], min_bytes)
        return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, FSDP)

    def tree(self, part: Part, tree: Any) -> Any:
        """The sharding of every leaf of `tree`, which belongs to `part` of the state."""
        if part not in CUT[self.config.strategy]:
            return jax.tree.map(lambda _: replicated(self.mesh), tree)
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, self.spec(leaf)), tree)

    @property
    def batch(self) -> NamedSharding:
        """Rows over all devices."""
        return batch_sharding(self.mesh)

    @property
    def replicated(self) -> NamedSharding:
        """The same value everywhere."""
        return replicated(self.mesh)
