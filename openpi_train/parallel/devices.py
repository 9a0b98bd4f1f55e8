"""The computation of every device on its own rows, and the communication between devices.

The parts that the plan shards (`strategy.py`) determine what is sent in one optimizer step:

    nothing (replicated)                   gradients are all-reduced at the end of the step
    the state (zero1)                      parameters are gathered before it, gradients reduce-scattered at its end
    state and gradients (zero2)            a layer's gradient is reduce-scattered where it arises, in every micro-batch
    state, gradients, copy (zero3, hsdp)   a layer is also gathered when it runs

Unrolled layers, with one micro-batch, are gathered when they run under zero1 and zero2, too, and kept for the backward
pass, and zero1 then sums their gradients as zero2 does.

Only rows of a token table are ever sent. Devices of a tensor group have the same rows and different
heads: their communication is in the layers (`shard.py: spread, summed`). Everything else in a
tensor group, including gradients, has the same value on all its devices: jax's types, which record over which axes a
value varies, guarantee it.

Read next: `shard.py`, then `training/step.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from openpi_train.parallel.mesh import AXES, FSDP, REPLICA, REPLICATED
from openpi_train.parallel.params import Gathering, ParamKind, ParamLeaves, Params, merge_module, param_kinds
from openpi_train.parallel.shard import Shard, is_shard, whole
from openpi_train.parallel.strategy import Plan
from openpi_train.types import Tree

# (parameters by path, whole or as shards; a device's rows; the rest) -> this device's share of the result.
Function = Callable[[ParamLeaves, Any, Any], Tree]
Specs = Mapping[str, PartitionSpec]


@dataclasses.dataclass(frozen=True)
class Devices:
    """Computations on the devices of a plan. `dtype` is the compute dtype of stacks of layers.

    `graphdef` is that of the module of the parameters, which says of what kind each is. `unrolls_layers`: what
    gradients are taken in has unrolled layers.
    """

    plan: Plan
    dtype: Any
    graphdef: nnx.GraphDef
    unrolls_layers: bool = False

    def sum(self, function: Function, params: Params, batch: Tree, rest: Tree) -> Tree:
        """The result of `function`, summed over the rows' devices. `rest` is the same on all of them."""
        specs = self._specs(params)

        def on_device(params, batch, rest):
            held, copies = self._held(params, specs)
            return self._sum(function(_at_hand(held, copies), batch, rest))

        return self._run(on_device, specs, REPLICATED, params, batch, rest)

    def rows(
        self,
        function: Function,
        params: Params,
        batch: Tree,
        rest: Tree,
        num_micros: int = 1,
        *,
        tensor_specs: tuple[Tree, Tree] | None = None,
    ) -> Tree:
        """The results of `function` for all rows, in the order of the batch. `rest` is the same on all devices.

        `function` is called for one micro-batch after the other, the same rows as in `gradient`.

        Args: `tensor_specs` are PartitionSpecs (or prefixes of their trees) of the batch and of the results over the
        dims after the first, where a tensor group splits them; None: it splits nothing.
        """
        specs = self._specs(params)

        def on_device(params, batch, rest):
            held, copies = self._held(params, specs)

            def found(rows):
                return function(_at_hand(held, copies), rows, rest)

            if num_micros == 1:
                return found(batch)
            results = jax.lax.map(found, _micros(batch, num_micros))
            return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), results)

        row_specs = tuple(
            jax.tree.map(lambda spec: PartitionSpec(self._axes, *spec), tree)
            for tree in tensor_specs or (REPLICATED,) * 2
        )
        return self._run(on_device, specs, row_specs[1], params, batch, rest, row_specs[0])

    def row_values(self, params: Params, num_micros: int = 1) -> Callable[[Callable[[Any, Any], Any], Any], Any]:
        """What `Objective.prepared` needs: (function, batch) -> `function(module, rows)` for all rows."""

        def values(function: Callable[[Any, Tree], Tree], batch: Tree) -> Tree:
            def of_rows(params, rows, _):
                return function(merge_module(self.graphdef, params), rows)

            return self.rows(of_rows, params, batch, None, num_micros)

        return values

    def gradient(
        self, function: Function, params: Params, frozen: Params, batch: Tree, rest: Tree, num_micros: int = 1
    ) -> tuple[Params, Any]:
        """The gradient of `function`'s first result in `params` (float32), and the sum of its second result.

        `function` is called for one micro-batch after the other. Shares are summed, never averaged.
        """
        specs = self._specs({**frozen, **params})

        def on_device(leaves, batch, rest):
            held, copies = self._held(leaves, specs, keeps_layers=self.unrolls_layers and num_micros == 1)
            fixed = {path: held.pop(path) for path in frozen}

            def share(micro):
                def loss(held):
                    return function(_at_hand({**fixed, **held}, copies), micro, rest)

                return jax.grad(loss, has_aux=True)(held)

            grads, metrics = self._over_micros(share, batch, num_micros)
            grads = self._cut(grads, specs)
            parts = {path: grad.part if isinstance(grad, Shard) else grad for path, grad in grads.items()}
            return {path: self._sum_gradient(part, specs[path]) for path, part in parts.items()}, self._sum(metrics)

        out_specs = {path: specs[path] for path in params}, REPLICATED
        return self._run(on_device, specs, out_specs, {**frozen, **params}, batch, rest)

    def _run(
        self,
        on_device: Callable[..., Any],
        specs: Specs,
        out_specs: Tree,
        params: Params,
        batch: Tree,
        rest: Tree,
        batch_specs: Tree | None = None,
    ) -> Tree:
        if self.plan.mesh.size == 1:
            return on_device(params, batch, rest)
        in_specs = (specs, PartitionSpec(self._axes) if batch_specs is None else batch_specs, REPLICATED)
        # Over all axes, including those of size 1: otherwise XLA for CPUs aborts on sums in bfloat16
        # ("Invalid binary instruction opcode copy", jax 0.10.2).
        run = jax.shard_map(on_device, mesh=self.plan.mesh, in_specs=in_specs, out_specs=out_specs)
        return run(params, batch, rest)

    @property
    def _axes(self) -> tuple[str, ...]:
        """The mesh axes over which rows are sharded."""
        return tuple(axis for axis in (REPLICA, FSDP) if self.plan.mesh.shape[axis] > 1)

    def _specs(self, params: Params) -> dict[str, PartitionSpec]:
        return {path: self.plan.spec("state", leaf, path) for path, leaf in params.items()}

    def _held(
        self, params: Params, specs: Specs, *, keeps_layers: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A device's parameters for computation, whole or as shards; and gathered copies of shards."""
        kinds = param_kinds(merge_module(self.graphdef, params))
        held = {path: self._shard(leaf, specs[path], kinds[path]) for path, leaf in params.items()}
        if self.plan.cuts("copy"):
            return held, {}
        before = {Gathering.AT_ONCE} if keeps_layers else {Gathering.AT_ONCE, Gathering.BY_LAYER}
        shards = {path: leaf for path, leaf in held.items() if is_shard(leaf)}
        copies = {path: leaf.whole() for path, leaf in shards.items() if leaf.kind.gathering in before}
        if keeps_layers:
            layers = {path: leaf for path, leaf in shards.items() if leaf.kind.gathering is Gathering.BY_LAYER}
            held |= {path: dataclasses.replace(leaf, is_kept=True) for path, leaf in layers.items()}
        return (held, copies) if self.plan.cuts("grads") else ({**held, **copies}, {})

    def _shard(self, leaf: Array, spec: PartitionSpec, kind: ParamKind) -> Tree:
        """A device's part of a parameter of this kind; the whole parameter if it is not sharded."""
        leaf = self._vary(leaf, spec)  # a device's gradient is its own until it is summed here
        if FSDP not in spec:
            return leaf
        dim = spec.index(FSDP)
        is_weight = kind.gathering is Gathering.BY_LAYER and leaf.ndim > 2  # layers read norms and biases in float32
        if kind.gathering is Gathering.BY_ROW and dim != 0:  # a device has no whole rows to send
            kind = dataclasses.replace(kind, gathering=Gathering.AT_ONCE)
        dtype = self.dtype if is_weight else leaf.dtype
        return Shard(leaf, dim - leaf.ndim, FSDP, dtype, kind=kind, reduce_dtype=self._reduce_dtype)

    def _cut(self, grads: ParamLeaves, specs: Specs) -> dict[str, Any]:
        """The gradients, as shards for sharded parameters, summed over the devices that share a copy if not yet
        done."""

        def cut(grad: Array | Shard, spec: PartitionSpec) -> Tree:
            if isinstance(grad, Shard) or FSDP not in spec:
                return grad
            dim = spec.index(FSDP)
            sent = grad.astype(self._reduce_dtype)
            part = jax.lax.psum_scatter(sent, FSDP, scatter_dimension=dim, tiled=True)
            return Shard(part.astype(jnp.float32), dim - grad.ndim, FSDP, jnp.float32)

        return {path: cut(grad, specs[path]) for path, grad in grads.items()}

    def _over_micros(self, share: Callable[[Tree], Tree], batch: Tree, num_micros: int) -> Tree:
        """The sum of `share` over micro-batches. Row i of a device goes to micro-batch i % num_micros, without sending
        rows."""
        if num_micros == 1:
            return _float32(share(batch))
        micros = _micros(batch, num_micros)
        shapes = jax.eval_shape(share, jax.tree.map(lambda x: x[0], micros))
        zeros = jax.tree.map(_zeros_like, shapes)
        return jax.lax.scan(lambda total, micro: (jax.tree.map(jnp.add, total, share(micro)), None), zeros, micros)[0]

    def _vary(self, x: Array, spec: PartitionSpec) -> Tree:
        """The same value, typed as possibly different between the rows' devices."""
        return _varying(x, tuple(axis for axis in self._axes if axis not in spec))

    def _sum(self, shares: Tree) -> Tree:
        """The sum over the rows' devices."""
        return jax.lax.psum(shares, self._axes) if self._axes else shares

    def _sum_gradient(self, share: Array, spec: PartitionSpec) -> Tree:
        """The sum over the rows' devices in the type of the plan, except over the axes in `spec`, over which the
        gradient is sharded."""
        axes = tuple(axis for axis in self._axes if axis not in spec)
        return jax.lax.psum(share.astype(self._reduce_dtype), axes).astype(jnp.float32) if axes else share

    @property
    def _reduce_dtype(self) -> Tree:
        """The type in which gradients are sent and summed."""
        return jnp.dtype(getattr(jnp, self.plan.reduce_dtype))


def _micros(batch: Tree, num_micros: int) -> Tree:
    """The micro-batches of a device's rows, stacked: row i is in micro-batch i % num_micros."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // num_micros, num_micros, *x.shape[1:]).swapaxes(0, 1), batch)


def _at_hand(held: ParamLeaves, copies: ParamLeaves) -> dict[str, Any]:
    """Shards for modules that gather them, and all other parameters whole, from `copies` if available."""
    held = {path: leaf.with_copy(copies[path]) if path in copies else leaf for path, leaf in held.items()}
    return {path: _for_its_module(leaf) for path, leaf in held.items()}


def _for_its_module(leaf: Tree) -> Tree:
    if not is_shard(leaf) or leaf.kind.gathering is Gathering.AT_ONCE:
        return whole(leaf)
    # If a stack has more layers than any of its dims (or odd dims), the plan shards it along the layers.
    return leaf.of_every_layer() if leaf.kind.gathering is Gathering.BY_LAYER and leaf.has_rows else leaf


def _varying(x: Array, axes: tuple[str, ...]) -> Tree:
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _zeros_like(shape: jax.ShapeDtypeStruct) -> Tree:
    """float32 zeros that vary over the same axes: the total of a scan must have the type of what is added."""
    of_axes = shape.manual_axis_type  # None where there is one device
    axes = tuple(axis for axis in AXES if of_axes and axis in of_axes.varying)
    return _varying(jnp.zeros(shape.shape, jnp.float32), axes)


def _float32(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
