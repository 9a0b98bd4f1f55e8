"""Memory that a run needs on one device, computed before anything is allocated. Read next: `choose.py`,
`training/prepare.py`.

State is exact: abstract shapes under the plan's shardings. Activations are an estimate (`costs.py`).
"""

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from openpi_train.experiment import Experiment
from openpi_train.parallel.mesh import FSDP, TENSOR
from openpi_train.parallel.params import Gathering, ParamLeaves, merge_module, param_kinds
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import HOST_MEMORY, Plan
from openpi_train.runtime.device_kinds import GIB, HOST_LINK_GB_S
from openpi_train.runtime.exits import UsageError
from openpi_train.types import Tree

# Numbers of devices that are tried, where those that the state needs are too few.
_MORE_DEVICES = (8, 16, 32)
# How far an estimate of memory may be off, as a share of what the compiler says (`estimate.py`).
OFF = 0.25


class DoesNotFit(UsageError):
    """The run needs more memory than a device has. The message says how much, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by purpose; and in its host's memory between steps.

    `micro_grads` are those of the current micro-batch, `grads` the sum of several.
    """

    params: int
    frozen: int
    optimizer: int
    ema: int
    grads: int
    compute_copy: int
    activations: int = 0
    micro_grads: int = 0
    # The rows of a step that learns from a dataset.
    batch: int = 0
    # One layer while it runs, where layers are gathered or their gradients cut one by one.
    layer: int = 0
    host: int = 0
    # Part of `host` on the device at once, when the gradients are complete and activations and compute copy are freed.
    fetched: int = 0
    # Of a run that generates texts between its steps, when there are neither gradients nor activations.
    generation: int = 0
    # Of a robot policy that acts between its steps: its copy, and what its programs need.
    acting: int = 0
    # The batch of own rollouts that a step learns from: what was seen at every query.
    experience: int = 0

    @property
    def state(self) -> int:
        """Bytes that stay on the device between steps."""
        return self.params + self.frozen + self.optimizer + self.ema

    def moved(self, num_micros: int) -> int:
        """Bytes of arrays of the parameters' sizes that are made or updated in a step, as often as that happens."""
        return self.state - self.frozen + self.compute_copy + num_micros * (self.grads + self.micro_grads)

    @property
    def total(self) -> int:
        """Peak bytes of a run."""
        return self.state + max(self.step, self.generation, self.acting)

    @property
    def least(self) -> int:
        """`total`, with activations that are overestimated as far as they may be."""
        return dataclasses.replace(self, activations=int(self.activations / (1 + OFF))).total

    @property
    def step(self) -> int:
        """Peak bytes of a step in addition to the state."""
        return max(self.beside + max(self.activations, self.micro_grads or self.grads), self.grads + self.fetched)

    @property
    def beside(self) -> int:
        """Bytes of a step beside activations and the gradients that are made from them, of which the backward pass
        frees the former as it makes the latter: the larger of both counts."""
        summed = self.grads if self.micro_grads else 0
        return summed + self.compute_copy + self.layer + self.batch + self.experience

    @property
    def host_link_s(self) -> float:
        """Seconds per step for reading and writing host memory, which overlap only with the update."""
        return self.host / (HOST_LINK_GB_S * 1e9)

    def as_json(self) -> dict[str, int]:
        """For `plan.json`."""
        return {**dataclasses.asdict(self), "state": self.state, "total": self.total}


class PlannedState(Protocol):
    """The shapes and shardings of a run's state, `training/init.py: StateLayout`."""

    @property
    def graphdef(self) -> nnx.GraphDef: ...
    @property
    def shapes(self) -> TrainState: ...
    @property
    def shardings(self) -> TrainState: ...
    def under(self, plan: Plan) -> "PlannedState": ...


def bytes_per_device(tree: Tree, shardings: Tree, *, on_host: bool = False) -> int:
    """Bytes of the arrays (or shapes) of `tree` that one device holds under `shardings`, a tree or one for all.

    Or, `on_host`, those that it keeps in host memory.
    """

    def size(leaf, sharding):
        there = (sharding.memory_kind == HOST_MEMORY) == on_host
        return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * there

    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def predict(
    layout: PlannedState, plan: Plan, *, num_micros: int = 1, dtype: DTypeLike = jnp.bfloat16, unrolled: bool = False
) -> Memory:
    """Memory of one device for a state layout, without activations and rows.

    The state is exact. Gradients are float32, and sharded as they arise where the plan cuts them, or where layers are
    `unrolled` and there is one micro-batch; else whole until the end, those of one of several micro-batches in `dtype`.
    The copy is of all that has another type than `dtype` or is gathered, whole; but layers are gathered one by one
    where the plan cuts the copy, and the rows of a table that is sharded stay where they are, with their gradient.
    """
    shapes, shardings = layout.shapes, layout.shardings
    on_host, leaves = _on_host(layout), {**shapes.frozen, **shapes.params}
    kinds = param_kinds(merge_module(layout.graphdef, leaves))
    specs = {path: plan.spec("state", leaf, path) for path, leaf in leaves.items()}
    cut = {path for path, spec in specs.items() if FSDP in spec}
    in_place = {path for path in cut if kinds[path].gathering is Gathering.BY_ROW and specs[path][0] == FSDP}
    of_layers = {path for path in cut if kinds[path].gathering is Gathering.BY_LAYER}
    as_they_arise = of_layers if unrolled and num_micros == 1 else set()

    def held(paths: Iterable[str], dtype: DTypeLike, parts: Container[str]) -> int:
        """Bytes of these parameters in `dtype`; of those in `parts` this device's part, of others the whole."""
        return sum(
            (_bytes(leaves[path].shape, dtype, plan, specs[path]) if path in parts else _whole(path, dtype))
            for path in paths
        )

    def _whole(path: str, dtype: DTypeLike) -> int:
        return _whole_bytes(leaves[path], dtype, plan, specs[path])

    parts = cut if plan.cuts("grads") else in_place | as_they_arise
    copied = {path for path, leaf in leaves.items() if leaf.dtype != dtype or path in cut - in_place}
    summed_by_layer = plan.cuts("grads") or as_they_arise
    return Memory(
        params=bytes_per_device(shapes.params, shardings.params),
        frozen=bytes_per_device(shapes.frozen, shardings.frozen),
        optimizer=bytes_per_device(shapes.opt_state, shardings.opt_state),
        ema=bytes_per_device(shapes.ema, shardings.ema),
        grads=held(shapes.params, jnp.float32, parts),
        compute_copy=held(copied - of_layers if plan.cuts("copy") else copied, dtype, in_place),
        micro_grads=held(shapes.params, jnp.float32 if plan.cuts("grads") else dtype, parts) if num_micros > 1 else 0,
        layer=_layer_bytes(
            *(plan, {path: leaves[path] for path in of_layers}, specs, shapes.params, dtype),
            # One layer's, and of unrolled ones those of the next, which is being computed meanwhile.
            gradients=[jnp.float32, plan.reduce_dtype][: 1 + unrolled] if summed_by_layer else [],
        ),
        host=sum(on_host.values()),
        fetched=sum(sorted(on_host.values())[-2:]),  # of two parameters at a time (`parallel/update.py`)
    )


def _layer_bytes(
    plan: Plan,
    leaves: ParamLeaves,
    specs: Mapping[str, PartitionSpec],
    trained: Container[str],
    dtype: DTypeLike,
    *,
    gradients: Sequence[DTypeLike],
) -> int:
    """Bytes of one layer of the largest of these stacks while it runs: its weights, gathered in `dtype`, where the plan
    cuts the copy, and the whole gradients of as many layers as there are types."""
    found: dict[tuple[str, int], int] = {}
    for path, leaf in leaves.items():
        stack = path.partition("/")[0], leaf.shape[0]
        types = [dtype] * plan.cuts("copy") + [*gradients] * (path in trained)
        size = sum(_whole_bytes(leaf, one, plan, specs[path]) for one in types)
        found[stack] = found.get(stack, 0) + size // leaf.shape[0]
    return max(found.values(), default=0)


def _whole_bytes(leaf: jax.Array | jax.ShapeDtypeStruct, dtype: DTypeLike, plan: Plan, spec: PartitionSpec) -> int:
    """Bytes of an array in `dtype` whose parts on the devices of a strategy are gathered; a tensor group shares it."""
    return _bytes(leaf.shape, dtype, plan, PartitionSpec(*(axis if axis == TENSOR else None for axis in spec)))


def _bytes(shape: tuple[int, ...], dtype: DTypeLike, plan: Plan, spec: PartitionSpec) -> int:
    return bytes_per_device(jax.ShapeDtypeStruct(shape, dtype), jax.sharding.NamedSharding(plan.mesh, spec))


def _on_host(layout: PlannedState) -> dict[str, int]:
    """Bytes that one device keeps in host memory, by parameter."""
    found = dict.fromkeys(layout.shapes.params, 0)
    for field in ("opt_state", "ema"):
        leaves = jax.tree_util.tree_flatten_with_path(getattr(layout.shapes, field))[0]
        shardings = jax.tree.leaves(getattr(layout.shardings, field))
        for (path, leaf), sharding in zip(leaves, shardings, strict=True):
            if size := bytes_per_device(leaf, sharding, on_host=True):
                found[path[-1].key] += size
    return found


def require_host(memory: Memory, available: int, offload: str) -> None:
    """Raise DoesNotFit, with advice, if a device keeps more than `available` bytes in host memory."""
    if memory.host <= available:
        return
    raise DoesNotFit(
        f"--sharding.offload {offload} keeps {memory.host / GIB:.1f} GiB of each device's state in host memory; there "
        f"are {available / GIB:.1f} GiB for each device.\n"
        "What to do:\n"
        "  - cut the state over more devices: --sharding.strategy zero1, zero2 or zero3\n"
        "  - need less: --optimizer.moment-dtype bfloat16, or --optimizer adafactor\n"
        "  - leave it on the devices: --sharding.offload none"
    )


def require(
    memory: Memory,
    available: int,
    num_devices: int,
    experiment: Experiment,
    fits_on: Callable[[int], bool] = lambda num_devices: True,
) -> None:
    """Raise DoesNotFit, with advice, if the run needs more than `available` bytes on a device, however far its estimate
    is off: what may fit its compiler judges. More devices are advised if it `fits_on` so many of this size."""
    if memory.least <= available:
        return
    advice = []
    tensor_devices = experiment.sharding.tensor_devices
    groups = num_devices // tensor_devices
    shared = experiment.fsdp_devices or groups
    if groups > shared:
        advice.append(f"cut the state over all devices: --fsdp-devices {groups}")
    needed = math.ceil((memory.total - memory.activations) * shared / max(available * 0.8, 1))
    # Otherwise it is the activations that do not fit, which more devices for the state leave alone.
    larger = [needed, *(size for size in _MORE_DEVICES if size > needed)] if needed > shared else []
    if fitting := next((size for size in larger if fits_on(size * tensor_devices)), None):
        advice.append(
            f"train on more devices (about {fitting * tensor_devices} of this size) with --fsdp-devices {fitting}"
        )
    sent = memory.params + memory.grads + memory.micro_grads + memory.compute_copy
    if shared > 1 and experiment.sharding.strategy in ("replicated", "zero1", "zero2") and sent > 0.1 * memory.total:
        advice.append("cut parameters and gradients, too: --sharding.strategy zero3")
    moments = memory.optimizer + memory.ema
    if moments > 0.1 * memory.total and experiment.sharding.offload == "none":
        offload = "optimizer+ema" if memory.ema else "optimizer"
        advice.append(f"keep up to {moments / GIB:.1f} GiB of it in host memory: --sharding.offload {offload}")
    if memory.generation > memory.step:
        flags = ", ".join(size.flag for size in experiment.generation_sizes())
        advice.append(f"generate fewer texts at a time: less than {flags}")
        if experiment.rl is None:
            advice.append("complete no texts in training (`eval RUN` does so afterwards): --eval.num-prompts 0")
    elif memory.acting > memory.step:
        advice.append("act in fewer episodes at a time: a smaller --rl.episodes-per-device")
    elif memory.activations > 0.1 * memory.total:
        advice.append(f"hold fewer rows at once: a smaller --batch-size, or --grad-accum {2 * experiment.grad_accum}")
    activations = (
        f"activations about {memory.activations / GIB:.1f} GiB" if memory.activations else "no activations yet"
    )
    if memory.generation:
        activations += f"; in place of both, to generate texts, {memory.generation / GIB:.1f} GiB"
    if memory.acting:
        activations += f"; in place of all that a step needs, to act, {memory.acting / GIB:.1f} GiB"
    if memory.experience:
        activations += f"; own rollouts {memory.experience / GIB:.1f} GiB"
    advice += experiment.model.smaller_runs
    computing = memory.grads + memory.micro_grads + memory.compute_copy + memory.layer
    raise DoesNotFit(
        f"{experiment.name} does not fit. Bytes needed on each device: "
        f"state {memory.state / GIB:.1f} GiB (parameters {memory.params / GIB:.1f}, frozen {memory.frozen / GIB:.1f}, "
        f"optimizer {memory.optimizer / GIB:.1f}, EMA {memory.ema / GIB:.1f}), "
        f"gradients and compute copy {computing / GIB:.1f} GiB, "
        f"{activations}; together {memory.total / GIB:.1f} GiB. "
        f"There are {available / GIB:.1f} GiB on each of {num_devices} device{'s' if num_devices > 1 else ''}.\n"
        "What to do:\n" + "\n".join(f"  - {line}" for line in advice)
    )
