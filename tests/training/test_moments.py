"""Moments in bfloat16 through the step, the memory plan and a checkpoint; and every optimizer through the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from checkpoint_process import SAVED_WITH, same_bits
from trainers import make_trainer

from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.optim import OPTIMIZERS, AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.memory import predict
from openpi_train.training.init import create_state
from openpi_train.training.step import num_updates

pytestmark = pytest.mark.slow

CONFIG = toy.LinearConfig()
NUM_PARAMS = 3 * 16 + 4


def laid_out(optimizer, fsdp=1):
    plan = Plan(mesh=make_mesh(fsdp, jax.devices()[:fsdp]), strategy="zero3", min_shard_mib=0)
    schedule = LRSchedule(kind="constant", warmup_steps=0, peak_lr=1e-2)
    trainer, layout = make_trainer(CONFIG, plan, optimizer, schedule, ema=None)
    return plan, layout, trainer


def trained(optimizer, num_steps=2, fsdp=1):
    plan, layout, trainer = laid_out(optimizer, fsdp)
    losses = []
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, CONFIG, trainer.optimizer, CONFIG.param_rules.frozen, False, 7)
        step = trainer.compile_step(layout.shardings, state, CONFIG.rows.batch_spec(8, ()))
        for _ in range(num_steps):
            state, metrics = step(state, jax.device_put(toy.batch(8), plan.batch))
            losses.append(float(metrics["loss"]))
    return state, losses, layout


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_the_memory_plan_follows_the_moments_type(dtype, itemsize):
    plan, layout, _ = laid_out(AdamW(moment_dtype=dtype))
    counters = 2 * 4  # of Adam and of the schedule
    assert predict(layout, plan).optimizer == 2 * NUM_PARAMS * itemsize + counters
    plan, layout, _ = laid_out(AdamW(moment_dtype=dtype), fsdp=4)
    cut = 2 * (3 * 16 // 4 + 4) * itemsize  # the bias stays whole
    assert predict(layout, plan).optimizer == cut + counters


def test_a_checkpoint_keeps_bfloat16_moments_bit_for_bit(tmp_path):
    state, _, layout = trained(AdamW(moment_dtype="bfloat16"), fsdp=4)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == jnp.bfloat16]
    assert sum(leaf.size for leaf in moments) == 2 * NUM_PARAMS
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, **SAVED_WITH)
    restored, _ = Checkpoints(tmp_path).restore(layout.abstract())
    assert same_bits(restored, state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_alike_on_one_device_and_cut_over_four(name):
    optimizer = OPTIMIZERS[name]()
    state, losses, _ = trained(optimizer, num_steps=8)
    cut, cut_losses, _ = trained(optimizer, num_steps=8, fsdp=4)
    assert int(num_updates(state)) == 8
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(cut_losses, losses, rtol=1e-5)
    for path, leaf in state.params.items():
        np.testing.assert_allclose(cut.params[path], leaf, rtol=1e-4, atol=1e-5, err_msg=path)
