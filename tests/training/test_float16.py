"""Training in float16: overflow is skipped inside the step and answered by the scale, which a checkpoint keeps."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from checkpoint_process import SAVED_WITH, abstract, make_state, same_bits
from flax import nnx
from trainers import make_trainer

from openpi_train import registry
from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.models.compute import Compute
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import SGD, AdamW, LossScaling, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime.exits import CheckpointError, NumbersError
from openpi_train.training.init import create_state
from openpi_train.training.recorder import Recorder
from openpi_train.training.step import num_updates

SCHEDULE = LRSchedule(warmup_steps=2, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)
SCALING = LossScaling(initial=2.0**12, growth_interval=3, hysteresis=1)
CLIPPED = AdamW(clip_gradient_norm=0.5)
# The most by which float16, of 11 significant bits, rounds a number, as a share of it.
HALF = 2.0**-11


class HalfPolicy(toy.LinearPolicy):
    """The linear policy with float16 activations."""

    def velocity(self, observation, noisy_actions, time):
        state_kernel = self.state_kernel[...] + self.adapter_lora[...]
        half = [x.astype(jnp.float16) for x in (self.kernel[...], state_kernel, self.bias[...])]
        state = observation.state.astype(jnp.float16) @ half[1]
        actions = noisy_actions.astype(jnp.float16) @ half[0]
        velocity = actions + state[:, None, None] + time.astype(jnp.float16)[:, :, None, None] * half[2]
        return velocity.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfConfig(toy.LinearConfig):
    """Builds `HalfPolicy`."""

    @property
    def compute(self):
        return Compute(dtype=jnp.float16)

    def build(self, rngs):
        return HalfPolicy(self, rngs)


def run_steps(batches, *, scaling=SCALING, config=None, accum=1, devices=1, start=None, optimizer=CLIPPED):
    """Metrics by step, and the states from the first on."""
    config = config or HalfConfig()
    plan = Plan(mesh=make_mesh(devices, jax.devices()[:devices]), strategy="zero3", min_shard_mib=0)
    trainer, layout = make_trainer(config, plan, optimizer, SCHEDULE, accum=accum, scaling=scaling)
    with jax.set_mesh(plan.real_mesh):
        state = start or create_state(layout, config, trainer.optimizer, config.param_rules.frozen, True, 7)
        step = trainer.compile_step(layout.shardings, state, config.rows.batch_spec(8, ()))
        history, states = [], [jax.tree.map(jnp.copy, state)]  # the step takes over what it is given
        for rows in batches:
            state, metrics = step(state, jax.device_put(rows, plan.batch))
            history.append(jax.device_get(metrics))
            states.append(jax.tree.map(jnp.copy, state))
    return history, states


def large(size):
    """Rows whose actions, and so errors, are about `size`."""
    rows = toy.batch(8, ragged=False)
    return dataclasses.replace(rows, actions=rows.actions * 0 + size)


GOOD = [toy.batch(8, seed=seed) for seed in range(4)]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"accum": 4}, marks=pytest.mark.slow),
        {"devices": 4, "accum": 2},
    ],
    ids=str,
)
def test_updates_are_those_of_float32_to_rounding_whatever_the_scale(layout):
    # By plain descent an update is the gradient, clipped: Adam's, of whatever size, would be the same at first.
    plain = SGD(momentum=0.0, clip_gradient_norm=0.5)
    exact, exact_states = run_steps(GOOD[:2], config=toy.LinearConfig(), scaling=None, optimizer=plain)
    assert exact[0]["grad_norm"] > 1
    for scaling in (SCALING, dataclasses.replace(SCALING, initial=2.0)):
        history, states = run_steps(GOOD[:2], scaling=scaling, optimizer=plain, **layout)
        for ours, want in zip(history, exact, strict=True):
            # The velocity's rounding, averaged over 96 squares.
            np.testing.assert_allclose(ours["loss"], want["loss"], rtol=HALF)
            # Clipped after it is unscaled: the norm is the true one.
            np.testing.assert_allclose(ours["grad_norm"], want["grad_norm"], rtol=4 * HALF)
            assert ours["loss_scale"] == scaling.initial
            assert ours["overflow"] == ours["skipped"] == 0
        for path in ("kernel", "bias"):
            moved = np.abs(exact_states[-1].params[path] - exact_states[0].params[path]).max()
            # An error, what it is multiplied with, the product and their sum are each rounded: 1.3e-3 was measured.
            np.testing.assert_allclose(states[-1].params[path], exact_states[-1].params[path], atol=4 * HALF * moved)
    assert "loss_scale" not in exact[0]
    assert exact_states[0].scale is None


@pytest.mark.slow
def test_small_gradients_survive_only_with_a_scale():
    """Errors of 1e-7 times a share of 1/96 lie far below float16's least number, 6e-8."""
    rows = toy.batch(8, ragged=False)
    tiny = dataclasses.replace(rows, actions=rows.actions * 1e-7)

    class Quiet(FlowMatching):
        def draw(self, batch, keys):
            noise, time = super().draw(batch, keys)
            return noise * 0, time * 0 + 1

    zero = jax.tree.map(jnp.zeros_like, HalfConfig().build(nnx.Rngs(0)))
    objective = Quiet(augment=False)
    keys = jax.random.split(jax.random.key(0), 8)

    def norm(scale):
        def loss(model):
            return objective.loss(model, tiny, objective.norms(tiny), keys)[0] * scale

        return float(jnp.abs(nnx.grad(loss)(zero).bias[...]).max()) / scale

    assert norm(1.0) == 0
    assert norm(2.0**16) > 0


@pytest.mark.slow
def test_overflow_is_skipped_and_halves_the_scale_until_it_goes_through():
    rows = large(30.0)
    history, states = run_steps([GOOD[0], *[rows] * 8, GOOD[1]])
    num_skipped = int(sum(metrics["skipped"] for metrics in history))
    scales = [float(metrics["loss_scale"]) for metrics in history]
    # The kernel's gradient is a sum of 24 times about 30 * 2 * 30 / 96 * scale, for scale 4096 far above 65504.
    assert 2 <= num_skipped <= 7
    assert scales[1 : num_skipped + 2] == [4096 / 2**count for count in range(num_skipped + 1)]
    expected = [float(1 <= index <= num_skipped) for index in range(len(history))]
    assert [float(metrics["skipped"]) for metrics in history] == expected
    assert [float(metrics["overflow"]) for metrics in history] == expected
    for before, after in itertools.pairwise(range(1, num_skipped + 2)):
        for ours, old in zip(
            jax.tree.leaves((states[after].params, states[after].ema, states[after].opt_state)),
            jax.tree.leaves((states[before].params, states[before].ema, states[before].opt_state)),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, old)
    assert [int(state.step) for state in states] == list(range(len(states)))
    applied = [0, *np.cumsum(1 - np.array(expected))]
    assert [int(num_updates(state)) for state in states] == applied
    rates = SCHEDULE.create()
    for metrics, updates in zip(history, applied, strict=False):
        np.testing.assert_allclose(metrics["learning_rate"], rates(updates), rtol=1e-6)


@pytest.mark.slow
def test_parameters_that_overflow_stop_the_run_at_the_least_scale():
    _, states = run_steps([])
    start = dataclasses.replace(states[0], params={**states[0].params, "kernel": jnp.full((4, 4), 1e6)})
    scaling = dataclasses.replace(SCALING, initial=8.0, minimum=2.0, hysteresis=2)
    history, states = run_steps(GOOD, scaling=scaling, start=dataclasses.replace(start, scale=scaling.first()))
    # Patience, 8 -> 4, 4 -> 2, and then there is no way down.
    assert [float(metrics["loss_scale"]) for metrics in history] == [8, 8, 4, 2]
    assert [float(metrics["overflow"]) for metrics in history] == [1, 1, 1, 0]
    recorder = make_recorder(stop_on_nan=True)
    for step, metrics in enumerate(history[:3], start=1):
        recorder.add(step, metrics)
    recorder.check()
    values = recorder.read()
    assert (values["skipped_steps"], values["loss_scale"]) == (3, 4)
    recorder.add(4, history[3])
    with pytest.raises(NumbersError, match=r"step 4: .* at the least --loss-scaling.minimum"):
        recorder.check()


@pytest.mark.slow
def test_scale_grows_after_good_steps_and_is_reported():
    history, states = run_steps([*GOOD, *GOOD])
    assert [float(metrics["loss_scale"]) for metrics in history] == [4096] * 3 + [8192] * 3 + [16384] * 2
    assert float(states[-1].scale.value) == 16384
    recorder = make_recorder(stop_on_nan=True)
    for step, metrics in enumerate(history[:4], start=1):
        recorder.add(step, metrics)
    values = recorder.read()
    assert values["loss_scale"] == 8192
    assert "overflow" not in values
    assert values["loss"] == pytest.approx(np.mean([metrics["loss"] for metrics in history[:4]]))


def make_recorder(stop_on_nan):
    return Recorder(
        batch_size=8,
        peak_flops=None,
        counted_s={"data": lambda: 0.0},
        row_names=lambda step: ["row"],
        stop_on_nan=stop_on_nan,
    )


def test_a_checkpoint_keeps_the_scale_bit_for_bit_and_older_ones_are_read(tmp_path):
    scale = LossScaling(initial=3.0**7).first()  # no power of two: every bit counts
    plain = make_state(3)
    state = dataclasses.replace(plain, scale=jax.device_put(scale, plain.step.sharding))
    with Checkpoints(tmp_path / "new") as checkpoints:
        checkpoints.save(state, **SAVED_WITH)
    restored, _ = Checkpoints(tmp_path / "new").restore(abstract(state))
    assert same_bits(restored, state)
    with pytest.raises(CheckpointError, match=r"checkpoint has, this run does not[\s\S]*scale/value"):
        Checkpoints(tmp_path / "new").restore(abstract(plain))
    with Checkpoints(tmp_path / "old") as checkpoints:
        checkpoints.save(plain, **SAVED_WITH)
    restored, meta = Checkpoints(tmp_path / "old").restore(abstract(plain))
    assert same_bits(restored, plain)
    assert not any("scale/" in path for path in meta["leaves"])
    with pytest.raises(CheckpointError, match=r"this run needs, the checkpoint lacks[\s\S]*scale/value"):
        Checkpoints(tmp_path / "old").restore(abstract(state))


@pytest.mark.slow
def test_resumed_steps_equal_uninterrupted_ones(tmp_path):
    batches = [GOOD[0], large(30.0), GOOD[1], GOOD[2], large(30.0), GOOD[3]]
    whole, _ = run_steps(batches)
    first, states = run_steps(batches[:3])
    again, _ = run_steps(batches[3:], start=states[-1])
    for ours, want in zip([*first, *again], whole, strict=True):
        np.testing.assert_equal(ours, want)  # NaN equals NaN


@pytest.mark.slow
def test_pi0_in_float16_is_near_float32():
    """Half precision's 2**-11 per operation, over a few layers."""
    from openpi_train.keys import row_keys

    experiment = registry.load("debug")
    rng = np.random.default_rng(0)
    spec = experiment.model.rows.batch_spec(2, ("base_0_rgb",))

    def fill(leaf):
        if leaf.dtype == jnp.bool_:
            return jnp.ones(leaf.shape, bool)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    batch = dataclasses.replace(jax.tree.map(fill, spec), row=jnp.arange(2, dtype=jnp.int32))
    objective = FlowMatching(augment=False)
    losses = {}
    for dtype in ("float32", "float16"):
        model = dataclasses.replace(experiment.model, dtype=dtype)
        assert model.compute.needs_loss_scale == (dtype == "float16")
        network = model.build(nnx.Rngs(0))
        keys = row_keys(0, 0, batch.row)
        losses[dtype] = float(objective.loss(network, batch, objective.norms(batch), keys)[0])
    assert losses["float16"] != losses["float32"]
    np.testing.assert_allclose(losses["float16"], losses["float32"], rtol=5e-3)
