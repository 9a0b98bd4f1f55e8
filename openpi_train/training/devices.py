"""What every device computes by itself on its own rows, and what the devices send each other meanwhile.

What the plan cuts (`sharding/strategy.py`) decides what is sent in one optimizer step:

    nothing (replicated)                   gradients are summed at the end of the step
    the state (zero1)                      parameters are gathered before it, gradients summed and cut at its end
    state and gradients (zero2)            a layer's gradient is summed and cut where it arises, in every micro-batch
    state, gradients, copy (zero3, hsdp)   a layer is gathered when it runs, too

The rows of a token table are all that is ever sent of it. Devices of a tensor group have the same rows and different
heads: what they tell each other is said in the layers (`nn/shard.py: spread, summed`). Everything else in a
tensor group, gradients included, has the same value on all its devices: jax's types, which record over which axes a
value varies, guarantee it.

Read next: `nn/shard.py`, then `step.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from openpi_train.nn.params import Params, gatherings, merge_module
from openpi_train.nn.shard import Gathering, Shard, is_shard, whole
from openpi_train.sharding.mesh import AXES, FSDP, REPLICA, REPLICATED
from openpi_train.sharding.strategy import Plan

# (parameters by path, whole or as shards; a device's rows; the rest) -> this device's share.
Function = Callable[[Mapping[str, Any], Any, Any], Any]
Specs = Mapping[str, PartitionSpec]


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a plan, at work. `dtype` is the type in which stacks of layers compute and read their weights.

    `graphdef` is that of the module which the parameters make: its variables say how it gathers them.
    """

    plan: Plan
    dtype: Any
    graphdef: nnx.GraphDef

    def sum(self, function: Function, params: Params, batch: Any, rest: Any) -> Any:
        """What `function` returns, summed over the rows' devices. `rest` is the same on all of them."""
        specs = self._specs(params)

        def on_device(params, batch, rest):
            held, copies = self._held(params, specs)
            return self._sum(function(_at_hand(held, copies), batch, rest))

        return self._run(on_device, specs, REPLICATED, params, batch, rest)

    def rows(self, function: Function, params: Params, batch: Any, rest: Any) -> Any:
        """What `function` returns for its rows, those of all devices in their order. `rest` is the same on all."""
        specs = self._specs(params)

        def on_device(params, batch, rest):
            held, copies = self._held(params, specs)
            return function(_at_hand(held, copies), batch, rest)

        return self._run(on_device, specs, PartitionSpec(self._axes), params, batch, rest)

    def gradient(
        self, function: Function, params: Params, frozen: Params, batch: Any, rest: Any, num_micros: int = 1
    ) -> tuple[Params, Any]:
        """Of what `function` returns first the gradient in `params` (float32), and the sum of what it returns second.

        `function` is called for one micro-batch after the other. Shares are summed, never averaged.
        """
        specs = self._specs({**frozen, **params})

        def on_device(leaves, batch, rest):
            held, copies = self._held(leaves, specs)
            fixed = {path: held.pop(path) for path in frozen}

            def share(micro):
                def loss(held):
                    return function(_at_hand({**fixed, **held}, copies), micro, rest)

                return jax.grad(loss, has_aux=True)(held)

            grads, metrics = self._over_micros(share, batch, num_micros)
            grads = self._cut(grads, specs)
            parts = {path: grad.part if isinstance(grad, Shard) else grad for path, grad in grads.items()}
            return {path: self._sum(part, specs[path]) for path, part in parts.items()}, self._sum(metrics)

        out_specs = {path: specs[path] for path in params}, REPLICATED
        return self._run(on_device, specs, out_specs, {**frozen, **params}, batch, rest)

    def _run(self, on_device: Any, specs: Any, out_specs: Any, params: Params, batch: Any, rest: Any) -> Any:
        if self.plan.mesh.size == 1:
            return on_device(params, batch, rest)
        in_specs = (specs, PartitionSpec(self._axes), REPLICATED)
        # Over all axes, those of one device too: where some are left out, XLA for CPUs aborts on sums in bfloat16
        # ("Invalid binary instruction opcode copy", jax 0.10.2).
        run = jax.shard_map(on_device, mesh=self.plan.mesh, in_specs=in_specs, out_specs=out_specs)
        return run(params, batch, rest)

    @property
    def _axes(self) -> tuple[str, ...]:
        """The mesh axes over which rows are cut."""
        return tuple(axis for axis in (REPLICA, FSDP) if self.plan.mesh.shape[axis] > 1)

    def _specs(self, params: Params) -> dict[str, PartitionSpec]:
        return {path: self.plan.spec("state", leaf, path) for path, leaf in params.items()}

    def _held(self, params: Params, specs: Specs) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a device computes with of each parameter: all of it, or its shard; and copies of shards, gathered."""
        ways = gatherings(merge_module(self.graphdef, params))
        held = {path: self._shard(leaf, specs[path], ways.get(path)) for path, leaf in params.items()}
        if self.plan.cuts("copy"):
            return held, {}
        copies = {
            path: leaf.whole()
            for path, leaf in held.items()
            if is_shard(leaf) and leaf.gathering is not Gathering.BY_ROW
        }
        return (held, copies) if self.plan.cuts("grads") else ({**held, **copies}, {})

    def _shard(self, leaf: Any, spec: PartitionSpec, way: Gathering | None) -> Any:
        """A device's part of a parameter that its module gathers that `way`; all of it, where it is not cut."""
        leaf = self._vary(leaf, spec)  # a device's gradient is its own until it is summed here
        if FSDP not in spec:
            return leaf
        dim = spec.index(FSDP)
        is_weight = way is Gathering.BY_LAYER and leaf.ndim > 2  # layers read vectors (norms, biases) in float32
        if way is Gathering.BY_ROW and dim != 0:  # a device has no whole rows to send
            way = None
        return Shard(leaf, dim - leaf.ndim, FSDP, self.dtype if is_weight else leaf.dtype, gathering=way)

    def _cut(self, grads: Mapping[str, Any], specs: Specs) -> dict[str, Any]:
        """The gradients, of cut parameters as shards: summed over the devices that share a copy, if not yet so."""

        def cut(grad: Any, spec: PartitionSpec) -> Any:
            if isinstance(grad, Shard) or FSDP not in spec:
                return grad
            dim = spec.index(FSDP)
            part = jax.lax.psum_scatter(grad.astype(jnp.float32), FSDP, scatter_dimension=dim, tiled=True)
            return Shard(part, dim - grad.ndim, FSDP, jnp.float32)

        return {path: cut(grad, specs[path]) for path, grad in grads.items()}

    def _over_micros(self, share: Callable[[Any], Any], batch: Any, num_micros: int) -> Any:
        """The sum of `share` over micro-batches. Row i of a device goes to micro-batch i % num_micros: none is sent."""
        if num_micros == 1:
            return _float32(share(batch))
        micros = jax.tree.map(
            lambda x: x.reshape(x.shape[0] // num_micros, num_micros, *x.shape[1:]).swapaxes(0, 1), batch
        )
        shapes = jax.eval_shape(share, jax.tree.map(lambda x: x[0], micros))
        zeros = jax.tree.map(_zeros_like, shapes)
        return jax.lax.scan(lambda total, micro: (jax.tree.map(jnp.add, total, share(micro)), None), zeros, micros)[0]

    def _vary(self, x: Any, spec: PartitionSpec) -> Any:
        """The same value, which from here on may differ between the rows' devices."""
        return _varying(x, tuple(axis for axis in self._axes if axis not in spec))

    def _sum(self, shares: Any, spec: PartitionSpec = REPLICATED) -> Any:
        """The sum over the rows' devices; over those axes that are not in `spec`, over which it is cut."""
        axes = tuple(axis for axis in self._axes if axis not in spec)
        return jax.lax.psum(shares, axes) if axes else shares


def _at_hand(held: Mapping[str, Any], copies: Mapping[str, Any]) -> dict[str, Any]:
    """Shards for the modules that gather them, and all other parameters whole: from `copies`, where one is there."""
    held = {path: leaf.with_copy(copies[path]) if path in copies else leaf for path, leaf in held.items()}
    return {path: _for_its_module(leaf) for path, leaf in held.items()}


def _for_its_module(leaf: Any) -> Any:
    if not is_shard(leaf) or leaf.gathering is None:
        return whole(leaf)
    # Of a stack of more layers than any of its dims (or of odd ones) it is the layers that the plan shares out.
    return leaf.of_every_layer() if leaf.gathering is Gathering.BY_LAYER and leaf.has_rows else leaf


def _varying(x: Any, axes: tuple[str, ...]) -> Any:
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _zeros_like(shape: Any) -> Any:
    """float32 zeros that vary over the same axes: the total of a scan must have the type of what is added."""
    of_axes = shape.manual_axis_type  # None where there is one device
    axes = tuple(axis for axis in AXES if of_axes and axis in of_axes.varying)
    return _varying(jnp.zeros(shape.shape, jnp.float32), axes)


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
