"""The flow sampler: what it computes once and what at every step, its chain, and the samplers that have none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from jax.extend.core import jaxprs_in_params

from openpi_train.models.paligemma import PaliGemmaFlowConfig
from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.next_token import NextToken
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.action_sampler import OwnSampler
from openpi_train.sampling.flow import FlowSampler, as_flow, flow_times
from openpi_train.sampling.noise_schedule import NoiseSchedule
from openpi_train.sampling.real_time_chunking import Guide, guided_velocity

SHAPE = (2, 3, 4)
NOISE, TARGET = (jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE), jnp.float32) for seed in (0, 1))
STEPS = 5


class Counting:
    """A linear policy that counts how often its context is traced, and its velocity."""

    def __init__(self):
        self.policy, self.contexts, self.velocities = toy.LinearConfig().build(nnx.Rngs(0)), 0, 0

    def context(self, observation):
        self.contexts += 1
        return observation

    def velocity(self, seen, noisy, time):
        self.velocities += 1
        return self.policy.velocity(seen, noisy, time)

    def denoise(self, context, noisy, step):
        return self.velocity(context, noisy, step / 100)


GUIDED = FlowSampler(guide=Guide(target=TARGET, weights=jnp.full(SHAPE, 0.5)))


SAMPLERS = {
    "free": FlowSampler(),
    "guided": GUIDED,
    "diffusion": Diffusion(noise_schedule=NoiseSchedule(num_train_timesteps=7)).action_sampler,
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.slow
def test_a_chunks_context_is_made_once_whatever_the_denoising_steps(name, num_steps):
    model, seen, keys = Counting(), toy.batch(2).observation, jax.random.split(jax.random.key(0), 2)
    with jax.disable_jit():  # loops run in Python, and every call counts
        SAMPLERS[name].sample(model, seen, NOISE, keys, num_steps)
    assert (model.contexts, model.velocities) == (1, num_steps)


SIZES = {"depth": 2, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
TINY = {
    "paligemma_variant": "dummy",
    "language": GemmaOverrides(width=16, **SIZES),
    "siglip": SiglipConfig(width=8, depth=2, mlp_dim=16, num_heads=2, patch_size=8),
    "image_size": 16,
    "vocab_size": 40,
    "action_dim": 4,
    "action_horizon": 3,
    "max_token_len": 6,
    "dtype": "float32",
}
EXPERT = GemmaOverrides(width=12, **SIZES)
MODELS = {
    "pi0": Pi0Config(**TINY, action_expert_variant="dummy", action_expert=EXPERT),
    "pi05": Pi0Config(**TINY, action_expert_variant="dummy", action_expert=EXPERT, pi05=True),
    "paligemma": PaliGemmaFlowConfig(**TINY, head_variant="dummy", head=EXPERT),
}


def products(jaxpr):
    """Matrix products and convolutions in a program, those in loops counted as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += equation.primitive.name in ("dot_general", "conv_general_dilated")
        total += times * sum(products(inner) for inner in jaxprs_in_params(equation.params))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_guided_step_more_costs_no_pass_over_the_prefix(name):
    config = MODELS[name]
    seen = config.rows.batch_spec(2, ("base_0_rgb",)).observation
    graph, params = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))

    def sample(num_steps, params, seen):
        return GUIDED.sample(nnx.merge(graph, params), seen, NOISE, None, num_steps)

    def make_context(params, seen):
        return nnx.merge(graph, params).context(seen)

    def step(params, context):
        def velocity(actions, time):
            return nnx.merge(graph, params).velocity(context, actions[:, None], time[:, None])[:, 0]

        return guided_velocity(velocity, NOISE, jnp.ones(2), GUIDED.guide)

    def counted(function, *inputs):
        return products(jax.make_jaxpr(function)(*inputs).jaxpr)

    once, each = counted(make_context, params, seen), counted(step, params, jax.eval_shape(make_context, params, seen))
    assert once > 0 and each > 0
    for num_steps in (1, 4):
        assert counted(functools.partial(sample, num_steps), params, seen) == once + num_steps * each


@pytest.mark.slow
def test_the_chain_holds_every_step_and_ends_in_the_sample():
    model, seen = toy.LinearConfig().build(nnx.Rngs(0)), toy.batch(2).observation
    chain = FlowSampler().chain(model, seen, NOISE, None, STEPS)
    assert (chain.noisy.shape, chain.time.shape) == ((2, STEPS + 1, 3, 4), (2, STEPS))
    np.testing.assert_array_equal(chain.noisy[:, 0], NOISE)
    # Two programs, whose loops XLA fuses in different ways: float32 rounding.
    np.testing.assert_allclose(
        chain.actions, FlowSampler().sample(model, seen, NOISE, None, STEPS), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(chain.time[0], [1, 0.8, 0.6, 0.4, 0.2], rtol=1e-6)
    # All steps asked again in one pass.
    velocity = model.velocity(seen, chain.noisy[:, :-1], chain.time)
    np.testing.assert_allclose(np.diff(chain.noisy, axis=1), -velocity / STEPS, rtol=1e-5, atol=1e-6)


def test_the_chain_of_a_diffusion_names_the_step_of_each_of_its_states():
    sampler = Diffusion(sampler="ddpm").action_sampler
    model, seen, keys = Counting(), toy.batch(2).observation, jax.random.split(jax.random.key(0), 2)
    chain = sampler.chain(model, seen, NOISE, keys, STEPS)
    np.testing.assert_array_equal(chain.time, [[80.0, 60.0, 40.0, 20.0, 0.0]] * 2)
    np.testing.assert_array_equal(chain.noisy[:, 0], NOISE)
    np.testing.assert_allclose(chain.actions, sampler.sample(model, seen, NOISE, keys, STEPS), rtol=1e-5, atol=1e-6)
    # The last step adds no noise.
    walk = sampler.noise_schedule.ddpm(STEPS)
    asked = model.denoise(seen, chain.noisy[:, :-1], chain.time)[:, -1]
    np.testing.assert_allclose(
        walk.step(walk.table[-1], chain.noisy[:, -2], asked, 0 * NOISE), chain.actions, atol=1e-5
    )


def test_without_the_chain_nothing_of_it_is_computed():
    model, seen = toy.LinearConfig().build(nnx.Rngs(0)), toy.batch(2).observation
    program = jax.make_jaxpr(lambda noise: FlowSampler().sample(model, seen, noise, None, STEPS))(NOISE)
    (loop,) = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    assert [variable.aval.shape for variable in loop.outvars] == [SHAPE]


def test_times_are_those_that_openpis_sampler_sums_up():
    for num_steps in (1, 3, 10, 100):
        time, expected = np.float32(1), []
        for _ in range(num_steps):
            expected.append(time)
            time += np.float32(-1 / num_steps)
        np.testing.assert_array_equal(flow_times(num_steps), np.array(expected, np.float32))


def test_a_model_that_samples_itself_has_no_chain_and_no_guide():
    with pytest.raises(UsageError, match="LinearPolicy samples its actions itself"):
        OwnSampler().chain(toy.LinearConfig().build(nnx.Rngs(0)), toy.batch(2).observation, NOISE, None, STEPS)
    for objective in (NextToken(), Diffusion()):
        with pytest.raises(UsageError, match=r"guides the velocity of a flow, but \w+Sampler, which .* has none"):
            as_flow(objective.action_sampler)
    assert as_flow(FlowMatching().action_sampler).augmentation == FlowMatching().augmentation
