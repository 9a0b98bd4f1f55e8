"""Flow matching with clean prefixes, on velocities whose every answer is known; and models with a time per action."""

import dataclasses
import zlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pi0_case
import pytest
import smolvla_case
import toy
from flax import nnx
from trainers import make_trainer

from openpi_train import registry
from openpi_train.keys import row_keys
from openpi_train.nn.norms import RMSNorm
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.insulated_flow import InsulatedFlow
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime.exits import UsageError
from openpi_train.training.init import create_state

ROWS, HORIZON, DIMS, DRAWS, MAX_DELAY = 6, 5, 4, 3, 3
FLOW = FlowMatching(augment=False, num_flow_draws=DRAWS, max_delay=MAX_DELAY)


class TimedPolicy(nnx.Module):
    """velocity = noisy_actions @ kernel + time * bias + step, where `step` has a value for each action of the chunk."""

    def __init__(self, config, rngs):
        def normal(*shape):
            return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))

        self.kernel, self.bias = normal(DIMS, DIMS), normal(DIMS)
        self.step = normal(config.action_horizon, DIMS)

    def velocity(self, observation, noisy, time):
        t = time[..., None] if time.ndim == 3 else time[:, :, None, None]
        return noisy @ self.kernel[...] + t * self.bias[...] + self.step[...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedConfig(toy.LinearConfig):
    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample", "action_times"})
    action_horizon: int = HORIZON

    def build(self, rngs):
        return TimedPolicy(self, rngs)


def drawn(rows, keys):
    """Noise, time and delay of every row and draw, as their documentation says that they depend on the rows' keys."""

    def of(purpose):
        return [jax.random.fold_in(key, zlib.crc32(purpose.encode())) for key in keys]

    shape = (DRAWS, *rows.actions.shape[1:])
    noise = np.stack([jax.random.normal(key, shape) for key in of("noise")]).astype(np.float64)
    uniform = np.stack([jax.random.uniform(key, (DRAWS,)) for key in of("time")]).astype(np.float64)
    delays = np.stack([jax.random.randint(key, (DRAWS, 1), 0, MAX_DELAY + 1)[:, 0] for key in of("delay")])
    return noise, uniform ** (1 / 1.5) * 0.999 + 0.001, delays


def test_the_loss_is_the_closed_form_in_which_prefixes_are_clean_and_do_not_count():
    rows = toy.batch(ROWS, horizon=HORIZON, dims=DIMS)
    keys, model = row_keys(7, 2, rows.row), TimedConfig().build(nnx.Rngs(0))
    noise, time, delays = drawn(rows, keys)
    assert len(set(delays.ravel().tolist())) == MAX_DELAY + 1
    kernel, bias, steps = (np.asarray(one[...], np.float64) for one in (model.kernel, model.bias, model.step))
    total, expected_count = 0.0, 0.0
    for row in range(ROWS):
        actions, valid = (np.asarray(one[row]) for one in (rows.actions, rows.action_mask))
        for draw in range(DRAWS):
            for place in np.flatnonzero(valid):
                # Of the delays 0..N, those that leave this action to the loss.
                expected_count += DIMS * np.mean([delay <= place for delay in range(MAX_DELAY + 1)])
                if place < delays[row, draw]:
                    continue
                x, t = noise[row, draw], time[row, draw]
                velocity = (t * x[place] + (1 - t) * actions[place]) @ kernel + t * bias + steps[place]
                total += np.square(velocity - (x[place] - actions[place])).sum()
    loss, metrics = FLOW.loss(model, rows, FLOW.norms(rows), keys)
    np.testing.assert_allclose(loss, total / expected_count, rtol=1e-5)
    assert metrics["loss"] == loss


def test_what_a_model_says_of_the_prefix_has_no_gradient_and_it_sees_the_prefix_clean():
    rows = toy.batch(1, horizon=HORIZON, dims=DIMS, ragged=False)
    flow, seen = dataclasses.replace(FLOW, num_flow_draws=1), set()
    graph, params = nnx.split(TimedConfig().build(nnx.Rngs(0)))

    @jax.jit
    def gradient(keys):
        loss = jax.grad(lambda params: flow.loss(nnx.merge(graph, params), rows, flow.norms(rows), keys)[0])
        return loss(params)["step"][...], *flow.draw(rows, keys)

    for seed in range(12):
        of_step, noise, time = map(np.asarray, gradient(row_keys(seed, 0, rows.row)))
        delay = int((time == 0).sum())
        seen.add(delay)
        assert (time[0, 0] == 0).tolist() == (np.arange(HORIZON) < delay).tolist()
        assert len(set(time[0, 0, delay:].tolist())) == 1
        assert (of_step[:delay] == 0).all() and (of_step[delay:] != 0).all()
        noisy, _ = flow.path(rows.actions, jnp.asarray(noise), jnp.asarray(time))
        np.testing.assert_array_equal(noisy[0, 0, :delay], rows.actions[0, :delay])
        assert (np.asarray(noisy)[0, 0, delay:] != np.asarray(rows.actions)[0, delay:]).all()
    assert seen == set(range(MAX_DELAY + 1))


def test_every_delay_is_as_likely():
    rows = toy.batch(500, horizon=HORIZON, dims=DIMS, ragged=False)
    _, time = dataclasses.replace(FLOW, num_flow_draws=8).draw(rows, row_keys(0, 0, rows.row))
    counts = np.bincount((np.asarray(time) == 0).sum(axis=2).ravel(), minlength=HORIZON + 1)
    # 4,000 draws: 1,000 of each, with a standard deviation of 27.
    np.testing.assert_allclose(counts[: MAX_DELAY + 1], 1000, atol=140)
    assert counts[MAX_DELAY + 1 :].sum() == 0


@pytest.mark.parametrize("layout", [{"devices": 2}, {"devices": 2, "accum": 2}, {"devices": 4, "fsdp": 2}], ids=str)
def test_devices_and_micro_batches_change_nothing(layout):
    def losses(devices=1, fsdp=1, accum=1):
        plan = Plan(mesh=make_mesh(fsdp, jax.devices()[:devices]), strategy="zero3", min_shard_mib=0)
        schedule = LRSchedule(warmup_steps=2, peak_lr=1e-2, decay_steps=20, decay_lr=1e-3)
        config = TimedConfig()
        trainer, form = make_trainer(config, plan, AdamW(), schedule, objective=FLOW, accum=accum)
        with jax.set_mesh(plan.real_mesh):
            state = create_state(form, config, trainer.optimizer, config.param_rules.frozen, True, 7)
            step = trainer.compile_step(form.shardings, state, config.rows.batch_spec(8, ()))
            found = []
            for index in range(3):
                rows = toy.batch(8, horizon=HORIZON, dims=DIMS, seed=index)
                state, metrics = step(state, jax.device_put(rows, plan.batch))
                found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        return found

    np.testing.assert_allclose(losses(**layout), losses(), rtol=2e-6)


@pytest.mark.parametrize("flow", [FlowMatching(augment=False), FLOW], ids=["plain", "max_delay"])
def test_without_a_delay_nothing_is_drawn_or_divided_otherwise(flow):
    """Noise and times are the same with and without prefixes; and a step of one delay alone leaves the plain loss."""
    rows = toy.batch(ROWS, horizon=HORIZON, dims=DIMS)
    keys = row_keys(7, 2, rows.row)
    plain = FlowMatching(augment=False, num_flow_draws=flow.num_flow_draws)
    (noise, time), (known, times) = plain.draw(rows, keys), flow.draw(rows, keys)
    np.testing.assert_array_equal(noise, known)
    np.testing.assert_array_equal(time, times if times.ndim == 2 else times.max(axis=2))
    assert (
        plain.max_delay == 0 and plain.action_sampler.max_delay == 0 and flow.action_sampler.max_delay == flow.max_delay
    )


def random_module(config):
    """The network with random parameters, every one of them."""
    module, generator = config.build(nnx.Rngs(0)), np.random.default_rng(0)
    state = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda x: jnp.asarray(0.3 * generator.normal(size=x.shape), x.dtype), state))
    return module


def models():
    tiny = pi0_case.TINY
    pi0, pi05 = (dataclasses.replace(tiny, pi05=pi05) for pi05 in (False, True))
    return {
        "pi0": (random_module(pi0), pi0_case.observation(pi0)),
        "pi05": (random_module(pi05), pi0_case.observation(pi05)),
        "smolvla": (random_module(smolvla_case.config()), smolvla_case.batch().observation),
    }


@pytest.fixture(scope="module")
def built():
    return models()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi0", "pi05", "smolvla"])
def test_equal_times_of_all_actions_are_the_time_of_the_chunk_and_a_time_of_its_own_changes_the_velocity(built, name):
    model, seen = built[name]
    horizon = smolvla_case.config().action_horizon if name == "smolvla" else pi0_case.TINY.action_horizon
    dims = smolvla_case.config().action_dim if name == "smolvla" else pi0_case.TINY.action_dim
    b, draws = len(seen.state), 2
    generator = np.random.default_rng(1)
    noisy = jnp.asarray(generator.normal(size=(b, draws, horizon, dims)), jnp.float32)
    time = jnp.asarray(generator.uniform(size=(b, draws)), jnp.float32)
    each = jnp.broadcast_to(time[:, :, None], (b, draws, horizon))
    velocity = nnx.jit(lambda model, time: model.velocity(seen, noisy, time))
    plain, same = velocity(model, time), velocity(model, each)
    np.testing.assert_allclose(same, plain, rtol=1e-5, atol=1e-5 * float(jnp.abs(plain).max()))
    other = velocity(model, each.at[:, 1, 0].set(0.0))
    np.testing.assert_allclose(other[:, 0], plain[:, 0], rtol=1e-5, atol=1e-5 * float(jnp.abs(plain).max()))
    assert (np.abs(other - plain)[:, 1, 0].max(axis=-1) > 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi0", "pi05", "smolvla"])
def test_the_token_of_an_action_has_the_time_of_that_action(built, name):
    """Actions do not meet before the first layer: there each is what it would be in a chunk of its time alone."""
    model, seen = built[name]
    horizon, dims = (
        (smolvla_case.config().action_horizon, smolvla_case.config().action_dim)
        if name == "smolvla"
        else (pi0_case.TINY.action_horizon, pi0_case.TINY.action_dim)
    )
    b, draws = len(seen.state), 2
    generator = np.random.default_rng(2)
    noisy = jnp.asarray(generator.normal(size=(b, draws, horizon, dims)), jnp.float32)
    times = jnp.asarray(generator.uniform(size=(b, draws, horizon)), jnp.float32)

    def embedded(time):
        """Tokens and conditions of every action, [b, r, h, w] each."""
        if name == "smolvla":
            tokens, condition = model._embed_actions(noisy, time), None
        else:
            tokens, conditions = model.embed_suffix(seen.state, noisy, time)
            tokens = tokens[:, -draws * horizon :].reshape(b, draws, horizon, -1)
            condition = conditions.get("action")
        if condition is None:
            return tokens, tokens
        return tokens, jnp.broadcast_to(condition.reshape(b, draws, -1, condition.shape[-1]), tokens.shape)

    found = embedded(times)
    for place in range(horizon):
        for one, wanted in zip(found, embedded(times[:, :, place]), strict=True):
            np.testing.assert_allclose(one[:, :, place], wanted[:, :, place], rtol=1e-5, atol=1e-5)


def test_a_norm_with_a_condition_for_each_token_norms_each_as_alone():
    norm = RMSNorm(6, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    generator = np.random.default_rng(0)
    norm.modulation.kernel[...] = jnp.asarray(generator.normal(size=(5, 18)), jnp.float32)
    x, condition = (jnp.asarray(generator.normal(size=(2, 4, width)), jnp.float32) for width in (6, 5))
    found = norm(x, condition)
    for place in range(4):
        one = slice(place, place + 1)
        for whole, alone in zip(found, norm(x[:, one], condition[:, one]), strict=True):
            np.testing.assert_allclose(whole[:, one], alone, rtol=1e-5, atol=1e-6)


def test_models_with_one_time_for_a_chunk_and_prefixes_of_whole_chunks_are_refused():
    debug = dataclasses.replace(registry.load("debug"), exp_name="x")
    dataclasses.replace(debug, objective=FlowMatching(max_delay=7)).check(1)
    for objective in (FlowMatching(max_delay=8), InsulatedFlow(flow=FlowMatching(max_delay=8))):
        with pytest.raises(UsageError, match=r"--objective.max-delay 8 must be less than the 8 actions of a chunk"):
            dataclasses.replace(debug, objective=objective).check(1)
    diffusion = dataclasses.replace(registry.load("diffusion"), exp_name="x")
    with pytest.raises(UsageError, match=r"--objective.max-delay 2 needs a flow time for each action, and Diffusion"):
        dataclasses.replace(diffusion, objective=FlowMatching(max_delay=2)).check(1)
