"""Bytes per device of the full pi0, by abstract evaluation, against 22 bytes per parameter: master, m, v, EMA,
gradient, and a bfloat16 copy. Rows of the token table that are cut stay on their devices: they have no whole copy, and
their gradient is cut where it arises. A whole gradient of gathered layers is bfloat16, as they are, and so is that of a
stack that is cast before its last layer is cut off. Layers that are gathered when they run have no copy, but the part
of a stack that is cut. Where gradients are cut as they arise, a gathered stack and its part are there at once."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from openpi_train_configs.fast import pi05_bridge_insulated
from openpi_train_configs.paligemma_policies import paligemma_flow_lora
from openpi_train_configs.pi0_bridge import pi0_bridge_traj, pi0_bridge_traj_lora

from openpi_train.parallel.mesh import TENSOR, make_mesh, planned_mesh
from openpi_train.parallel.strategy import CUT, Plan
from openpi_train.planning.choose import layout_cost
from openpi_train.planning.memory import predict, slice_bytes
from openpi_train.runtime.device_kinds import GIB
from openpi_train.tools.plan import find_machine
from openpi_train.training.prepare import whole_layout

PI0 = 3_238_048_528
TOKEN_TABLE = 257_152 * 2048
# One layer of both experts of widths 2048 and 1024: query and output, key and value, gate, up and down.
LAYER = sum(d * (2 * 2048 + 2 * 256 + 3 * m) for d, m in ((2048, 16_384), (1024, 4096)))
STACK = 18 * LAYER
# Matrices that are in no layer: of the image encoder's head, and two of the actions' embedding.
OTHERS = 1152 * 2048 + 2048 * 1024 + 1024 * 1024
BYTES = {"state": 16, "grads": 4, "copy": 2}
# GiB per device, by hand.
TABLE = {
    ("replicated", 1): 62.0,
    ("zero1", 1): 62.0,
    ("zero2", 1): 62.0,
    ("zero3", 1): 62.0,
    ("replicated", 8): 62.0,
    ("zero1", 8): 16.5,
    ("zero2", 8): 17.5,
    ("zero3", 8): 9.4,
    ("replicated", 16): 62.0,
    ("zero1", 16): 13.3,
    ("zero2", 16): 13.7,
    ("zero3", 16): 5.1,
    ("hsdp", 16): 9.4,  # two hosts of eight: within a host as zero3
}


@pytest.fixture(scope="module")
def layout():
    return whole_layout(pi0_bridge_traj, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))


def by_hand_bytes(strategy: str, shards: int) -> float:
    whole, cut = PI0 - TOKEN_TABLE + TOKEN_TABLE / shards, CUT[strategy]
    total = sum(size * (PI0 / shards if part in cut else whole) for part, size in BYTES.items())
    if shards == 1:
        return total - 2 * STACK
    if "copy" in cut:
        return total + 4 * STACK / shards + 4 * OTHERS - 2 * PI0 / shards + 2 * LAYER + 4 * LAYER
    if "grads" in cut:
        return total + 2 * STACK + 4 * LAYER
    return total - 2 * (PI0 - TOKEN_TABLE)


@pytest.mark.parametrize(("strategy", "devices"), TABLE)
def test_pi0_needs_what_the_table_says_to_2_percent(layout, strategy, devices):
    shards = {"replicated": 1, "hsdp": 8}.get(strategy, devices)
    plan = Plan(mesh=planned_mesh(shards, devices), strategy=strategy)
    total = predict(layout.under(plan), plan, 0, 0).total
    by_hand = by_hand_bytes(strategy, shards)
    assert total == pytest.approx(by_hand, rel=0.02)
    assert total / GIB == pytest.approx(TABLE[strategy, devices], rel=0.02, abs=0.05)


@pytest.mark.parametrize(
    ("strategy", "gradient", "table", "stack"),
    # Bytes per parameter: of the present gradient beside the sum, all but the token table's and the table's, and of the
    # transformer's stack. The sum is float32, where a single gradient of a gathered or cut layer is bfloat16; under
    # zero1 the stack without its last layer is another copy.
    [("replicated", 2, 2, 2), ("zero1", 2 + 2, 2 / 8, 2), ("zero2", 4 / 8, 4 / 8, 0), ("zero3", 4 / 8, 4 / 8, 0)],
)
def test_with_micro_batches_more_is_held_at_once(layout, strategy, gradient, table, stack):
    plan = Plan(mesh=planned_mesh(1 if strategy == "replicated" else 8, 8), strategy=strategy)
    one, four = (predict(layout.under(plan), plan, 0, 0, num_micros=n).total for n in (1, 4))
    cut = sum(leaf.size for path, leaf in layout.shapes.params.items() if path.startswith("transformer/layers/"))
    assert 0.7 * PI0 < cut < 0.75 * PI0
    others = PI0 - TOKEN_TABLE
    assert four - one == pytest.approx(others * gradient + TOKEN_TABLE * table + cut * stack, rel=0.02)


@pytest.mark.parametrize(
    ("strategy", "bytes_each"),
    [
        ("replicated", 0),
        ("zero1", 4),
        ("zero2", 4 + 4 * STACK / (PI0 - TOKEN_TABLE)),
        ("zero3", 4 * STACK / 8 / (PI0 - TOKEN_TABLE)),
    ],
)
def test_float32_layers_compute_with_float32_parameters_as_they_are_or_as_they_are_gathered(
    layout, strategy, bytes_each
):
    plan = Plan(mesh=planned_mesh(1 if strategy == "replicated" else 8, 8), strategy=strategy)
    copy = predict(layout.under(plan), plan, 0, 0, dtype=jnp.float32).compute_copy
    assert copy == pytest.approx((PI0 - TOKEN_TABLE) * bytes_each, rel=0.02)


@pytest.mark.slow
def test_gpus_turn_what_is_not_cut_along_its_first_dim_before_it_is_gathered(layout):
    plan = Plan(mesh=planned_mesh(8, 8), strategy="zero3")

    def turned(num_micros):
        cpu, gpu = (predict(layout.under(plan), plan, 0, 0, num_micros=num_micros, on_gpus=n) for n in (False, True))
        return gpu.compute_copy - cpu.compute_copy

    # Of the image tower the weights up and out. From the second micro-batch on also those of the transformer but the
    # ones down, as those are there less their last layer besides.
    assert turned(1) == 4 * 27 * 1152 * (4304 + 1152) / 8
    others = sum(d * (2 * 2048 + 2 * 256 + 2 * m) for d, m in ((2048, 16_384), (1024, 4096)))
    assert turned(2) - turned(1) == 4 * 18 * others / 8


@pytest.mark.parametrize(("strategy", "copied"), [("zero1", 0), ("zero2", 2), ("zero3", 4 / 8)])
def test_unrolled_layers_are_not_copied_as_a_stack_and_have_two_layers_gradients_at_once(layout, strategy, copied):
    """In a loop zero2 has the gathered stack less its last layer besides, in bfloat16, and zero3 its parts."""
    plan = Plan(mesh=planned_mesh(8, 8), strategy=strategy)
    looped, unrolled = (predict(layout.under(plan), plan, 0, 0, unrolled=n) for n in (False, True))
    assert looped.compute_copy - unrolled.compute_copy == pytest.approx(copied * STACK, rel=0.02)
    gradients_of_a_layer = 4 * STACK / 18
    more = unrolled.layer - looped.layer
    assert more == pytest.approx((2 if strategy == "zero1" else 1) * gradients_of_a_layer, rel=0.02)
    narrow = dataclasses.replace(plan, reduce_dtype="bfloat16")
    found = predict(layout.under(plan), narrow, 0, 0, unrolled=True)
    assert unrolled.layer - found.layer == pytest.approx(gradients_of_a_layer / 2, rel=0.02)
    one, none = (predict(layout.under(plan), plan, 0, 0, unrolled=True, begun_layers=n) for n in (1, 0))
    assert unrolled.layer - one.layer == pytest.approx(gradients_of_a_layer, rel=0.02)
    assert one.layer - none.layer == pytest.approx(gradients_of_a_layer, rel=0.02)


def test_a_plan_counts_gradients_of_unrolled_layers_from_their_backward_pass_on(layout):
    machine = find_machine("h100", 8, 1, None, 50.0)
    unrolled, looped = (
        layout_cost(dataclasses.replace(pi0_bridge_traj, unroll_layers=n), layout, "zero3", 8, machine)
        for n in ("auto", False)
    )
    gradients_of_a_layer = 4 * STACK / 18
    found = [unrolled.unbegun(1, n) for n in (2, 1, 0)]
    assert found == pytest.approx([0, gradients_of_a_layer, 2 * gradients_of_a_layer], rel=0.02)
    assert looped.unbegun(1, 2) == 0


def test_a_stack_that_a_gpu_gathers_at_once_is_there_twice_with_one_micro_batch(layout):
    """In the order of dims in which it is gathered, and in that in which layers are read."""
    plan = Plan(mesh=planned_mesh(8, 8), strategy="zero2")
    matrices = {path: leaf for path, leaf in layout.shapes.params.items() if "/layers/" in path and leaf.ndim > 2}
    towers = sum(leaf.size for path, leaf in matrices.items() if path.startswith("image_encoder/"))
    found = {
        (n, on_gpus): predict(layout.under(plan), plan, 0, 0, num_micros=n, on_gpus=on_gpus).compute_copy
        for n in (1, 2)
        for on_gpus in (False, True)
    }
    # The transformer's stack is there twice anyway, and the kernel of the patches in another order (both differences).
    one, two = (found[n, True] - found[n, False] for n in (1, 2))
    assert one - two == pytest.approx(2 * towers, rel=0.02)


def test_gradients_of_unrolled_layers_are_sharded_as_they_arise_under_zero1_too(layout):
    plan = Plan(mesh=planned_mesh(8, 8), strategy="zero1")
    grads = {
        (n, unrolled): predict(layout.under(plan), plan, 0, 0, num_micros=n, unrolled=unrolled).grads
        for n in (1, 2)
        for unrolled in (False, True)
    }
    # Whole in bfloat16 in a loop, and a part in float32 unrolled, of both towers; from the second micro-batch on whole.
    towers = STACK + sum(leaf.size for path, leaf in layout.shapes.params.items() if "image_encoder/layers" in path)
    assert grads[1, False] - grads[1, True] == pytest.approx((2 - 4 / 8) * towers, rel=0.02)
    assert grads[2, False] == grads[2, True]


def test_frozen_parameters_that_are_cut_are_gathered_too():
    layout = whole_layout(pi0_bridge_traj_lora, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
    frozen = sum(leaf.size for leaf in layout.shapes.frozen.values())
    copies = {}
    for strategy, shards in (("replicated", 1), ("zero1", 8)):
        plan = Plan(mesh=planned_mesh(shards, 8), strategy=strategy)
        copies[strategy] = predict(layout.under(plan), plan, 0, 0).compute_copy
    # All but the token table, which replicated devices have in bfloat16 as it is.
    assert copies["zero1"] - copies["replicated"] == pytest.approx(2 * (frozen - TOKEN_TABLE), rel=0.02)


def test_slices_are_of_fixed_matrices_of_layers_that_are_whole_and_have_the_type_of_products():
    """With adapters, but with one transformer: its stack is not cut. pi0's is, and read where it is needed, but not the
    insulated one."""
    layout = whole_layout(paligemma_flow_lora, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
    plans = [Plan(mesh=planned_mesh(n, 8), strategy=name) for n, name in ((1, "replicated"), (8, "zero1"))]
    tower = 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304 + 3 * 1152)  # with the biases of its heads
    everything = 2 * (tower + 18 * 2048 * (2 * 8 * 256 + 2 * 256 + 3 * 16_384))
    assert slice_bytes(layout, plans[0], jnp.bfloat16) == everything
    assert slice_bytes(layout, plans[1], jnp.bfloat16) == 2 * 27 * 3 * 1152  # all but small ones are gathered
    assert slice_bytes(layout, plans[0], jnp.float32) == 0  # cast
    down = next(path for path in layout.shapes.frozen if path.endswith("mlp/down/weight"))
    assert slice_bytes(layout, plans[0], jnp.bfloat16, {down}) == everything - 2 * 18 * 2048 * 16_384
    cut = whole_layout(pi0_bridge_traj_lora, plans[0])
    assert slice_bytes(cut, plans[0], jnp.bfloat16) == 0
    model = dataclasses.replace(pi05_bridge_insulated.model, paligemma_variant="gemma_2b_lora")
    insulated = whole_layout(dataclasses.replace(pi05_bridge_insulated, model=model), plans[0])
    assert slice_bytes(insulated, plans[0], jnp.bfloat16) == everything - 2 * tower


@pytest.mark.parametrize("strategy", CUT)
def test_planned_devices_hold_what_real_ones_would(layout, strategy):
    plans = [Plan(mesh=mesh, strategy=strategy) for mesh in (planned_mesh(4, 8), make_mesh(4, jax.devices()[:8]))]
    planned, real = (predict(layout.under(plan), plan, 1e6, 3) for plan in plans)
    assert planned == real


@pytest.mark.parametrize(
    ("strategy", "gradient", "stacks"), [("replicated", 2, 2), ("zero1", 2 + 2, 2), ("zero2", 4 / 4, 0)]
)
def test_a_tensor_group_shares_out_all_parts_of_a_layer(layout, strategy, gradient, stacks):
    shards = 1 if strategy == "replicated" else 4
    plans = [Plan(mesh=planned_mesh(shards, 4 * n, n), strategy=strategy, min_shard_mib=0) for n in (1, 2)]
    one, two = ([predict(layout.under(plan), plan, 0, 0, num_micros=n) for n in (1, 4)] for plan in plans)
    params = layout.shapes.params
    shared = sum(leaf.size for path, leaf in params.items() if TENSOR in plans[1].spec("copy", leaf, path))
    assert 0.8 * PI0 < shared < PI0
    stack = {path: leaf for path, leaf in params.items() if path.startswith("transformer/layers/")}
    in_stack = sum(leaf.size for path, leaf in stack.items() if TENSOR in plans[1].spec("copy", leaf, path))
    of_all, of_stack = {"replicated": (4, -2), "zero1": (2, 0), "zero2": (4 / 4, 0)}[strategy]
    assert one[0].grads - two[0].grads == pytest.approx((shared * of_all + in_stack * of_stack) / 2, rel=0.01)
    copies = 2 * shared + 2 * in_stack * (strategy == "zero2")
    assert one[0].compute_copy - two[0].compute_copy == pytest.approx(copies / 2, rel=0.01)
    more = [each[1].total - each[0].total for each in (one, two)]
    assert more[0] - more[1] == pytest.approx(shared / 2 * gradient + in_stack / 2 * stacks, rel=0.01)


@pytest.mark.parametrize(("devices", "share"), [(12, 0.87), (6, None), (4, 0.0), (8, 0.0)])
def test_what_no_dim_divides_stays_whole_and_is_told(layout, devices, share):
    plan = Plan(mesh=planned_mesh(devices, devices), strategy="zero3")
    params = layout.shapes.params
    uncut = plan.uncut_share(params)
    total = predict(layout.under(plan), plan, 0, 0).total
    cut = by_hand_bytes("zero3", devices) * (1 - uncut) if uncut < 0.5 else 20 * PI0 * (1 - uncut) / devices
    assert total == pytest.approx(22 * PI0 * uncut + cut, rel=0.02)
    assert share is None or uncut == pytest.approx(share, abs=0.01)
    assert Plan(mesh=planned_mesh(1, devices), strategy="replicated").uncut_share(params) == 0.0


def test_nothing_runs_on_planned_devices():
    with pytest.raises(AssertionError, match="nothing runs on planned devices"):
        _ = Plan(mesh=planned_mesh(2, 8), strategy="zero3").real_mesh
