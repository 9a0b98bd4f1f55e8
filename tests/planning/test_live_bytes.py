"""What a traced program holds at once, against what a few lines hold by hand."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from openpi_train.parallel.layers import scan_layers, stack_layers
from openpi_train.parallel.params import mark_fixed, mark_unrolled, merge_module, module_params
from openpi_train.planning.costs import ROWS, bytes_per_row
from openpi_train.planning.live_bytes import Compiler, Moment, moments, peak_bytes

XLA_FOR_CPUS = Compiler()


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def floats_per_row(function, *inputs, compiler=XLA_FOR_CPUS):
    """The most float32 numbers that each row takes at once."""
    return peak_bytes(jax.make_jaxpr(function)(*inputs).jaxpr, bytes_per_row, compiler) / 4


def test_each_row_keeps_what_its_gradient_needs():
    def loss(kernel, rows):
        hidden = jnp.tanh(rows @ kernel)
        return (hidden * hidden).sum()

    # The product [8], of which tanh is made where it is read, and its gradient [8]; the rows themselves are an input.
    assert floats_per_row(jax.grad(loss), shape(6, 8), shape(ROWS, 6)) == 8 + 8
    assert floats_per_row(loss, shape(6, 8), shape(ROWS, 6)) == 8


def test_arithmetic_by_element_is_a_part_of_what_reads_it():
    def chain(rows, kernel):
        return jnp.exp(rows * 2 + 1) @ kernel

    assert floats_per_row(chain, shape(ROWS, 6), shape(6, 3)) == 6 + 3


def test_products_are_stored_where_all_their_shapes_are_the_same():
    # The first product of the squares, and the second.
    assert floats_per_row(lambda squares: squares @ squares @ squares, shape(ROWS, 8, 8)) == 64 + 64


def test_what_is_needed_later_is_kept_in_the_smaller_form():
    def narrow(rows, kernel):
        wide = rows @ kernel  # [8]
        kept = wide > 0  # 8 bytes, which are 2 numbers
        return jnp.where(kept, (jnp.tanh(wide) @ kernel.T) @ kernel, 0.0)

    # As tanh is made: the product, tanh of it and the mask. At the last product, [6] to [8], the first is gone.
    assert floats_per_row(narrow, shape(ROWS, 6), shape(6, 8)) == max(8 + 8 + 2, 6 + 8 + 2)


def test_what_can_be_made_again_in_several_steps_from_what_is_kept_anyway_is_not_kept():
    def network(rows, kernel):
        wide = rows @ kernel  # [8]
        mixed = jnp.sin(wide) * jnp.cos(wide)
        return (wide @ kernel @ kernel) * mixed * wide

    # While the last product runs: what it reads and makes, and the first product.
    assert floats_per_row(network, shape(ROWS, 8), shape(8, 8)) == 8 + 8 + 8


def test_a_gradient_takes_no_place_before_it_is_made():
    def loss(weights, rows):
        return ((jnp.tanh(rows @ weights[0]) @ weights[1]) ** 2).sum()

    weights = shape(6, 8), shape(8, 4)
    found = moments(jax.make_jaxpr(jax.grad(loss))(weights, shape(ROWS, 6)).jaxpr, bytes_per_row, 2)
    # While the gradient goes back through the second product, [4] to [8], beside the first and what follows from it;
    # at the end the gradient of the first product.
    assert found == [Moment(4.0 * 24, frozenset({0})), Moment(4.0 * 8)]
    assert peak_bytes(jax.make_jaxpr(jax.grad(loss))(weights, shape(ROWS, 6)).jaxpr, bytes_per_row) == 4 * 24


def test_an_input_is_over_once_neither_it_nor_its_copy_in_another_type_is_read():
    def loss(weights, fixed, rows):
        compared = (jnp.tanh(rows @ fixed.astype(rows.dtype)) ** 2).sum(axis=1)
        return ((rows @ weights).sum(axis=1) * compared).sum()

    fixed = jax.ShapeDtypeStruct((6, 10), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(shape(6, 4), fixed, shape(ROWS, 6)).jaxpr
    # The product with it, [10], and behind it the sum, beside the product; at the end the gradient of the other, [4].
    assert moments(jaxpr, bytes_per_row, 1, [[1]]) == [
        Moment(4.0 * (10 + 1), frozenset({0}), frozenset({0})),
        Moment(4.0 * 10, frozenset({0})),
        Moment(4.0 * 4, frozenset(), frozenset({0})),
    ]


def layers(x, weights, body):
    return (jax.lax.scan(lambda x, weight: (body(x, weight), None), x, weights)[0] ** 2).sum()


def twice(x, weight):
    return jnp.tanh(jnp.tanh(x @ weight) @ weight)


def test_layers_that_are_computed_again_keep_their_inputs_and_the_work_of_one_layer():
    inputs = shape(ROWS, 8), shape(50, 8, 8)

    def taken(body):
        return floats_per_row(jax.grad(lambda x, w: layers(x, w, body), argnums=1), *inputs) / 8

    kept, again = taken(twice), taken(jax.checkpoint(twice))
    # jax keeps of each tanh its value, and before 0.11 the derivative.
    assert 4 * 50 <= kept < 5 * 50 + 10 and 50 <= again < 50 + 10


def test_unrolled_layers_make_their_gradients_in_the_place_of_what_these_are_made_from():
    stacked = stack_layers(lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs), 50, nnx.Rngs(0))
    graph, params = nnx.split(stacked)

    def loss(params, x, unrolled, remat):
        layers = nnx.merge(graph, params)
        if unrolled:
            mark_unrolled(layers)
        return jnp.sum(
            scan_layers(layers, lambda one, x, _: (jnp.tanh(one(jnp.tanh(one(x)))), None), x, remat=remat)[0]
        )

    def most_with_gradients(unrolled, remat):
        jaxpr = jax.make_jaxpr(jax.grad(loss), static_argnums=(2, 3))(params, shape(ROWS, 8), unrolled, remat).jaxpr
        first, *others = moments(jaxpr, bytes_per_row, 1)
        return max((one.num_bytes for one in (first, *others) if not one.later), default=0.0) / first.num_bytes

    # A loop has the whole stack of gradients from its first turn on, when all is there that its turns will read.
    assert most_with_gradients(False, "full") > 0.9
    assert max(most_with_gradients(True, "full"), most_with_gradients(True, "dots")) < 0.1


@pytest.mark.parametrize("unrolled", [False, True])
def test_of_unrolled_layers_that_no_backward_pass_reads_there_is_one_at_a_time(unrolled):
    stacked = stack_layers(lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs), 5, nnx.Rngs(0))
    graph, params = nnx.split(stacked)[0], module_params(stacked)

    def loss(weight, fixed, x):
        layers = merge_module(graph, fixed)
        mark_fixed(layers, fixed)
        if unrolled:
            mark_unrolled(layers)
        reference = scan_layers(layers, lambda one, x, _: (jnp.tanh(one(x)), None), x, remat="full")[0]
        return jnp.sum(jnp.tanh(x @ weight) * jax.lax.stop_gradient(reference))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(shape(8, 8), params, shape(ROWS, 8)).jaxpr
    found = moments(jaxpr, bytes_per_row, 1, [[1]])
    assert {one.unread == frozenset({0}) for one in found} == ({True} if unrolled else {False, True})


def test_unrolled_layers_store_nothing_that_is_computed_from_what_is_stored_anyway():
    stacked = stack_layers(lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs), 50, nnx.Rngs(0))
    graph, params = nnx.split(stacked)

    def loss(params, x, unrolled):
        layers = nnx.merge(graph, params)
        if unrolled:
            mark_unrolled(layers)

        def body(one, x, _):
            found = one(x)
            return jnp.tanh(found) * jnp.sin(found), None

        return jnp.sum(scan_layers(layers, body, x, remat="none")[0])

    looped, unrolled = (
        peak_bytes(jax.make_jaxpr(jax.grad(loss), static_argnums=2)(params, shape(ROWS, 8), one).jaxpr, bytes_per_row)
        for one in (False, True)
    )
    # The product, and the input of the next one. A loop keeps the factors and their derivatives, too.
    assert 2 * 50 <= unrolled / 32 < 2 * 50 + 5
    assert looped / 32 > 4 * 50


@pytest.mark.parametrize(("unroll", "begun"), [(1, [2, 2, 2]), (4, [0, 1, 2])])
def test_gradients_of_unrolled_layers_are_begun_one_after_the_other(unroll, begun):
    def loss(layers, last, rows):
        seen = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), rows, layers, unroll=unroll)[0]
        return (jnp.tanh(seen @ last) ** 2).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(shape(4, 8, 8), shape(8, 64), shape(ROWS, 8)).jaxpr
    found = moments(jaxpr, bytes_per_row, 1)
    # Fullest before the layers' gradients begin; then a layer stores less than the one before.
    assert [one.begun_layers for one in found][:3] == begun[: len(found)]
    assert found[0].num_bytes > 4 * 64


@pytest.mark.parametrize("unroll", [1, 50])
def test_what_unrolled_layers_store_is_freed_layer_by_layer(unroll):
    def loss(weights, added, x):
        def body(x, inputs):
            weight, more = inputs
            return jnp.tanh(x @ weight + more), None

        return jax.lax.scan(body, x, (weights, added), unroll=unroll)[0].sum()

    def squares(*inputs):
        return (jax.grad(loss, 1)(*inputs) ** 2).sum(axis=(0, 2))

    stacks = floats_per_row(squares, shape(50, 8, 8), shape(50, ROWS, 8), shape(ROWS, 8)) / (50 * 8)
    # Each gradient of what is added takes the place of the result that it is made from; loops have both stacks.
    assert (1 if unroll > 1 else 2) <= stacks < (1.1 if unroll > 1 else 3.2)


def test_gradients_of_kernels_that_are_put_off_keep_what_they_are_made_from():
    def loss(kernels, x):
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")) ** 2
        return x.sum()

    inputs = [shape(3, 8, 8)] * 3, shape(ROWS, 24, 8)
    at_once, put_off = (
        floats_per_row(jax.grad(loss), *inputs, compiler=Compiler(fuses_norms=True, puts_off=one)) / (24 * 8)
        for one in (False, True)
    )
    # Three results, two squares and a gradient; or two squares, three gradients, the first result, and the gradient of
    # its square.
    assert (at_once, put_off) == (6, 7)


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_fixed_layers_are_read_until_the_backward_pass_ends(unrolled, remat):
    stacked = stack_layers(lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs), 5, nnx.Rngs(0))
    graph, params = nnx.split(stacked)[0], module_params(stacked)

    def loss(x, params):
        layers = merge_module(graph, params)
        mark_fixed(layers, params)
        if unrolled:
            mark_unrolled(layers)
        return jnp.sum(scan_layers(layers, lambda one, x, _: (jnp.tanh(one(x)), None), jnp.tanh(x), remat=remat)[0])

    jaxpr = jax.make_jaxpr(jax.grad(loss))(shape(ROWS, 8), params).jaxpr
    found = moments(jaxpr, bytes_per_row, 1, [[1]])
    assert max(one.num_bytes for one in found if not one.unread) == found[0].num_bytes
    assert all(not one.later for one in found if one.unread)  # the gradient in x has been made, or is being made


@pytest.mark.parametrize("unrolled", [False, True])
def test_fixed_matrices_and_their_copies_are_there_from_the_first_read_on_where_layers_are_unrolled(unrolled):
    def loss(x, first, second, third, scale):
        copy = second.astype(jnp.float32)
        wide = jnp.tanh(x @ first)  # 64 numbers of a row; 16 when the second is read, 8 when the scale is
        narrow = jnp.tanh(jnp.sum(wide.reshape(-1, 8, 8) ** 2, -1))
        seen = jnp.tanh(narrow @ copy)
        seen = jax.lax.scan(lambda x, one: (jnp.tanh(x @ one), None), seen, third, unroll=2 if unrolled else 1)[0]
        return jnp.sum(jnp.tanh(jax.lax.sort(seen) * scale))

    inputs = shape(ROWS, 8), shape(8, 64), jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), shape(2, 8, 8), shape(8)
    groups = [[1], [2], [4]]
    found = moments(jax.make_jaxpr(loss)(*inputs).jaxpr, bytes_per_row, 0, groups)
    most = [max(one.num_bytes for one in found if number not in one.unread) for number in range(len(groups))]
    assert most == ([4 * 64, 4 * 16, 4 * 16] if unrolled else [4 * 64, 4 * (64 + 8), 4 * (64 + 8)])
    # Never two of them; in a loop all until the first of them is over.
    assert {len(groups) - len(one.unread) for one in found} == ({0, 1} if unrolled else {0, 1, 2, 3})
    never = jax.make_jaxpr(lambda x, matrix: jnp.sum(jnp.tanh(x)))(inputs[0], inputs[1]).jaxpr
    assert all(one.unread == frozenset({0}) for one in moments(never, bytes_per_row, 0, [[1]]))


def test_a_loop_has_one_copy_of_what_it_carries_however_long_it_is():
    def powers(length):
        return lambda x, weight: jax.lax.fori_loop(0, length, lambda _, x: x @ weight, x)

    # The input is copied once; a turn reads it and writes the next.
    assert {floats_per_row(powers(n), shape(ROWS, 8), shape(8, 8)) for n in (2, 200)} == {16}


def test_branches_take_what_the_larger_one_takes():
    def branch(x, weight):
        small, large = lambda x: x.sum(axis=1), lambda x: ((x @ weight) @ weight).sum(axis=1)
        return jax.lax.cond(True, large, small, x)

    assert floats_per_row(branch, shape(ROWS, 8), shape(8, 8)) == 8 + 8 + 1


def test_compilers_for_gpus_compute_the_norm_of_a_convolution_where_it_is_read():
    def centred(x):
        return x - x.mean(axis=(1, 2), keepdims=True)

    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

    def network(x, kernel):
        found = convolved(x, kernel)
        one, other = centred(found), centred(found[..., None])[..., 0]
        return convolved(jnp.tanh(one), kernel) * one * other

    inputs = shape(ROWS, 25, 8), shape(1, 8, 8)  # 200 numbers of a row in each array, and a mean
    stored, fused = (
        floats_per_row(network, *inputs, compiler=Compiler(fuses_norms=one)) / 200 for one in (False, True)
    )
    # While the second convolution runs: what it reads and makes, and both centred arrays or what they are made of.
    assert 4 <= stored < 4.02 and 3 <= fused < 3.02


def test_compilers_for_gpus_compute_any_norm_where_it_is_read():
    def network(x, weight):
        kept = jnp.sort(x)
        normed = kept * jax.lax.rsqrt(jnp.mean(jnp.square(kept), axis=-1, keepdims=True))
        return (jnp.tanh(kept @ weight) * normed + kept) @ weight

    inputs = shape(ROWS, 64), shape(64, 64)
    stored, fused = (floats_per_row(network, *inputs, compiler=Compiler(fuses_norms=one)) / 64 for one in (False, True))
    # What is sorted, both products' first input and the first one's output, and the norm, or the mean that makes it.
    assert (stored, fused) == (4, 3 + 1 / 64)


def test_the_gradient_of_a_maximum_reads_what_follows_from_a_convolution_where_it_is_made():
    def loss(kernel, x):
        found = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
        pooled = jax.lax.reduce_window(found * found, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID")
        return (pooled * pooled).sum()

    inputs = shape(1, 8, 8), shape(ROWS, 24, 8)
    stored, fused = (
        floats_per_row(jax.grad(loss), *inputs, compiler=Compiler(fuses_norms=one)) / (24 * 8) for one in (False, True)
    )
    # The convolution, its square, the square's gradient and half as much of its maxima; or the first, the gradient, and
    # half as much for that of the maxima and for each number of their places.
    assert (stored, fused) == (3.5, 2 + 0.5 * (1 + 3))


def test_what_does_not_go_by_rows_is_left_out():
    assert floats_per_row(lambda weight: weight @ weight, shape(8, 8)) == 0
