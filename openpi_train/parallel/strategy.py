"""Which parts of the state are sharded over the `fsdp` axis, and along which array dim. Read next: `tensor.py`.

A strategy is a row of `CUT`, not a class (`planning/choose.py: layouts` has its default number of devices): DDP is
`replicated`, DeepSpeed's ZeRO stages 1, 2 and 3 shard the optimizer state, also the gradients, also the parameters.
With more devices than `fsdp_devices` the rest are replicas, as `hsdp` does by hosts. Arrays that `tensor.py` shards are
sharded so under every strategy, in state, gradients and copy; `fsdp` then shards another dim. This module also decides
whether a part is on the devices or in host memory between steps.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from openpi_train.fields import at_least, setting
from openpi_train.parallel.mesh import FSDP, TENSOR, batch_sharding, replicated
from openpi_train.parallel.params import ParamLeaves
from openpi_train.parallel.tensor import tensor_dim
from openpi_train.types import Tree

# Parts held by a device: the state (float32 parameters, moments, average), the sum of gradients over micro-batches, and
# the copy of the parameters used for computation.
Part = Literal["state", "grads", "copy"]
Strategy = Literal["replicated", "zero1", "zero2", "zero3", "hsdp"]
Choice = Literal["auto", "replicated", "zero1", "zero2", "zero3", "hsdp"]

CUT: Mapping[Strategy, frozenset[Part]] = {
    "replicated": frozenset(),
    "zero1": frozenset({"state"}),
    "zero2": frozenset({"state", "grads"}),
    "zero3": frozenset({"state", "grads", "copy"}),
    "hsdp": frozenset({"state", "grads", "copy"}),  # within a host; hosts are replicas
}


# The fields of the state whose large arrays are in host memory between two steps.
Offload = Literal["none", "optimizer", "optimizer+ema"]
ON_HOST: Mapping[Offload, frozenset[str]] = {
    "none": frozenset(),
    "optimizer": frozenset({"opt_state"}),
    "optimizer+ema": frozenset({"opt_state", "ema"}),
}
# The type in which devices send gradients and sum them.
ReduceDtype = Literal["float32", "bfloat16"]
# jax's names for a device's own memory, and for host memory that the device accesses directly.
DEVICE_MEMORY, HOST_MEMORY = "device", "pinned_host"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How the state is sharded over `--fsdp-devices` devices.

    Arrays below `min_shard_mib` MiB stay whole (openpi's rule and default, 4): a small gather costs more than it saves.
    """

    # What is sharded; auto: the shortest step that fits, by the plan, or zero3 if --fsdp-devices is given.
    strategy: Choice = "auto"
    # Smaller arrays stay whole, and on the devices, MiB.
    min_shard_mib: float = at_least(0, 4.0)
    # Devices that split the heads and wide layers of the same rows (Megatron's tensor parallelism); 1: off.
    tensor_devices: int = at_least(1, 1)
    # What is kept in host memory between steps: the optimizer's moments, or also the average of the parameters.
    offload: Offload = "none"
    # The type in which devices send gradients and sum them; bfloat16 sends half as much, and rounds every sum.
    reduce_dtype: ReduceDtype = setting("float32", on_resume="warn")

    def plan(self, mesh: Mesh | AbstractMesh, strategy: Strategy) -> "Plan":
        """The plan of these settings for a mesh, under the strategy that was chosen."""
        return Plan(
            mesh=mesh,
            strategy=strategy,
            min_shard_mib=self.min_shard_mib,
            offload=self.offload,
            reduce_dtype=self.reduce_dtype,
        )


def shard_dim(
    shape: tuple[int, ...], itemsize: int, num_shards: int, min_bytes: float, taken: int | None = None
) -> int | None:
    """The dim to shard, or None: the largest divisible one, ties to the last, except the one that is `taken`.

    The rule of openpi (`training/sharding.py` at 15a9616), whose results `golden/misc_fsdp.json` lists.
    """
    if num_shards == 1 or len(shape) < 2 or math.prod(shape) * itemsize < min_bytes:
        return None
    for dim in np.argsort(shape)[::-1]:
        if shape[dim] % num_shards == 0 and dim != taken:
            return int(dim)
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A mesh, of real or planned devices, and what is sharded over it."""

    mesh: Mesh | AbstractMesh
    strategy: Strategy
    min_shard_mib: float = 4.0
    offload: Offload = "none"
    reduce_dtype: ReduceDtype = "float32"

    @property
    def real_mesh(self) -> Mesh:
        """The mesh of real devices, to run on."""
        assert isinstance(self.mesh, Mesh), "nothing runs on planned devices"
        return self.mesh

    @property
    def num_row_groups(self) -> int:
        """The devices that have rows of their own: all of them, or the tensor groups."""
        return self.mesh.size // self.mesh.shape[TENSOR]

    def cuts(self, part: Part) -> bool:
        """Whether the strategy shards this part."""
        return part in CUT[self.strategy]

    def spec(self, part: Part, leaf: jax.Array | jax.ShapeDtypeStruct, path: str) -> PartitionSpec:
        """The partition of one array (or its shape) of `part`: the parameter at `path`, or what belongs to it."""
        axes: dict[int, str] = {}
        shape, tensor_devices = list(leaf.shape), self.mesh.shape[TENSOR]
        taken = tensor_dim(path, leaf.shape, tensor_devices)
        if taken is not None:
            axes[taken] = TENSOR
            shape[taken] //= tensor_devices
        if self.cuts(part):
            min_bytes = self.min_shard_mib * 2**20
            dim = shard_dim(tuple(shape), leaf.dtype.itemsize, self.mesh.shape[FSDP], min_bytes, taken)
            axes |= {} if dim is None else {dim: FSDP}
        return PartitionSpec(*(axes.get(dim) for dim in range(max(axes, default=-1) + 1)))

    def uncut_share(self, params: ParamLeaves) -> float:
        """The share of the parameters that stays whole although the state is sharded: none of their dims is
        divisible."""
        sizes = {path: math.prod(leaf.shape) * leaf.dtype.itemsize for path, leaf in params.items()}
        if not self.cuts("state") or self.mesh.shape[FSDP] == 1:
            return 0.0
        large = (path for path, size in sizes.items() if size >= self.min_shard_mib * 2**20)
        whole = sum(sizes[path] for path in large if FSDP not in self.spec("state", params[path], path))
        return whole / max(sum(sizes.values()), 1)

    def tree(self, part: Part, tree: Tree) -> Tree:
        """The sharding of every leaf of `tree`, a tree of `part` whose innermost keys are parameter paths."""

        def sharding(keys: tuple[object, ...], leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
            return NamedSharding(self.mesh, self.spec(part, leaf, str(getattr(keys[-1], "key", "")) if keys else ""))

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def between_steps(self, field: str, tree: Tree) -> Tree:
        """The sharding of every leaf of this field of the state between steps, possibly in host memory."""

        def place(leaf: jax.Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
            large = leaf.ndim > 0 and math.prod(leaf.shape) * leaf.dtype.itemsize >= self.min_shard_mib * 2**20
            return sharding.with_memory_kind(HOST_MEMORY) if large and field in ON_HOST[self.offload] else sharding

        return jax.tree.map(place, tree, self.tree("state", tree))

    @property
    def batch(self) -> NamedSharding:
        """Rows over all devices; those of a tensor group hold the same ones."""
        return batch_sharding(self.mesh)

    @property
    def replicated(self) -> NamedSharding:
        """The same value everywhere."""
        return replicated(self.mesh)
