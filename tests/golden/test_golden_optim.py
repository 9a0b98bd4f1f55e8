"""Schedules, AdamW, EMA and the sharding rule against openpi's numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import Plan, shard_dim
from openpi_train.parallel.update import Update


@pytest.fixture(scope="module")
def numbers(golden_file):
    with np.load(golden_file("misc_optim.npz")) as file:
        return dict(file)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("cosine/default", LRSchedule()),
        # pi05_libero in openpi: warm-up 10 000 to 5e-5, then flat over a million steps.
        ("cosine/pi05_libero", LRSchedule(warmup_steps=10_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5)),
        ("rsqrt/default", LRSchedule(kind="rsqrt", warmup_steps=1_000, peak_lr=5e-5, decay_steps=10_000)),
    ],
)
def test_schedules_equal_openpi(numbers, name, schedule):
    rates = jax.vmap(schedule.create())(jnp.asarray(numbers["cosine/steps"]))
    np.testing.assert_allclose(rates, numbers[name], rtol=1e-6)


def _tree(numbers, prefix):
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("adamw_clipped", AdamW()),
        ("adamw_unclipped", AdamW()),
        ("adamw_decay", AdamW(weight_decay=0.1)),
    ],
)
@pytest.mark.slow
def test_adamw_steps_equal_openpi(numbers, case, optimizer):
    schedule = LRSchedule(warmup_steps=2, peak_lr=1e-2, decay_steps=10, decay_lr=1e-3).create()
    rule = optimizer.create(schedule)
    params = _tree(numbers, "adamw/init/")
    state = rule.init(params)
    num_steps = sum(name.startswith(f"{case}/gradnorm") for name in numbers)
    assert num_steps > 0
    for step in range(num_steps):
        grads = _tree(numbers, f"{case}/grad{step}/")
        np.testing.assert_allclose(optax.tree.norm(grads), numbers[f"{case}/gradnorm{step}"], rtol=1e-6)
        updates, state = rule.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name, expected in _tree(numbers, f"{case}/params{step}/").items():
            np.testing.assert_allclose(params[name], expected, rtol=1e-5, atol=1e-7)


def test_the_average_after_an_update_equals_openpi(numbers):
    old, new = ({"w": jnp.asarray(numbers[f"ema/{name}"])} for name in ("old", "new"))
    stay = optax.set_to_zero()  # the updated parameters are those that were recorded
    update = Update(stay, Plan(mesh=make_mesh(1), strategy="replicated"), ema_decay=0.99)
    state = TrainState(step=jnp.int32(0), params=new, frozen={}, ema=old, opt_state=stay.init(new))
    found = update(state, new, jnp.bool_(True))
    np.testing.assert_array_equal(found.params["w"], new["w"])
    np.testing.assert_allclose(found.ema["w"], numbers["ema/decay_0.99"], rtol=1e-6)


def test_shard_dim_equals_openpi_table(golden_file):
    rows = json.loads(golden_file("misc_fsdp.json").read_text())["rows"]
    assert rows
    for row in rows:
        itemsize = jnp.dtype(row["dtype"]).itemsize
        axis = shard_dim(tuple(row["shape"]), itemsize, int(row["fsdp_devices"].split()[0]), 4 * 2**20)
        assert axis == row["axis"], row
