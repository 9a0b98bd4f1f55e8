"""A sharded parameter that is gathered when it is used.

For use inside `jax.shard_map`, so that communication is explicit and not chosen by the compiler: the part is sent in
the compute dtype, and its gradient is reduce-scattered in the type of the plan, float32 or bfloat16 (ZeRO stage 3,
Rajbhandari et al. 2020). Also the communication in a tensor group, whose devices compute different heads of the same
rows: `spread` and `summed`. Read next: `layers.py: scan_layers`, which gathers layer by layer, and
`devices.py`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openpi_train.parallel.mesh import TENSOR
from openpi_train.parallel.params import ParamKind
from openpi_train.types import Tree

_STATIC = {"static": True}  # by jax's convention: part of the tree's structure, not a leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Shard:
    """This device's `part` of an array that is sharded along `dim` (counted from the last, -1) over the mesh axis
    `axis`.

    `dtype` is the type of the gathered array. `copy` is the whole array, or a tuple of its `entries`, if the device
    has it: then nothing is gathered, but the gradient is still reduce-scattered where it arises (ZeRO stage 2).
    `kind` is the parameter's, but its gathering here is at once if devices have no whole rows of a table.
    """

    part: Any
    dim: int = dataclasses.field(metadata=_STATIC)
    axis: str = dataclasses.field(metadata=_STATIC)
    dtype: Any = dataclasses.field(metadata=_STATIC)
    copy: Any = None
    kind: ParamKind = dataclasses.field(default=ParamKind(), metadata=_STATIC)
    # Whether a layer, once gathered, stays for the backward pass.
    is_kept: bool = dataclasses.field(default=False, metadata=_STATIC)
    # The type in which gradients are sent and summed.
    reduce_dtype: Any = dataclasses.field(default=jnp.float32, metadata=_STATIC)
    # The shape of a layer, if `part` has consecutive entries of every layer of a stack.
    layer: tuple[int, ...] | None = dataclasses.field(default=None, metadata=_STATIC)

    @property
    def has_rows(self) -> bool:
        """Whether each device has some of the rows, each of them whole."""
        return self.dim == -self.part.ndim

    def whole(self, *, wide: bool = False) -> Array:
        """Gather the whole array, in `dtype`. Its gradient flows to `part`; `copy` has none.

        `wide`: the result has the type of `part`, though the precision of `dtype`, and so has its gradient: what
        narrows the array again at once (`nn/matmul.py: product`) then need not round the gradient, unless that is
        sent in `dtype`.
        """
        dim = self.part.ndim + self.dim
        dtype = self.part.dtype if wide and self.reduce_dtype != self.dtype else self.dtype

        @jax.named_scope("gather")
        def gather(_, part: Array) -> Array:
            found = jax.lax.all_gather(part.astype(self.dtype), self.axis, axis=dim, tiled=True)
            found = found if self.layer is None else found[: math.prod(self.layer)].reshape(self.layer)
            return found.astype(dtype)

        @jax.named_scope("reduce")
        def scatter(_, gradient: Array) -> Array:
            sent = gradient.astype(self.reduce_dtype)
            if self.layer is not None:
                sent = _filled(sent.reshape(-1), jax.lax.axis_size(self.axis))
            return jax.lax.psum_scatter(sent, self.axis, scatter_dimension=dim, tiled=True).astype(self.part.dtype)

        if self.copy is None:
            return jax.custom_derivatives.linear_call(gather, scatter, (), self.part)
        known = jax.custom_vjp(lambda copy, part: copy)
        known.defvjp(lambda copy, part: (copy, None), lambda _, gradient: (None, scatter(None, gradient)))
        return known(self.copy.astype(dtype), self.part)

    @property
    def entries(self) -> tuple["Shard", ...] | None:
        """A shard of each entry of the first axis, where products read one; None if that axis is sharded, or flattened
        with others."""
        if not self.kind.by_entry or self.has_rows or self.layer is not None:
            return None
        copies = [None] * len(self.part) if self.copy is None else self.copy
        return tuple(
            dataclasses.replace(self, part=part, copy=copy) for part, copy in zip(self.part, copies, strict=True)
        )

    def with_copy(self, copy: Array | tuple[Array, ...] | None) -> "Shard":
        """The same part, with the whole array available, or its `entries`."""
        return dataclasses.replace(self, copy=copy)

    @jax.named_scope("share_layers")
    def of_every_layer(self) -> "Shard":
        """Reshard a stack of which each device has some layers, so that each device has a part of every layer.

        Devices exchange their parts once. A device then has consecutive entries of each flattened layer.
        """
        flat = _filled(self.part.reshape(len(self.part), -1), jax.lax.axis_size(self.axis))
        part = jax.lax.all_to_all(flat, self.axis, split_axis=1, concat_axis=0, tiled=True)
        return dataclasses.replace(self, part=part, dim=-1, layer=self.part.shape[1:])

    def __getitem__(self, _: object | None = None) -> Array:
        """Refused: modules read shards only in the ways of `Gathering`. Always raises TypeError."""
        raise TypeError(
            "a parameter that its module gathers by itself was read otherwise: a stack that stack_layers made runs "
            "only by scan_layers, and a table is read only by take_rows, logits and log_probs"
        )

    __jax_array__ = __getitem__


def _filled(x: Array, num_parts: int) -> Array:
    """`x` zero-padded in its last dim to a multiple of `num_parts`."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % num_parts),))


def is_shard(leaf: object) -> bool:
    """Whether it is a `Shard`."""
    return isinstance(leaf, Shard)


def whole(tree: Tree) -> Tree:
    """`tree` with every shard gathered."""
    return jax.tree.map(lambda leaf: leaf.whole() if is_shard(leaf) else leaf, tree, is_leaf=is_shard)


@jax.named_scope("gather_rows")
def take_rows(table: Array | Shard, rows: Int[Array, "*n"]) -> Float[Array, "*n d"]:
    """`table[rows]`. If the table is sharded by rows, only these rows are sent, never the table or its gradient."""
    if not isinstance(table, Shard):
        return table[rows]
    if not table.has_rows:
        return table.whole()[rows]
    wanted = jax.lax.all_gather(rows, table.axis)  # devices *n
    own = wanted - jax.lax.axis_index(table.axis) * table.part.shape[0]
    is_here = (own >= 0) & (own < table.part.shape[0])
    found = jnp.where(is_here[..., None], table.part[jnp.where(is_here, own, 0)], 0)
    # One device has the row and all others have zeros: the sum is exact.
    return jax.lax.psum_scatter(found, table.axis)


def varies(x: Array) -> bool:
    """Whether `x` differs between the devices of a tensor group: parts, or values computed from parts."""
    return TENSOR in jax.typeof(x).manual_axis_type.varying


def spread(x: Float[Array, "*n"], weight: Array) -> Float[Array, "*n"]:
    """Prepare `x`, replicated in a tensor group, for products with each device's own part of `weight`.

    Its gradient is summed over the group, once for all products with the result (the operator f of
    Shoeybi et al. 2019, section 3). If `weight` is whole, or `x` is not replicated, returns `x` itself.
    """
    if varies(x) or not varies(weight):
        return x
    return jax.lax.pcast(x, TENSOR, to="varying")


def own_heads(x: Float[Array, "b s k c"], num_queries: int, per_head: int) -> Float[Array, "b s _ c"]:
    """The key (or value) heads that this device's query heads attend to, `per_head` query heads at each."""
    if x.shape[2] in (1, num_queries // per_head):
        return x
    # A tensor group splits the query heads, but has too few key heads to split: every device has all of them.
    first = jax.lax.axis_index(TENSOR) * num_queries
    return x[:, :, (first + jnp.arange(num_queries)) // per_head]


def summed(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The sum over a tensor group, replicated; its gradient needs no communication (the operator g)."""
    return jax.lax.psum(x, TENSOR) if varies(x) else x


def as_varied(x: Array, other: Array) -> Array:
    """`x` with the varying mesh axes (in jax's types) of `other`: a loop needs the same type before and after."""
    axes = jax.typeof(other).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def on_all_devices(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether `flag` holds on all devices on which it may differ: the same on each, as required by loops that send."""
    axes = tuple(jax.typeof(flag).manual_axis_type.varying)
    return jax.lax.psum((~flag).astype(jnp.int32), axes) == 0 if axes else flag
