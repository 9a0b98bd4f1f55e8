"""What a run needs on one device, known before anything is allocated. Read next: `training/run.py`, which asks first.

State is exact: abstract shapes under the plan's shardings. Activations are an estimate, by the model.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from openpi_train.runtime.exits import UsageError

GIB = 2**30


class DoesNotFit(UsageError):
    """The run needs more memory than a device has. The message says how much, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by purpose."""

    params: int
    frozen: int
    optimizer: int
    ema: int
    grads: int
    compute_copy: int
    activations: int

    @property
    def state(self) -> int:
        """What lives from step to step."""
        return self.params + self.frozen + self.optimizer + self.ema

    @property
    def total(self) -> int:
        """The most that a step holds at once."""
        return self.state + self.grads + self.compute_copy + self.activations

    def as_json(self) -> dict[str, int]:
        """For `plan.json`."""
        return {**dataclasses.asdict(self), "state": self.state, "total": self.total}


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """Bytes of the arrays (or shapes) of `tree` that one device holds under `shardings`."""

    def size(leaf, sharding):
        return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def predict(layout: Any, plan: Any, activation_bytes_per_row: float, rows_per_device: int) -> Memory:
    """Memory of one device for a state layout (`training/init.py: StateLayout`).

    Gradients are float32 under the plan's gradient sharding; the compute copy is the parameters in bfloat16 under the
    parameters' sharding.
    """
    shapes, shardings = layout.shapes, layout.shardings
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes.params)
    return Memory(
        params=bytes_per_device(shapes.params, shardings.params),
        frozen=bytes_per_device(shapes.frozen, shardings.frozen),
        optimizer=bytes_per_device(shapes.opt_state, shardings.opt_state),
        ema=bytes_per_device(shapes.ema, shardings.ema),
        grads=bytes_per_device(shapes.params, plan.tree("grads", shapes.params)),
        compute_copy=bytes_per_device(half, shardings.params),
        activations=int(activation_bytes_per_row * rows_per_device),
    )


def require(memory: Memory, available: int, num_devices: int, experiment: Any) -> None:
    """Raise DoesNotFit where the run needs more than `available` bytes on a device, with what would help."""
    if memory.total <= available:
        return
    advice = []
    if num_devices > experiment.fsdp_devices:
        advice.append(f"cut the state over all devices: --fsdp-devices {num_devices}")
    needed = math.ceil((memory.total - memory.activations) * experiment.fsdp_devices / max(available * 0.8, 1))
    advice.append(f"train on more devices (about {needed} of this size) with --fsdp-devices {needed}")
    if memory.activations > 0.1 * memory.total:
        advice.append(f"hold fewer rows at once: a smaller --batch-size, or --grad-accum {2 * experiment.grad_accum}")
    advice.append("train low-rank adapters only: pi0_bridge_traj_lora")
    advice.append("try the small model: pi0_bridge_traj_tiny")
    raise DoesNotFit(
        f"{experiment.name} does not fit. Bytes needed on each device: "
        f"state {memory.state / GIB:.1f} GiB (parameters {memory.params / GIB:.1f}, frozen {memory.frozen / GIB:.1f}, "
        f"optimizer {memory.optimizer / GIB:.1f}, EMA {memory.ema / GIB:.1f}), "
        f"gradients and compute copy {(memory.grads + memory.compute_copy) / GIB:.1f} GiB, "
        f"activations about {memory.activations / GIB:.1f} GiB; together {memory.total / GIB:.1f} GiB. "
        f"There are {available / GIB:.1f} GiB on each of {num_devices} device{'s' if num_devices > 1 else ''}.\n"
        "What to do:\n" + "\n".join(f"  - {line}" for line in advice)
    )
