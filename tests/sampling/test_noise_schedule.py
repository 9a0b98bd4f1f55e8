"""Schedules and samplers against diffusers' own numbers, and against closed forms."""

import diffusion_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusion_fixtures.fixed_values import model_output, values

from openpi_train.sampling.noise_schedule import NoiseSchedule

SCHEDULES = ("squaredcos_cap_v2", "linear")


@pytest.fixture(scope="module")
def recorded():
    return diffusion_case.recorded()


def test_published_numbers_of_the_cosine_schedule():
    schedule = NoiseSchedule()
    np.testing.assert_allclose(
        schedule.betas[[0, 50, 98, 99]], [0.00063128, 0.03154634, 0.74993928, 0.999], rtol=0, atol=5e-9
    )
    np.testing.assert_allclose(schedule.alphas_cumprod[[0, 49]], [0.99936872, 0.49384359], rtol=0, atol=5e-9)
    np.testing.assert_allclose(schedule.alphas_cumprod[[98, 99]], [2.4286e-4, 2.4286e-7], rtol=2e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_noise_and_velocity_are_those_of_diffusers(recorded, name):
    schedule = NoiseSchedule(beta_schedule=name)
    # diffusers multiplies a hundred float32 numbers.
    np.testing.assert_allclose(schedule.betas, recorded[f"{name}/betas"], rtol=1e-5)
    np.testing.assert_allclose(schedule.alphas_cumprod, recorded[f"{name}/acp"], rtol=3e-5)
    clean, noise = jnp.asarray(values("clean", (3, 4))), jnp.asarray(values("eps", (3, 4)))
    steps = jnp.array([0, 99, 49])
    np.testing.assert_allclose(schedule.add_noise(clean, noise, steps), recorded[f"{name}/noisy"], rtol=2e-5, atol=1e-6)
    found = NoiseSchedule(beta_schedule=name, prediction_type="v_prediction").target(clean, noise, steps)
    np.testing.assert_allclose(found, recorded[f"{name}/velocity"], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_samplers_walk_as_diffusers_do(recorded, name, prediction):
    for clip in (True, False):
        schedule = NoiseSchedule(beta_schedule=name, prediction_type=prediction, clip_sample=clip)
        for sampler, num_steps in (("ddpm", 100), ("ddpm", 10), ("ddim", 100), ("ddim", 8)):
            walk = getattr(schedule, sampler)(num_steps)
            found = values("start", (2, 3)).astype(np.float64)
            for index, step in enumerate(walk.steps):
                row, noise = walk.table[index], values(f"noise {index}", (2, 3))
                found = walk.step(row, found, model_output(found, step), noise)
            expected = recorded[f"{name}/{prediction}/{clip}/{sampler}/{num_steps}"]
            # Both in float64, but diffusers rounded the last beta, 0.999, to float32 before: 6.5e-6 of the signal left.
            scale = np.abs(expected).max()
            np.testing.assert_allclose(
                found / scale, expected / scale, rtol=0, atol=7e-6, err_msg=f"{sampler} {num_steps} {clip}"
            )


@pytest.mark.parametrize(("sampler", "num_steps"), [("ddpm", 100), ("ddim", 8), ("ddim", 100)])
def test_who_knows_the_noise_finds_the_actions_within_the_limit(sampler, num_steps):
    clean = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, 2, 3)), jnp.float32)
    kept = jnp.asarray(NoiseSchedule().alphas_cumprod, jnp.float32)

    def knows(noisy, step):
        share = kept[step.astype(int)][:, None, None]
        return (noisy - jnp.sqrt(share) * clean) / jnp.sqrt(1 - share)

    def draw(index):
        return jax.random.normal(jax.random.fold_in(jax.random.key(1), index), clean.shape)

    start = jax.random.normal(jax.random.key(0), clean.shape)
    for limit in (1.0, 0.5):
        schedule = NoiseSchedule(clip_sample_range=limit)
        found = getattr(schedule, sampler)(num_steps).walk(knows, start, draw).actions
        # The noise of step 0 has a share of 6e-4: its rounding, and no more, is left.
        np.testing.assert_allclose(found, clean.clip(-limit, limit), atol=1e-6)


def spread_of_samples(walk, schedule, spread):
    """The spread to which a walk brings standard normal noise with the best denoiser of a Gaussian: all is linear."""
    variance = 1.0
    for row, kept in zip(walk.table, schedule.alphas_cumprod[walk.steps], strict=True):
        best = np.sqrt(1 - kept) / (kept * spread**2 + 1 - kept)
        factor = walk.step(row, np.ones(1), np.full(1, best), np.zeros(1))[0]
        variance = factor**2 * variance + row[7] ** 2
    return np.sqrt(variance)


def test_the_best_denoiser_of_a_gaussian_gives_its_spread_the_more_the_smaller_the_steps():
    schedule = NoiseSchedule(clip_sample=False)
    ddim = [spread_of_samples(schedule.ddim(steps), schedule, 0.3) for steps in (10, 25, 50, 100)]
    ddpm = [spread_of_samples(schedule.ddpm(steps), schedule, 0.3) for steps in (10, 25, 50, 100)]
    # Published from samples, whose own spread is known to about 0.2 %.
    np.testing.assert_allclose([ddim[-1], ddpm[-1]], [0.2933, 0.2846], rtol=2e-3)
    assert ddim == sorted(ddim) and ddpm == sorted(ddpm)


def test_numbers_that_make_no_schedule_are_refused():
    with pytest.raises(ValueError, match="num_train_timesteps 0 must be at least 1"):
        NoiseSchedule(num_train_timesteps=0)
    with pytest.raises(ValueError, match=r"101 sampling steps \(--eval.num-sample-steps\).*give 1 to 100"):
        NoiseSchedule().ddim(101)
