"""Whole diffusion policies against diffusion_policy's own classes, and what training and sampling draw by keys.

`diffusion_fixtures/make_policy.py` recorded what the published classes give; `fixed_values.py` is what both are asked.
"""

import dataclasses
import functools
import zlib

import diffusion_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusion_fixtures import fixed_values as given
from flax import nnx

from openpi_train.data.robot.normalize import NormStats
from openpi_train.data.robot.opened import row_spec
from openpi_train.data.robot.transforms import Normalize
from openpi_train.data.robot.translation import Translation
from openpi_train.models.diffusion_policy.diffusion_policy import DiffusionPolicyConfig, TransformerSizes, UnetSizes
from openpi_train.nn.augment import RandomCrop
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.robots.robotwin import RoboTwin
from openpi_train.sampling.action_sampler import Chain
from openpi_train.sampling.noise_schedule import NoiseSchedule, SamplerCoefficients
from openpi_train.types import ActionBatch, Observation, action_batch

CROP = RandomCrop(height=given.CROP[0], width=given.CROP[1])
CONFIG = DiffusionPolicyConfig(
    action_dim=given.ACTION_DIM,
    state_dim=given.STATE_DIM,
    action_horizon=given.HORIZON,
    n_obs_steps=given.HISTORY,
    n_action_steps=given.EXECUTED,
    cameras=given.CAMERAS,
    image_height=given.IMAGE[0],
    image_width=given.IMAGE[1],
    encoder_widths=(16, 32),
    unet=UnetSizes(widths=(16, 32)),
    transformer=TransformerSizes(width=16, depth=2, num_heads=2),
    diffusion_step_embed_dim=16,
)
CHUNK = (given.HORIZON, given.ACTION_DIM)
POLICIES = [("unet", "epsilon"), ("unet", "sample"), ("transformer", "epsilon")]


class ThreeDims(RoboTwin):
    state_names = action_names = ("x_m", "y_m", "z_m")


def extremes(name):
    values = given.told(name, (50,))
    unused = np.full(values.shape[-1], np.nan)
    low, high = values.min(axis=0), values.max(axis=0)
    return NormStats(mean=unused, std=unused, q01=unused, q99=unused, low=low, high=high)


TRANSLATION = Translation(
    robot=ThreeDims(cameras={name: name for name in given.CAMERAS}),
    normalize=Normalize({name: extremes(name) for name in ("state", "actions")}, CONFIG.rows.normalization),
    transforms=CONFIG.rows.transforms(None),
    spec=row_spec(CONFIG.rows.batch_spec(1, given.CAMERAS)),
    window=CONFIG.rows.window,
)


@pytest.fixture(scope="module")
def recorded():
    return diffusion_case.recorded("policy.npz")


@functools.cache
def policy(denoiser):
    config = dataclasses.replace(CONFIG, denoiser=denoiser)
    return diffusion_case.with_torch_parameters(config.build, lambda path: diffusion_case.policy_name(path, denoiser))


@functools.cache
def rows():
    """What the policies see and are to do, from a robot's units on by the product's own way."""
    seen = given.seen()
    rows = [
        TRANSLATION.row({name: seen[name][row] for name in given.CAMERAS}, seen["state"][row], "")
        for row in range(given.ROWS)
    ]
    batch = {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}
    batch["actions"] = jnp.asarray(TRANSLATION.normalize({"actions": seen["actions"]})["actions"])
    batch["action_mask"] = jnp.ones(batch["actions"].shape[:2], bool)
    batch["dim_mask"] = jnp.ones((given.ROWS, given.ACTION_DIM), bool)
    batch["row"] = jnp.arange(given.ROWS, dtype=jnp.int32)
    return action_batch(batch)


def cropped(batch, corners):
    """The batch with the images cut there; `corners` [camera, row, (y, x)]."""
    images = {}
    for name, places in zip(given.CAMERAS, np.asarray(corners), strict=True):
        pairs = zip(batch.observation.images[name], places.tolist(), strict=True)
        images[name] = jnp.stack([image[:, y : y + CROP.height, x : x + CROP.width] for image, (y, x) in pairs])
    return dataclasses.replace(batch, observation=dataclasses.replace(batch.observation, images=images))


def centred(batch):
    return dataclasses.replace(batch, observation=CROP(batch.observation, None))


@pytest.mark.parametrize(("denoiser", "prediction"), POLICIES)
@pytest.mark.slow
def test_losses_are_those_of_diffusion_policy(recorded, denoiser, prediction):
    objective = Diffusion(noise_schedule=NoiseSchedule(prediction_type=prediction), num_draws=given.DRAWS)
    noise = np.stack([given.values(f"noise {draw}", (given.ROWS, *CHUNK)) for draw in range(given.DRAWS)], axis=1)
    model, step = policy(denoiser), jnp.asarray(given.STEPS.T)

    @jax.jit
    def loss(batch):
        return objective.loss_at(model, batch, objective.norms(batch), jnp.asarray(noise), step)[0]

    for mode, batch in (("train", cropped(rows(), given.CORNERS)), ("eval", centred(rows()))):
        expected = np.mean([recorded[f"{denoiser}/{prediction}/{mode} loss {draw}"] for draw in range(given.DRAWS)])
        assert float(loss(batch)) == pytest.approx(expected, rel=1e-6)


class GivenWalk(SamplerCoefficients):
    """A walk with the recording's fresh noise."""

    def walk(self, predict, start, draw, keep=False):
        del draw
        fresh = jnp.stack(
            [jnp.asarray(given.values(f"fresh {index}", start.shape)) for index in range(len(self.steps))]
        )
        return super().walk(predict, start, lambda index: fresh[index], keep)


class GivenNoise(NoiseSchedule):
    def ddpm(self, num_steps):
        return GivenWalk(**vars(super().ddpm(num_steps)))


@pytest.mark.parametrize(
    ("denoiser", "prediction", "sampler", "num_steps"),
    [
        *(
            (*policy, sampler, num_steps)
            for policy in POLICIES[:2]
            for sampler, num_steps in (("ddpm", 100), ("ddim", 16))
        ),
        (*POLICIES[2], "ddim", 16),
    ],
)
@pytest.mark.slow
def test_samples_are_those_of_diffusion_policy(recorded, denoiser, prediction, sampler, num_steps):
    objective = Diffusion(noise_schedule=GivenNoise(prediction_type=prediction), sampler=sampler, augmentation=CROP)
    start, keys = jnp.asarray(given.values("start", (given.ROWS, *CHUNK))), jax.random.split(jax.random.key(0), 3)
    model = policy(denoiser)

    @jax.jit
    def sample(observation):
        return objective.action_sampler.sample(model, observation, start, keys, num_steps)

    found, name = np.asarray(sample(rows().observation)), f"{denoiser}/{prediction}/{sampler}"
    # The first steps multiply the network's rounding by what the signal is short of: in float32 torch itself is up to
    # 8e-6 from what it gives in float64, and 1.4e-5 in the robot's units (`policy.json`).
    np.testing.assert_allclose(found, recorded[f"{name}/chunk"], rtol=0, atol=2e-5)
    ahead = np.stack([TRANSLATION.actions(*pair) for pair in zip(found, given.seen()["state"][:, -1], strict=True)])
    np.testing.assert_allclose(ahead[:, : given.EXECUTED], recorded[f"{name}/executed"], rtol=0, atol=4e-5)


# What the keys are for; a key of a row is folded with the CRC of a use's name (`keys.py`).


def keys_for(keys, purpose):
    return [jax.random.fold_in(key, zlib.crc32(purpose.encode())) for key in keys]


def drawn(keys, num_draws, num_steps=100):
    """The noise and the diffusion steps of each row."""
    noise = [jax.random.normal(key, (num_draws, *CHUNK)) for key in keys_for(keys, "noise")]
    steps = [jax.random.randint(key, (num_draws,), 0, num_steps) for key in keys_for(keys, "time")]
    return jnp.stack(noise), jnp.stack(steps)


class Spy(nnx.Module, pytree=False):
    """In place of a policy: keeps what it is asked, and always answers with zeros."""

    def context(self, observation):
        self.observation = observation
        return jnp.zeros((len(observation.state), 1, 1))

    def denoise(self, condition, noisy, step):
        self.noisy, self.step = noisy, step
        return jnp.zeros_like(noisy)


@pytest.mark.slow
def test_loss_is_loss_at_what_the_keys_draw(recorded):
    objective = Diffusion(augmentation=CROP, num_draws=2)
    keys, batch = jax.random.split(jax.random.key(5), given.ROWS), rows()
    norms, (noise, step) = objective.norms(batch), drawn(keys, 2)
    room = jnp.array(given.IMAGE) - jnp.array(given.CROP) + 1
    corners = [
        jnp.stack([jax.random.randint(key, (2,), 0, room) for key in keys_for(keys, f"augment/{name}")])
        for name in given.CAMERAS
    ]
    for train, seen in ((True, cropped(batch, corners)), (False, centred(batch))):
        spy, expected = Spy(), Spy()
        found = objective.loss(spy, batch, norms, keys, train=train)
        assert found == objective.loss_at(expected, seen, norms, noise, step)
        for camera in given.CAMERAS:
            np.testing.assert_array_equal(spy.observation.images[camera], expected.observation.images[camera])
        np.testing.assert_array_equal(spy.step, step)
        np.testing.assert_array_equal(spy.noisy, expected.noisy)


def many_rows(count):
    """Rows that see nothing and are to do one thing each."""
    observation = Observation(
        images={},
        image_masks={},
        state=jnp.zeros((count, 1)),
        prompt_tokens=jnp.zeros((count, 0), jnp.int32),
        prompt_mask=jnp.zeros((count, 0), bool),
    )
    return ActionBatch(
        observation=observation,
        actions=jnp.linspace(-1.0, 1.0, count)[:, None, None],
        action_mask=jnp.ones((count, 1), bool),
        dim_mask=jnp.ones((count, 1), bool),
        row=jnp.arange(count, dtype=jnp.int32),
    )


@pytest.mark.parametrize("num_steps", [100, 7])
@pytest.mark.slow
def test_every_diffusion_step_is_drawn_as_often_and_the_network_is_told_the_one_of_its_noise(num_steps):
    count, spy = 20_000, Spy()
    objective = Diffusion(noise_schedule=NoiseSchedule(num_train_timesteps=num_steps))
    batch, keys = many_rows(count), jax.random.split(jax.random.key(1), count)
    loss, _ = objective.loss(spy, batch, objective.norms(batch), keys)
    steps = np.asarray(spy.step)[:, 0]
    counts = np.bincount(steps.astype(int), minlength=num_steps)
    assert len(counts) == num_steps and counts.min() > 0
    # Pearson's sum has as many degrees of freedom as there are steps, less one: five standard deviations.
    freedom, even = num_steps - 1, count / num_steps
    assert ((counts - even) ** 2 / even).sum() < freedom + 5 * np.sqrt(2 * freedom)
    # Nichol & Dhariwal 2021: the signal left after each step, no beta above 0.999.
    signal = np.cos((np.arange(num_steps + 1) / num_steps + 0.008) / 1.008 * np.pi / 2) ** 2
    kept = np.cumprod(np.maximum(signal[1:] / signal[:-1], 0.001))[steps.astype(int)]
    noise = (np.asarray(spy.noisy)[:, 0, 0, 0] - np.sqrt(kept) * np.asarray(batch.actions)[:, 0, 0]) / np.sqrt(1 - kept)
    alike = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, zlib.crc32(b"noise")), ()))(keys)
    # Where little noise was added it is known to the rounding of the sum, as a share of it.
    np.testing.assert_allclose(noise * np.sqrt(1 - kept), alike * np.sqrt(1 - kept), rtol=0, atol=1e-6)
    assert float(loss) == pytest.approx(np.mean(np.square(alike)), rel=1e-5)


def test_steps_outside_the_episode_count_and_filler_does_not():
    batch = dataclasses.replace(rows(), action_mask=jnp.arange(given.HORIZON) < jnp.array([[8], [5], [0]]))
    keys = jax.random.split(jax.random.key(3), given.ROWS)
    wrong = np.square(drawn(keys, 2)[0])  # of answers of nothing but zeros
    for objective, counted in (
        (Diffusion(num_draws=2), wrong[:2].ravel()),
        (Diffusion(num_draws=2, mask_padded_steps=True), np.append(wrong[0], wrong[1, :, :5])),
    ):
        loss, _ = objective.loss(Spy(), batch, objective.norms(batch), keys)
        assert float(loss) == pytest.approx(np.mean(counted), rel=1e-6)


def test_ddpm_draws_fresh_noise_for_each_row_and_step():
    seen = []

    class Watched(GivenNoise):
        def ddpm(self, num_steps):
            class Watch(SamplerCoefficients):
                def walk(self, predict, start, draw, keep=False):
                    seen.extend(draw(index) for index in range(num_steps))
                    return Chain(time=jnp.zeros((len(start), 0)), noisy=start[:, None])

            return Watch(**vars(super().ddpm(num_steps)))

    keys = jax.random.split(jax.random.key(2), given.ROWS)
    start = jnp.zeros((given.ROWS, *CHUNK))
    Diffusion(noise_schedule=Watched()).action_sampler.sample(Spy(), rows().observation, start, keys, 5)
    for index, fresh in enumerate(seen):
        expected = [jax.random.normal(jax.random.fold_in(key, index), CHUNK) for key in keys_for(keys, "denoising")]
        np.testing.assert_array_equal(fresh, jnp.stack(expected))
    assert len(seen) == 5
