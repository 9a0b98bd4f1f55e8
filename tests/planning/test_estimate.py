"""What a step's activations take by the estimate: against a few lines by hand, and against XLA's GPU compiler."""

import jax
import jax.numpy as jnp
import pytest
from planning import compiled_steps

from openpi_train.planning.costs import ROWS, bytes_per_row
from openpi_train.planning.estimate import peak_bytes
from openpi_train.planning.forecast import recommend
from openpi_train.planning.memory import OFF
from openpi_train.runtime.device_kinds import GIB


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def floats_per_row(function, *inputs):
    """The most float32 numbers that each row takes at once."""
    return peak_bytes(jax.make_jaxpr(function)(*inputs).jaxpr, bytes_per_row) / 4


def test_each_row_keeps_what_its_gradient_needs():
    def loss(kernel, rows):
        hidden = jnp.tanh(rows @ kernel)
        return (hidden * hidden).sum()

    # The product [8], of which tanh is made where it is read, and its gradient [8], which has its place.
    assert floats_per_row(jax.grad(loss), shape(6, 8), shape(ROWS, 6)) == 8
    assert floats_per_row(loss, shape(6, 8), shape(ROWS, 6)) == 8


def test_arithmetic_by_element_is_a_part_of_what_reads_it():
    def chain(rows, kernel):
        return jnp.exp(rows * 2 + 1) @ kernel

    assert floats_per_row(chain, shape(ROWS, 6), shape(6, 3)) == 6 + 3


def test_products_are_stored_where_all_their_shapes_are_the_same():
    # The first product of the squares, and the second.
    assert floats_per_row(lambda squares: squares @ squares @ squares, shape(ROWS, 8, 8)) == 64 + 64


def test_norms_are_computed_where_they_are_read():
    def network(x, weight):
        kept = jnp.sort(x)
        normed = kept * jax.lax.rsqrt(jnp.mean(jnp.square(kept), axis=-1, keepdims=True))
        return (jnp.tanh(kept @ weight) * normed + kept) @ weight

    # What is sorted, the mean of its squares, and the first product; then what the second one reads, and its result.
    assert floats_per_row(network, shape(ROWS, 64), shape(64, 64)) / 64 == 2 + 1 / 64


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


def test_a_forward_pass_of_which_nothing_is_kept_may_need_more_than_the_backward_pass():
    def loss(weight, fixed, x):
        wide = jnp.tanh(jax.lax.stop_gradient(x) @ fixed)  # [64]
        return jnp.sum((wide @ fixed.T) @ weight)

    # What the second product of what is fixed reads and makes; the backward pass needs 8 each.
    assert floats_per_row(jax.grad(loss), shape(8, 8), shape(8, 64), shape(ROWS, 8)) == 64 + 8


def test_a_loop_takes_what_it_carries_and_one_turn_however_long_it_is():
    def powers(length):
        return lambda x, weight: jax.lax.fori_loop(0, length, lambda _, x: x @ weight @ weight, x)

    # The result, and the first product of a turn.
    assert {floats_per_row(powers(n), shape(ROWS, 8), shape(8, 8)) for n in (2, 200)} == {16}


def test_branches_take_what_the_larger_one_takes():
    def branch(x, weight):
        small, large = lambda x: x.sum(axis=1), lambda x: ((x @ weight) @ weight).sum(axis=1)
        return jax.lax.cond(True, large, small, x)

    assert floats_per_row(branch, shape(ROWS, 8), shape(8, 8)) == 8 + 8 + 1


def test_what_does_not_go_by_rows_is_left_out():
    assert floats_per_row(lambda weight: weight @ weight, shape(8, 8)) == 0


# Of these XLA gathers ahead as memory is free: GiB that are enough (`benchmarks/results/gpu_tight.md`).
TIGHT = {"pi05_bridge_lora": 2.35, "paligemma_flow_lora": 2.22}
# Steps that differ from others of the table by little that is estimated, or are traced at length.
_LEFT_OUT = (
    "pusht_dp",
    "tabletop_dp",
    "tabletop_dp_rloo",
    "paligemma_tokens",
    "arithmetic_ppo",
    "gsm8k_kto_llama32_1b",
)
_LEFT_OUT += ("act_aloha_sim", "gsm8k_dpo_lora_llama32_1b", "pi0_fast_bridge_lora", "paligemma_flow_frozen_tower")
# One of each experiment.
STEPS = {one.experiment: one for one in [*compiled_steps.of_families()][::-1] if one.experiment not in _LEFT_OUT}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS.values(), ids=str)
def test_a_gpus_step_is_estimated_within_a_quarter(step):
    machine = compiled_steps.h100(step.devices, step.hosts)
    found, _ = recommend(compiled_steps.forecasts_of(step.experiment, step.flags, machine))
    assert found is not None
    memory = found.memory
    needed = TIGHT.get(step.experiment, step.gib) if "zero3" in step.flags else step.gib
    assert (memory.state + memory.step) / GIB == pytest.approx(needed, rel=OFF)
