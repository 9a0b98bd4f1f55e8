"""Bytes per device of the full pi0, by abstract evaluation, against 22 bytes per parameter: master, m, v, EMA,
gradient, and a bfloat16 copy. Rows of the token table that are cut stay on their devices: they have no whole copy, and
their gradient is cut where it arises. Layers that are gathered when they run have no copy but of one of them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from openpi_train_configs.pi0_bridge import pi0_bridge_traj, pi0_bridge_traj_lora

from openpi_train.parallel.mesh import TENSOR, make_mesh, planned_mesh
from openpi_train.parallel.strategy import CUT, Plan
from openpi_train.planning.memory import predict
from openpi_train.runtime.device_kinds import GIB
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
    ("replicated", 1): 66.3,
    ("zero1", 1): 66.3,
    ("zero3", 1): 66.3,
    ("replicated", 8): 66.3,
    ("zero1", 8): 21.6,
    ("zero2", 8): 13.2,
    ("zero3", 8): 8.4,
    ("zero1", 16): 18.3,
    ("zero2", 16): 9.3,
    ("zero3", 16): 4.6,
    ("hsdp", 16): 8.4,  # two hosts of eight: within a host as zero3
}


@pytest.fixture(scope="module")
def layout():
    return whole_layout(pi0_bridge_traj, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))


def by_hand_bytes(strategy: str, shards: int) -> float:
    whole, cut = PI0 - TOKEN_TABLE + TOKEN_TABLE / shards, CUT[strategy]
    total = sum(size * (PI0 / shards if part in cut else whole) for part, size in BYTES.items())
    if shards > 1 and "copy" in cut:
        total += 2 * OTHERS + 2 * LAYER - 2 * (PI0 - TOKEN_TABLE) / shards
    return total + (4 * LAYER if shards > 1 and "grads" in cut else 0)


@pytest.mark.parametrize(("strategy", "devices"), TABLE)
def test_pi0_needs_what_the_table_says_to_2_percent(layout, strategy, devices):
    shards = {"replicated": 1, "hsdp": 8}.get(strategy, devices)
    plan = Plan(mesh=planned_mesh(shards, devices), strategy=strategy)
    total = predict(layout.under(plan), plan).total
    by_hand = by_hand_bytes(strategy, shards)
    assert total == pytest.approx(by_hand, rel=0.02)
    assert total / GIB == pytest.approx(TABLE[strategy, devices], rel=0.02, abs=0.05)


@pytest.mark.parametrize(
    ("strategy", "each", "table"),
    # Bytes of the present gradient beside the sum, of all parameters but the token table's and of that.
    [("replicated", 2, 2), ("zero1", 2, 2 / 8), ("zero2", 4 / 8, 4 / 8), ("zero3", 4 / 8, 4 / 8)],
)
def test_with_micro_batches_more_is_held_at_once(layout, strategy, each, table):
    plan = Plan(mesh=planned_mesh(1 if strategy == "replicated" else 8, 8), strategy=strategy)
    one, four = (predict(layout.under(plan), plan, num_micros=n).total for n in (1, 4))
    assert four - one == pytest.approx((PI0 - TOKEN_TABLE) * each + TOKEN_TABLE * table, rel=0.02)


@pytest.mark.parametrize(("strategy", "each"), [("replicated", 0), ("zero1", 4), ("zero2", 4), ("zero3", 0)])
def test_float32_layers_compute_with_float32_parameters_as_they_are_or_as_they_are_gathered(layout, strategy, each):
    plan = Plan(mesh=planned_mesh(1 if strategy == "replicated" else 8, 8), strategy=strategy)
    copy = predict(layout.under(plan), plan, dtype=jnp.float32).compute_copy
    at_once = 4 * OTHERS if strategy == "zero3" else 0
    assert copy == pytest.approx((PI0 - TOKEN_TABLE) * each + at_once, rel=0.02)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_unrolled_layers_have_two_layers_gradients_at_once(layout, strategy):
    plan = Plan(mesh=planned_mesh(8, 8), strategy=strategy)
    looped, unrolled = (predict(layout.under(plan), plan, unrolled=n).layer for n in (False, True))
    assert unrolled - looped == pytest.approx((2 if strategy == "zero1" else 1) * 4 * LAYER, rel=0.02)
    narrow = dataclasses.replace(plan, reduce_dtype="bfloat16")
    assert unrolled - predict(layout.under(plan), narrow, unrolled=True).layer == pytest.approx(2 * LAYER, rel=0.02)


def test_gradients_of_unrolled_layers_are_sharded_as_they_arise_under_zero1_too(layout):
    plan = Plan(mesh=planned_mesh(8, 8), strategy="zero1")
    grads = {
        (n, unrolled): predict(layout.under(plan), plan, num_micros=n, unrolled=unrolled).grads
        for n in (1, 2)
        for unrolled in (False, True)
    }
    # Whole in a loop, and a part unrolled, of both towers; from the second micro-batch on whole.
    towers = STACK + sum(leaf.size for path, leaf in layout.shapes.params.items() if "image_encoder/layers" in path)
    assert grads[1, False] - grads[1, True] == pytest.approx((4 - 4 / 8) * towers, rel=0.02)
    assert grads[2, False] == grads[2, True]


def test_frozen_parameters_that_are_cut_are_gathered_too():
    layout = whole_layout(pi0_bridge_traj_lora, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
    frozen = sum(leaf.size for leaf in layout.shapes.frozen.values())
    copies = {}
    for strategy, shards in (("replicated", 1), ("zero1", 8)):
        plan = Plan(mesh=planned_mesh(shards, 8), strategy=strategy)
        copies[strategy] = predict(layout.under(plan), plan).compute_copy
    # All but the token table, which replicated devices have in bfloat16 as it is.
    assert copies["zero1"] - copies["replicated"] == pytest.approx(2 * (frozen - TOKEN_TABLE), rel=0.02)


@pytest.mark.parametrize("strategy", CUT)
def test_planned_devices_hold_what_real_ones_would(layout, strategy):
    plans = [Plan(mesh=mesh, strategy=strategy) for mesh in (planned_mesh(4, 8), make_mesh(4, jax.devices()[:8]))]
    planned, real = (predict(layout.under(plan), plan) for plan in plans)
    assert planned == real


@pytest.mark.parametrize(("strategy", "gradient", "present"), [("replicated", 4, 2), ("zero1", 4, 2), ("zero2", 1, 1)])
def test_a_tensor_group_shares_out_all_parts_of_a_layer(layout, strategy, gradient, present):
    shards = 1 if strategy == "replicated" else 4
    plans = [Plan(mesh=planned_mesh(shards, 4 * n, n), strategy=strategy, min_shard_mib=0) for n in (1, 2)]
    one, two = ([predict(layout.under(plan), plan, num_micros=n) for n in (1, 4)] for plan in plans)
    params = layout.shapes.params
    shared = sum(leaf.size for path, leaf in params.items() if TENSOR in plans[1].spec("copy", leaf, path))
    assert 0.8 * PI0 < shared < PI0
    assert one[0].grads - two[0].grads == pytest.approx(shared * gradient / 2, rel=0.01)
    assert one[0].compute_copy - two[0].compute_copy == pytest.approx(2 * shared / 2, rel=0.01)
    more = [each[1].total - each[0].total for each in (one, two)]
    assert more[0] - more[1] == pytest.approx(shared / 2 * present, rel=0.01)


@pytest.mark.parametrize(("devices", "share"), [(12, 0.87), (6, None), (4, 0.0), (8, 0.0)])
def test_what_no_dim_divides_stays_whole_and_is_told(layout, devices, share):
    plan = Plan(mesh=planned_mesh(devices, devices), strategy="zero3")
    params = layout.shapes.params
    uncut = plan.uncut_share(params)
    total = predict(layout.under(plan), plan).total
    cut = by_hand_bytes("zero3", devices) * (1 - uncut) if uncut < 0.5 else 20 * PI0 * (1 - uncut) / devices
    assert total == pytest.approx(22 * PI0 * uncut + cut, rel=0.02)
    assert share is None or uncut == pytest.approx(share, abs=0.01)
    assert Plan(mesh=planned_mesh(1, devices), strategy="replicated").uncut_share(params) == 0.0


def test_nothing_runs_on_planned_devices():
    with pytest.raises(AssertionError, match="nothing runs on planned devices"):
        _ = Plan(mesh=planned_mesh(2, 8), strategy="zero3").real_mesh
