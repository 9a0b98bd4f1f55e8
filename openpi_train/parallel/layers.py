"""Stacks of layers, run in a loop or one after the other, and how devices that shard them gather each.

Read next: `remat.py`, then `nn/siglip.py` and `nn/gemma.py`, which use these.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array

from openpi_train.parallel.params import Gathering, ParamUse, kind_of, use_of
from openpi_train.parallel.remat import Remat, recomputed
from openpi_train.parallel.shard import Shard, is_shard, whole
from openpi_train.types import Tree

M = TypeVar("M", bound=nnx.Module)


def stack_layers(make: Callable[[nnx.Rngs], M], depth: int, rngs: nnx.Rngs) -> M:
    """One module with the parameters of `depth` separately initialised layers, stacked on a new first axis.

    Run it by `scan_layers` and the functions below, which gather each layer when it runs.
    """
    stacked = nnx.vmap(make)(rngs.split(depth))
    for _, variable in nnx.to_flat_state(nnx.state(stacked, nnx.Param)):
        variable.set_metadata(kind=dataclasses.replace(kind_of(variable), gathering=Gathering.BY_LAYER))
    return stacked


def _split(stacked: nnx.Module) -> tuple[nnx.GraphDef, Any]:
    """Graph and parameters of a stack. Raises ValueError if `stack_layers` did not make it."""
    graph, params = nnx.split(stacked)
    for path, variable in nnx.to_flat_state(params):
        if isinstance(variable, nnx.Param) and kind_of(variable).gathering is not Gathering.BY_LAYER:
            raise ValueError(
                f"{'/'.join(map(str, path))} of these layers was not made by stack_layers: devices that shard it "
                "would gather all layers at once. Make the stack by stack_layers"
            )
    return graph, params


def scan_layers(
    stacked: M,
    body: Callable[[M, Any, Any], tuple[object, object]],
    carry: Tree,
    per_layer: Tree | None = None,
    *,
    remat: Remat,
) -> tuple[Any, Any]:
    """Apply a stack of layers in order.

    A step can unroll them (`params.py: ParamUse`): they become code of their own, one after the other, instead of a
    loop. Then what the backward pass needs is not copied into stacks and out of them again, and compiling takes longer.

    Args:
        stacked: result of `stack_layers`.
        body: (layer, carry, this layer's slice of `per_layer`) -> (carry, output).
        carry: the value passed from layer to layer.
        per_layer: a tree of arrays with the layers on the first axis, or None.
        remat: what the backward pass recomputes.

    Returns:
        The last carry, and the layers' outputs stacked on a first axis.
    """
    graph, params = _split(stacked)
    fetches, unrolled = _has_shards(params), _use(params).unrolled

    def step(carry: Tree, layer: Tree, extra: Tree) -> tuple[Any, Any]:
        layer = _gathered(layer)
        if unrolled and remat == "full":
            carry, layer = _with_own_gradients(carry, layer, sent=fetches)
        return body(nnx.merge(graph, layer), carry, extra)

    if not unrolled:
        return _loop(step, carry, params, per_layer, remat, fetches)
    before, last_extra = (jax.tree.map(lambda x, part=part: x[part], per_layer) for part in (slice(-1), -1))
    carry, outputs, last = _unrolled(step, carry, params, before, remat, fetches)
    run_last = recomputed(step, remat, fetches, unrolled=True)
    carry, output = run_last(jax.tree.map(_in_order, carry), _with_copies(last), last_extra)
    return carry, jax.tree.map(lambda rest, one: jnp.concatenate([rest, one[None]]), outputs, output)


# (what is passed from layer to layer, a layer's parameters, its slice of `per_layer`) -> (what is passed on, output)
_Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def _loop(step: _Step, carry: Tree, layers: Tree, per_layer: Tree, remat: Remat, fetches: bool) -> tuple[Any, Any]:
    """`jax.lax.scan` over the layers with what `remat` recomputes in the backward pass."""
    run = recomputed(step, remat, fetches, unrolled=False)
    return jax.lax.scan(lambda carry, inputs: run(carry, *inputs), carry, (layers, per_layer))


def _unrolled(step: _Step, carry: Tree, layers: Tree, per_layer: Tree, remat: Remat, fetches: bool) -> Tree:
    """The same as code for one layer after the other, but without the last one, whose parameters come last.

    A layer passes the parameters of the next one on. So its backward pass has their gradients, which are summed over
    the devices meanwhile, and gives them on together with that of its own input: the layer before begins when they are
    there. Left to itself XLA puts the products for gradients of weights off, and keeps what they read, and sums most
    gradients over the devices at the end of the step (jaxlib 0.10.2).

    Layers read shards and vectors from the stack: of what the backward pass keeps XLA would make copies, of shards in
    float32 and in the order in which they are gathered. They read frozen matrices when they run: XLA copies what is
    read of a stack, and would else do so for all layers at the beginning.

    Layers read activations and get gradients in the order of their dims, as a loop carries them. Without that XLA puts
    the batch last in those of a SigLIP and transposes between its products.
    """

    def read(index: Array, carry: Tree, layer: Tree, extra: Tree) -> tuple[Any, Any]:
        return step(carry, _read_from(layers, index, layer, carry), extra)

    # Without checkpoint's own barrier XLA would find what is recomputed to be there already, and keep it.
    run = recomputed(read, remat, fetches, unrolled=True)

    def turn(state: Tree, inputs: Tree) -> Tree:
        (carry, layer), (index, following, extra) = state, inputs
        # Those that are frozen do not pass: the function would give them gradients, of zeros.
        trained = jax.tree.map(lambda leaf: None if _is_frozen(leaf) else leaf, following, is_leaf=_is_variable)
        carry, trained = _with_gradients_at_once((jax.tree.map(_in_order, carry), trained))
        following = jax.tree.map(
            lambda one, given: given if one is None else one, trained, following, is_leaf=_is_variable_or_none
        )
        carry, output = run(index, carry, _with_copies(layer), extra)
        return (carry, following), output

    first, later = jax.tree.transpose(jax.tree.structure(layers), None, jax.tree.map(_first_and_later, layers))
    indices = jnp.arange(len(jax.tree.leaves(later)[0]))
    (carry, last), outputs = jax.lax.scan(turn, (carry, first), (indices, later, per_layer), unroll=True)
    return carry, outputs, last


def _with_own_gradients(carry: Tree, layer: Tree, *, sent: bool) -> tuple[Any, Any]:
    """What a layer reads; the gradient of `carry` waits for those of the layer's trained weights.

    XLA would else put their products off until after the layer before is computed again, and keep what they read. Where
    gradients are then `sent` it waits for the wide ones alone (`params.py: ParamKind`), whose products read most:
    waiting for all would leave less to do while they are sent.
    """

    def waits(leaf: Tree) -> bool:
        return _is_variable(leaf) and not _is_frozen(leaf) and (not sent or kind_of(leaf).wide)

    own = jax.tree.map(lambda leaf: leaf if waits(leaf) else None, layer, is_leaf=_is_variable)
    carry, own = _held((carry, own))
    return carry, jax.tree.map(lambda a, b: b if a is None else a, own, layer, is_leaf=_is_variable_or_none)


@jax.custom_vjp
def _held(inputs: Tree) -> Tree:
    """The inputs; what reads the gradient of one of these arrays waits for those of all."""
    return inputs


def _held_backward(_: None, gradients: Tree) -> Tree:
    leaves, tree = jax.tree.flatten(gradients)
    return (jax.tree.unflatten(tree, _together(leaves)),)


_held.defvjp(lambda inputs: (inputs, None), _held_backward)


def _read_from(stack: Tree, index: Array, layer: Tree, carry: Tree) -> Tree:
    """The parameters of the layer with this index, which gets `carry`; shards that are gathered again in the backward
    pass, vectors, and what is frozen are read from the stack, with gradients to the layer's own."""

    def read(one: nnx.Variable, of_all: nnx.Variable) -> Tree:
        value = one.get_value() if _is_variable(one) else None
        if isinstance(value, jax.Array) and value.ndim > 1 and _is_frozen(one):
            return one.replace(_entry_for(carry, of_all.get_value(), index))
        if isinstance(value, jax.Array) and value.ndim == 1:
            read_entry = _entry if _is_frozen(one) else _read_entry  # which would compute a gradient
            return one.replace(read_entry(of_all.get_value(), index, value))
        if not isinstance(value, Shard) or value.is_kept:
            return one
        return one.replace(dataclasses.replace(value, part=_read_entry(of_all.get_value().part, index, value.part)))

    return jax.tree.map(read, layer, stack, is_leaf=_is_variable)


def _entry_for(carry: Tree, stack: Array, index: Array) -> Array:
    """The entry of a stack with this index, read when `carry` is there."""
    there = jax.tree.map(jax.lax.stop_gradient, carry)
    index, _ = jax.lax.optimization_barrier((index, there))
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _entry(stack: Array, index: Array, entry: Array) -> Array:
    """The entry of a stack with this index, which is `entry` and gets the gradient."""
    del entry
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


_read_entry = jax.custom_vjp(_entry)
_read_entry.defvjp(lambda *inputs: (_entry(*inputs), None), lambda _, gradient: (None, None, gradient))


@jax.custom_vjp
def _with_gradients_at_once(inputs: Tree) -> Tree:
    """The inputs; what reads the gradient of one of these arrays waits for those of all. Gradients are in the order of
    their dims."""
    return inputs


def _gradients_at_once(_: None, gradients: Tree) -> Tree:
    leaves, tree = jax.tree.flatten(gradients)
    waiting = jax.tree.leaves(jax.tree.map(_as_sent, gradients, is_leaf=is_shard))
    ordered = [leaf if leaf.dtype == jax.dtypes.float0 else _in_order(leaf) for leaf in waiting]
    passed = [one.astype(leaf.dtype) for one, leaf in zip(_together(ordered), leaves, strict=True)]
    return (jax.tree.unflatten(tree, passed),)


def _together(gradients: Sequence[Array]) -> list[Array]:
    """The gradients; what reads one of them waits for all."""
    found = list(gradients)
    # In a tensor group some vary over its devices: jax 0.10 gives all that pass a barrier the type of those.
    groups: dict[Any, list[int]] = {}
    for n, gradient in enumerate(gradients):
        if gradient.dtype != jax.dtypes.float0:
            groups.setdefault(_axes(gradient), []).append(n)
    for numbers in groups.values():
        passed = jax.lax.optimization_barrier([gradients[n] for n in numbers])
        for n, gradient in zip(numbers, passed, strict=True):
            found[n] = gradient
    return found


def _as_sent(gradient: Tree) -> Tree:
    """A gradient in the type in which it was sent, if it was: its values are of that type. It waits in it, and is
    widened when it is written to the stack."""
    if not is_shard(gradient):
        return gradient
    return dataclasses.replace(gradient, part=gradient.part.astype(gradient.reduce_dtype))


def _axes(x: Array) -> frozenset[str]:
    """The mesh axes over whose devices `x` varies, in jax's types."""
    found = jax.typeof(x).manual_axis_type
    return frozenset(found.varying) if found else frozenset()


_with_gradients_at_once.defvjp(lambda inputs: (inputs, None), _gradients_at_once)


def _in_order(x: Array) -> Array:
    """`x`, in the order of its dims in memory, as its gradient will be."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x


@jax.custom_vjp
def _cut_first(x: Array) -> tuple[Array, Array]:
    """The first entry, and the others. Their gradients are written to a stack."""
    return x[0], x[1:]


_cut_first.defvjp(
    lambda x: (_cut_first(x), None),
    lambda _, gradients: (_stacked(gradients),),
)


def _stacked(gradients: tuple[Array, Array]) -> Array:
    """The gradients of the first layer and of the others, written before they are read: XLA would have the optimizer's
    kernels read them one by one, which took an H200 three times as long as reading a stack
    (docs/understand/benchmarks.md)."""
    first, later = gradients
    return jax.lax.optimization_barrier(jnp.concatenate([_in_order(first)[None], later]))


def _first_and_later(x: Array) -> tuple[Array, Array]:
    return _cut_first(x) if jnp.issubdtype(x.dtype, jnp.inexact) else (x[0], x[1:])


def _with_copies(layer: Tree) -> Tree:
    """A layer's parameters with copies of the shards that are kept for the backward pass, entry by entry where products
    read them so."""

    def with_copy(leaf: Tree) -> Tree:
        value = leaf.get_value() if _is_variable(leaf) else None
        if not isinstance(value, Shard) or not value.is_kept:
            return leaf
        entries = value.entries
        copy = value.whole() if entries is None else tuple(entry.whole() for entry in entries)
        return leaf.replace(value.with_copy(jax.lax.stop_gradient(copy)))

    return jax.tree.map(with_copy, layer, is_leaf=_is_variable)


def _use(params: Tree) -> ParamUse:
    """What a step does with all parameters of a stack; which of them are frozen, each says itself."""
    return next(filter(None, map(use_of, jax.tree.leaves(params, is_leaf=_is_variable))), ParamUse())


def _gathered(layer_params: Tree) -> Tree:
    """The parameters of one layer for training, with every shard gathered.

    Weights of which a product reads one entry of the first axis become tuples of these entries, each gathered by
    itself: then no entry need be copied out of a gathered array.
    """

    def gathered(variable: nnx.Variable) -> Tree:
        value = variable.get_value()
        if not is_shard(value):
            return variable
        entries = value.entries
        if entries is None:
            return variable.replace(value.whole(wide=True))
        return variable.replace(tuple(entry.whole(wide=True) for entry in entries))

    return jax.tree.map(gathered, layer_params, is_leaf=_is_variable)


def each_layer(stacked: M) -> list[M]:
    """The layers one by one, as copies. A loop that reads these need not cut them out of the stack in every round."""
    graph, params = _split(stacked)
    depth = len(jax.tree.leaves(params)[0])
    return [nnx.merge(graph, whole(jax.tree.map(lambda x, n=n: x[n], params))) for n in range(depth)]


def _has_shards(params: Tree) -> bool:
    """Whether some of these parameters are shards, or to be treated so."""
    return _use(params).as_gathered or any(map(is_shard, jax.tree.leaves(params, is_leaf=is_shard)))


def scan_to_last(
    stacked: M,
    body: Callable[[M, Any, Any], tuple[Any, Any]],
    carry: Tree,
    per_layer: Tree | None = None,
    *,
    remat: Remat,
    dtype: DTypeLike,
) -> tuple[Any, Any, M]:
    """Apply all layers but the last one, with a backward pass: the result of `scan_layers`, and the last layer, which
    may then be computed differently.

    What needs a gradient is cut, which copies it. Matrices, which layers cast to `dtype` anyway, are therefore cast
    first: the copy is then the only one, and half the size in bfloat16. Norm scales and biases are unchanged (they are
    used in float32), and so are shards, which are cast when gathered. What is frozen, and need not be
    cast, is read from the stack layer by layer; shards whose gathered layers are kept are cut, too.
    """
    graph, params = _split(stacked)

    def is_read(variable: nnx.Variable) -> bool:
        value = variable.get_value()
        in_type = not value.is_kept if is_shard(value) else value.ndim < 3 or value.dtype == dtype
        return in_type and _is_frozen(variable)

    def parts(keep: Callable[[nnx.Variable], bool]) -> Tree:
        return jax.tree.map(lambda leaf: leaf if keep(leaf) else None, params, is_leaf=_is_variable)

    def cast(x: Tree) -> Tree:
        return x if is_shard(x) or x.ndim < 3 else x.astype(dtype)

    read, unrolled = parts(is_read), _use(params).unrolled
    cut = jax.tree.map(cast, parts(lambda leaf: not is_read(leaf)), is_leaf=is_shard)

    def entry(variable: nnx.Variable, index: Array, carry: Tree) -> nnx.Variable:
        value = variable.get_value()
        if unrolled and not is_shard(value) and value.ndim > 2:
            return variable.replace(_entry_for(carry, value, index))
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), variable)

    def whole_layer(index_and_others: Tree, carry: Tree) -> M:
        index, others = index_and_others
        mine = jax.tree.map(lambda one: entry(one, index, carry), read, is_leaf=_is_variable)
        layer = jax.tree.map(lambda a, b: b if a is None else a, mine, others, is_leaf=_is_variable_or_none)
        return nnx.merge(graph, _gathered(layer))

    def step(carry: Tree, index_and_others: Tree, extra: Tree) -> tuple[Any, Any]:
        return body(whole_layer(index_and_others, carry), carry, extra)

    depth = len(jax.tree.leaves(params)[0])
    fetches = bool(jax.tree.leaves(read)) or _has_shards(params)
    if unrolled:
        carry, outputs, last = _unrolled(step, carry, (jnp.arange(depth), cut), per_layer, remat, fetches)
        last = _with_copies(last)
    else:
        before = jnp.arange(depth - 1), jax.tree.map(lambda x: x[:-1], cut)
        carry, outputs = _loop(step, carry, before, per_layer, remat, fetches)
        last = depth - 1, jax.tree.map(lambda x: x[-1], cut)
    return carry, outputs, whole_layer(last, carry)


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable)


def _is_frozen(leaf: Tree) -> bool:
    return _is_variable(leaf) and (use_of(leaf) or ParamUse()).frozen


def _is_variable_or_none(leaf: object) -> bool:
    return leaf is None or _is_variable(leaf)


def scan_all_but_last(stacked: M, body: Callable[[M, Any], tuple[object, object]], carry: Tree) -> tuple[Any, Any, M]:
    """Apply all layers but the last: returns the result of `scan_layers`, and the last layer. Copies no layer.

    Only without a backward pass: here the gradient of each layer would be as large as the stack.
    """
    graph, params = _split(stacked)

    def layer(index: Array | int) -> M:
        return nnx.merge(graph, whole(jax.tree.map(lambda x: x[index], params)))

    depth = len(jax.tree.leaves(params)[0])
    return *jax.lax.scan(lambda carry, index: body(layer(index), carry), carry, jnp.arange(depth - 1)), layer(-1)
