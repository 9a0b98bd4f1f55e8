"""The step: accumulation, devices and layout change nothing; bad updates are not applied; frozen leaves stay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from trainers import make_trainer

from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.training.init import create_state

SCHEDULE = LRSchedule(warmup_steps=2, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)


def run_steps(
    *, accum=1, fsdp=1, devices=1, strategy="zero3", steps=3, config=None, objective=None, ema=0.9, batches=None
):
    """Losses, gradient norms and the final state of a few steps."""
    config = config or toy.LinearConfig()
    plan = Plan(mesh=make_mesh(fsdp, jax.devices()[:devices]), strategy=strategy, min_shard_mib=0)
    objective = objective or FlowMatching(augment=False, num_flow_draws=2)
    trainer, layout = make_trainer(config, plan, AdamW(), SCHEDULE, objective=objective, accum=accum, ema=ema)
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, ema is not None, 7)
        step = trainer.compile_step(layout.shardings, state, config.rows.batch_spec(8, ()))
        history = []
        for index in range(steps):
            rows = batches[index] if batches else toy.batch(8, seed=index)
            state, metrics = step(state, jax.device_put(rows, plan.batch))
            history.append(jax.device_get(metrics))
    return history, state


@pytest.fixture(scope="module")
def reference():
    return run_steps()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"accum": 2}, marks=pytest.mark.slow),
        {"accum": 4, "devices": 2},
        pytest.param({"accum": 2, "devices": 4, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"devices": 8, "fsdp": 4}, marks=pytest.mark.slow),
        pytest.param({"devices": 4, "fsdp": 4, "strategy": "zero1"}, marks=pytest.mark.slow),
        {"devices": 4, "fsdp": 4, "strategy": "zero2", "accum": 2},
        pytest.param({"devices": 4, "fsdp": 4, "strategy": "replicated"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_accumulation_devices_and_strategy_change_nothing(reference, layout):
    history, state = run_steps(**layout)
    for ours, expected in zip(history, reference[0], strict=True):
        for name in ("loss", "grad_norm", "param_norm", "learning_rate"):
            np.testing.assert_allclose(ours[name], expected[name], rtol=2e-6, err_msg=name)
    for path, leaf in reference[1].params.items():
        # Adam divides by the root of the second moment: rounding of a tiny gradient grows to this.
        np.testing.assert_allclose(state.params[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_zero3_cuts_parameters_moments_and_average():
    _, state = run_steps(devices=4, fsdp=4, steps=1)
    kernel = state.params["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == kernel.shape]
    assert len(moments) == 6  # m and v of the three square leaves
    for leaf in [*moments, state.ema["kernel"]]:
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.slow
def test_loss_equals_the_closed_form(reference, index):
    """numpy, from the objective's own draws for this step."""
    objective = FlowMatching(augment=False, num_flow_draws=2)
    rows = toy.batch(8, seed=index)
    from openpi_train.keys import row_keys

    noise, time = map(np.asarray, objective.draw(rows, row_keys(7, index, rows.row)))
    _, state = run_steps(steps=index)
    kernel, state_kernel, lora, bias = (
        np.asarray(state.params[name], np.float64) for name in ("kernel", "state_kernel", "adapter_lora", "bias")
    )
    t = time[:, :, None, None].astype(np.float64)
    actions = np.asarray(rows.actions, np.float64)[:, None]
    noisy = t * noise + (1 - t) * actions
    velocity = noisy @ kernel + (np.asarray(rows.observation.state) @ (state_kernel + lora))[:, None, None] + t * bias
    mask = np.asarray(rows.action_mask)[:, None, :, None]
    error = (velocity - (noise - actions)) ** 2 * mask
    expected = error.sum() / (mask.sum() * 2 * actions.shape[-1])
    np.testing.assert_allclose(reference[0][index]["loss"], expected, rtol=1e-6)


@pytest.mark.slow
def test_draws_depend_on_seed_step_and_row_only():
    objective = FlowMatching(augment=False)
    from openpi_train.keys import row_keys

    rows = toy.batch(6)
    order = np.array([3, 1, 5, 0, 2, 4])
    shuffled = jax.tree.map(lambda x: x[order], rows)
    noise, time = objective.draw(rows, row_keys(1, 2, rows.row))
    again, time_again = objective.draw(shuffled, row_keys(1, 2, shuffled.row))
    np.testing.assert_array_equal(noise[order], again)
    np.testing.assert_array_equal(time[order], time_again)
    for seed, step in ((1, 3), (2, 2)):
        other, _ = objective.draw(rows, row_keys(seed, step, rows.row))
        assert not np.any(np.asarray(other) == np.asarray(noise))
    for draws in (np.asarray(noise), np.asarray(time)):
        assert len({row.tobytes() for row in draws}) == 6  # no two rows draw alike


@pytest.mark.slow
def test_times_follow_openpis_distribution():
    objective = FlowMatching(augment=False, num_flow_draws=1000)
    from openpi_train.keys import row_keys

    rows = toy.batch(50)
    _, time = objective.draw(rows, row_keys(0, 0, rows.row))
    beta = (np.asarray(time, np.float64).ravel() - 0.001) / 0.999
    assert beta.min() >= 0
    assert beta.max() <= 1
    # Moments of Beta(1.5, 1): mean 0.6, variance 1.5 / (2.5**2 * 3.5); five standard errors of 50 000 draws.
    spread = np.sqrt(1.5 / (2.5**2 * 3.5))
    assert abs(beta.mean() - 0.6) < 5 * spread / np.sqrt(beta.size)
    assert abs(beta.var() - spread**2) < 5 * spread**2 * np.sqrt(2 / beta.size)


@pytest.mark.slow
def test_padded_steps_and_dims_have_no_influence_where_masked():
    objective = FlowMatching(augment=False, mask_action_dims=True)
    rows = toy.batch(8)
    garbage = jnp.where(rows.action_mask[:, :, None] & rows.dim_mask[:, None, :], rows.actions, jnp.float32(1e3))
    config = toy.LinearConfig()
    from flax import nnx

    from openpi_train.keys import row_keys

    model = config.build(nnx.Rngs(0))
    # A diagonal kernel: masked dims then cannot reach the others through the model itself.
    model.kernel[...] = jnp.eye(config.action_dim)
    keys = row_keys(0, 0, rows.row)
    clean = objective.loss(model, rows, objective.norms(rows), keys)[0]
    dirty = objective.loss(model, dataclasses.replace(rows, actions=garbage), objective.norms(rows), keys)[0]
    assert clean == dirty
    counted = FlowMatching(augment=False, mask_padded_steps=False)
    assert float(counted.norms(rows)["elements"]) == rows.actions.size
    assert float(objective.norms(rows)["elements"]) == float(rows.action_mask.sum()) * 3


@pytest.mark.slow
def test_an_update_with_nan_is_not_applied():
    bad = toy.batch(8, seed=1)
    bad = dataclasses.replace(bad, actions=bad.actions.at[3, 0, 0].set(jnp.nan))
    good = [toy.batch(8, seed=0), toy.batch(8, seed=2)]
    history, state = run_steps(steps=2, batches=[good[0], bad])
    before, expected = run_steps(steps=1, batches=good[:1])
    assert [float(metrics["skipped"]) for metrics in history] == [0.0, 1.0]
    assert np.isfinite(before[0]["loss"])
    assert int(state.step) == 2
    # The schedule goes by the updates that were applied, and so does what is logged.
    assert float(run_steps(steps=3, batches=[good[0], bad, good[1]])[0][2]["learning_rate"]) == pytest.approx(
        float(SCHEDULE.create()(1)), rel=1e-6
    )
    for ours, old in zip(
        jax.tree.leaves((state.params, state.ema, state.opt_state)),
        jax.tree.leaves((expected.params, expected.ema, expected.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, old)


def test_squares_of_parameters_are_summed_behind_a_barrier_and_frozen_ones_are_not_copied():
    config = toy.LinearConfig(low_rank=True)
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="zero3", min_shard_mib=0)
    trainer, layout = make_trainer(config, plan, AdamW(), SCHEDULE, objective=FlowMatching(augment=False))
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 7)
    [barrier] = [
        one for one in jax.make_jaxpr(trainer.param_norm)(state).eqns if one.primitive.name == "optimization_barrier"
    ]
    assert sorted(var.aval.shape for var in barrier.invars) == sorted(leaf.shape for leaf in state.params.values())


@pytest.mark.slow
def test_frozen_leaves_are_bfloat16_and_never_change():
    config = toy.LinearConfig(low_rank=True)
    _, start = run_steps(config=config, steps=0)
    history, state = run_steps(config=config)
    assert set(state.params) == {"adapter_lora"} == set(state.ema)
    assert set(state.frozen) == {"kernel", "state_kernel", "bias"}
    for path, leaf in state.frozen.items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, start.frozen[path])
    assert not np.array_equal(state.params["adapter_lora"], start.params["adapter_lora"])
    kernels = [leaf.astype(jnp.float32) for leaf in [*state.params.values(), *state.frozen.values()] if leaf.ndim > 1]
    np.testing.assert_allclose(history[-1]["param_norm"], optax.tree.norm(kernels), rtol=1e-6)


@pytest.mark.slow
def test_average_is_of_updated_parameters():
    _, first = run_steps(steps=0)
    _, second = run_steps(steps=1)
    for path, leaf in second.ema.items():
        expected = 0.9 * np.asarray(first.params[path]) + 0.1 * np.asarray(second.params[path])
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, atol=1e-8)
