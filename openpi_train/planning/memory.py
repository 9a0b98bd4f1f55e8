"""Memory that a run needs on one device, computed before anything is allocated. Read next: `choose.py`,
`training/prepare.py`.

State is exact: abstract shapes under the plan's shardings. Activations are an estimate (`costs.py`).
"""

import dataclasses
import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from openpi_train.parallel.mesh import FSDP, TENSOR
from openpi_train.parallel.params import convolution_kernel_paths, cut_stack_paths, gatherings, merge_module
from openpi_train.parallel.shard import Gathering
from openpi_train.parallel.strategy import HOST_MEMORY
from openpi_train.runtime.device_kinds import GIB, HOST_LINK_GB_S
from openpi_train.runtime.exits import UsageError

# What XLA gives every product of cuBLAS's to work with, one at a time (jaxlib 0.10.2, without a device to tune on).
CUBLAS_BYTES = 4 * 2**20


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
    activations: int
    micro_grads: int = 0
    # The rows of a step that learns from a dataset.
    batch: int = 0
    # What the libraries of products and convolutions work with.
    libraries: int = 0
    # One layer while it runs, where layers are gathered or their gradients cut one by one.
    layer: int = 0
    host: int = 0
    # Part of `host` on the device at once, when the gradients are complete and activations and compute copy are freed.
    fetched: int = 0
    # Of a run that generates texts between its steps, when there are neither gradients nor activations.
    generation: int = 0
    # Of a robot policy that acts between its steps: its copy, and what its programs need.
    acting: int = 0
    # The batch of own attempts that a step learns from: what was seen at every query.
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
    def step(self) -> int:
        """Peak bytes of a step in addition to the state."""
        return self.grads + max(self.working, self.fetched)

    @property
    def working(self) -> int:
        """Bytes in addition to state and sum of gradients, until the gradients are complete."""
        own = self.compute_copy + self.activations + self.micro_grads + self.layer
        return own + self.batch + self.experience + self.libraries

    @property
    def host_link_s(self) -> float:
        """Seconds per step for reading and writing host memory, which overlap only with the update."""
        return self.host / (HOST_LINK_GB_S * 1e9)

    def as_json(self) -> dict[str, int]:
        """For `plan.json`."""
        return {**dataclasses.asdict(self), "state": self.state, "total": self.total}


def bytes_per_device(tree: Any, shardings: Any, *, on_host: bool = False) -> int:
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
    layout: Any,
    plan: Any,
    activation_bytes_per_row: float,
    rows_per_device: int,
    *,
    num_micros: int = 1,
    dtype: Any = jnp.bfloat16,
    later: Container[str] = (),
    unread: Collection[str] = (),
    begun_layers: int = 2,
    on_gpus: bool = False,
    unrolled: bool = False,
) -> Memory:
    """Memory of one device for a state layout (`training/init.py: StateLayout`), at the end of a backward pass.

    Gradients are summed in float32. If the plan shards them, each layer's is sharded as it arises, before which one
    layer's is whole; otherwise those of a micro-batch are temporarily whole, those of gathered layers in the compute
    dtype `dtype`. So is the copy used for computation, of all parameters that are gathered or have another dtype. Where
    layers are gathered when they run, there are copies of what is in no layer, and of what is trained of a stack that
    is cut (`layers.py: scan_to_last`), as its parts are. Rows of a table that are sharded stay where they are, and
    so does their gradient.

    Args: `later` are parameters whose gradients of the micro-batch are not there yet, `unread` those that have no
    copies at that time. `on_gpus`: kernels of convolutions that are not cast are copied, too, as cuDNN reads their dims
    in another order, and so are parts of layers that all-gathers read in another order; there is cuBLAS's workspace.
    `unrolled`: layers are not in a loop, which has copies of whole stacks; their gradients are sharded as they arise
    under zero1, too, if there is one micro-batch, and while one layer's are summed, in the type in which they are sent,
    those of another are whole: of the `begun_layers` that have gradients, the last 2.
    """
    shapes, shardings = layout.shapes, layout.shardings
    on_host = _on_host(layout)
    leaves = {**shapes.frozen, **shapes.params}
    module = merge_module(layout.graphdef, leaves)
    specs = {path: plan.spec("state", leaf, path) for path, leaf in leaves.items()}
    ways = gatherings(module)
    by_row = {path for path, way in ways.items() if way is Gathering.BY_ROW and specs[path][:1] == (FSDP,)}

    def held(part: Any, paths: Iterable[str], dtype: Any) -> int:
        """Bytes of these parameters in `dtype`, sharded like `part`."""
        total = 0
        for path in paths:
            spec = specs[path] if path in by_row else plan.spec(part, leaves[path], path)
            total += _bytes(leaves[path].shape, dtype, plan, spec)
        return total

    gathered = {path for path in leaves if FSDP in specs[path] and path not in by_row and path not in unread}
    of_layers = {path for path in gathered if ways.get(path) is Gathering.BY_LAYER}
    trained = {path for path in shapes.params if path not in later}
    cut_stacks = cut_stack_paths(module)
    sharded = of_layers if unrolled and num_micros == 1 else set()  # as they arise, under every strategy
    found = trained if num_micros == 1 else set(shapes.params)
    grads = held("grads", found - sharded, jnp.float32) + held("state", found & sharded, jnp.float32)
    if num_micros == 1 and not (plan.cuts("grads") and gathered):
        # Nothing is summed: the gradients of what is gathered in `dtype` (`parallel/devices.py`), or cast to it before
        # it is cut (`layers.py: scan_to_last`), are whole in it.
        of_copies = (of_layers | (cut_stacks - gathered)) - sharded
        narrow = {path for path in of_copies & trained if leaves[path].ndim > 2}
        grads += held("grads", narrow, dtype) - held("grads", narrow, jnp.float32)
    narrowed = {path for path, leaf in leaves.items() if leaf.dtype != dtype and path not in unread}
    copied = narrowed | gathered
    if plan.cuts("copy"):
        cut = cut_stacks & of_layers & set(shapes.params)
        compute_copy = held("copy", narrowed - gathered, dtype)
        compute_copy += sum(held("copy", [path], leaves[path].dtype) for path in cut) if not unrolled else 0
        whole = {path: leaves[path] for path in gathered - of_layers}
        compute_copy += sum(_whole_bytes(leaf, leaf.dtype, plan, specs[path]) for path, leaf in whole.items())
    else:  # what is gathered at once is gathered in its own type, and cast by what reads it (`parallel/devices.py`)
        at_once = gathered - of_layers
        compute_copy = held("copy", copied - at_once, dtype)
        compute_copy += sum(held("copy", [path], leaves[path].dtype) for path in at_once)
    if not unrolled and not plan.cuts("copy") and (num_micros > 1 or plan.cuts("grads")):
        # A gathered stack less its last layer (`layers.py: scan_to_last`) is a second copy: the first is read by the
        # last layer and the next micro-batch. Under zero1 whole gradients come later, and take more. On GPUs, with one
        # micro-batch, so is every stack of matrices: gathered with the dim in front that is cut, and read with layers.
        stacks = {path for path in of_layers if leaves[path].ndim > 2}
        twice = cut_stacks | (stacks if on_gpus and num_micros == 1 else frozenset())
        compute_copy += held("copy", gathered & twice & set(shapes.params), dtype)
    if on_gpus:
        # Until the kernel's gradient is made. What is gathered arrives in that order.
        kernels = convolution_kernel_paths(module) - narrowed - gathered - trained - set(unread)
        compute_copy += sum(_whole_bytes(leaves[path], dtype, plan, specs[path]) for path in kernels)
        if plan.cuts("copy") and not unrolled:
            # All-gathers want the dim that is cut first: where it is not a layer's first, there is a copy of the part
            # in that order, which of a stack without its last layer is the one above.
            turned = {path for path in of_layers if leaves[path].ndim > 2 and specs[path].index(FSDP) > 1}
            turned -= cut_stacks if num_micros == 1 else frozenset()
            compute_copy += sum(held("copy", [path], leaves[path].dtype) for path in turned)
    gradients = [jnp.float32, plan.reduce_dtype] if plan.cuts("grads") or sharded else []
    micro_grads = held("grads", trained, jnp.float32) if plan.cuts("grads") else held("copy", trained, dtype)
    return Memory(
        params=bytes_per_device(shapes.params, shardings.params),
        frozen=bytes_per_device(shapes.frozen, shardings.frozen),
        optimizer=bytes_per_device(shapes.opt_state, shardings.opt_state),
        ema=bytes_per_device(shapes.ema, shardings.ema),
        grads=grads,
        compute_copy=compute_copy,
        activations=int(activation_bytes_per_row * rows_per_device),
        micro_grads=micro_grads if num_micros > 1 else 0,
        libraries=CUBLAS_BYTES * on_gpus,
        layer=_layer_bytes(
            *(plan, {path: leaves[path] for path in of_layers}, specs, shapes.params, dtype),
            gradients=gradients[: begun_layers if unrolled else 1],
        ),
        host=sum(on_host.values()),
        fetched=sum(sorted(on_host.values())[-2:]),  # of two parameters at a time (`parallel/update.py`)
    )


def slice_bytes(layout: Any, plan: Any, dtype: Any, unread: Collection[str] = ()) -> int:
    """Bytes of the fixed matrices of layers, but `unread` ones, that are neither gathered nor cast to `dtype`: XLA
    copies those of each layer out of the stack. Those of a stack that is cut are copied again under every policy, which
    is not counted."""
    frozen = layout.shapes.frozen
    module = merge_module(layout.graphdef, {**frozen, **layout.shapes.params})
    ways, cut_stacks, total = gatherings(module), cut_stack_paths(module), 0
    for path, leaf in frozen.items():
        spec = plan.spec("state", leaf, path)
        is_read = ways.get(path) is Gathering.BY_LAYER and path not in cut_stacks and path not in unread
        if is_read and leaf.ndim > 2 and leaf.dtype == dtype and FSDP not in spec:
            total += _bytes(leaf.shape, dtype, plan, spec)
    return total


def _layer_bytes(
    plan: Any,
    leaves: Mapping[str, Any],
    specs: Mapping[str, Any],
    trained: Container[str],
    dtype: Any,
    *,
    gradients: Sequence[Any],
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


def _whole_bytes(leaf: Any, dtype: Any, plan: Any, spec: PartitionSpec) -> int:
    """Bytes of an array in `dtype` whose parts on the devices of a strategy are gathered; a tensor group shares it."""
    return _bytes(leaf.shape, dtype, plan, PartitionSpec(*(axis if axis == TENSOR else None for axis in spec)))


def _bytes(shape: tuple[int, ...], dtype: Any, plan: Any, spec: PartitionSpec) -> int:
    return bytes_per_device(jax.ShapeDtypeStruct(shape, dtype), jax.sharding.NamedSharding(plan.mesh, spec))


def _on_host(layout: Any) -> dict[str, int]:
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


def require(memory: Memory, available: int, num_devices: int, experiment: Any) -> None:
    """Raise DoesNotFit, with advice, if the run needs more than `available` bytes on a device."""
    if memory.total <= available:
        return
    advice = []
    tensor_devices = experiment.sharding.tensor_devices
    groups = num_devices // tensor_devices
    shared = experiment.fsdp_devices or groups
    if groups > shared:
        advice.append(f"cut the state over all devices: --fsdp-devices {groups}")
    needed = math.ceil((memory.total - memory.activations) * shared / max(available * 0.8, 1))
    if needed > shared:  # otherwise it is the activations that do not fit, which more devices for the state leave alone
        advice.append(
            f"train on more devices (about {needed * tensor_devices} of this size) with --fsdp-devices {needed}"
        )
    moments = memory.optimizer + memory.ema
    if moments > 0.1 * memory.total and experiment.sharding.offload == "none":
        offload = "optimizer+ema" if memory.ema else "optimizer"
        advice.append(f"keep up to {moments / GIB:.1f} GiB of it in host memory: --sharding.offload {offload}")
    if memory.generation > memory.step:
        flags = ", ".join(size.flag for size in experiment.generation_sizes())
        advice.append(f"generate fewer texts at a time: less than {flags}")
        if experiment.practice is None:
            advice.append("complete no texts in training (`eval RUN` does so afterwards): --eval.num-prompts 0")
    elif memory.acting > memory.step:
        advice.append("act in fewer episodes at a time: a smaller --practice.episodes-per-device")
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
        activations += f"; own attempts {memory.experience / GIB:.1f} GiB"
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
