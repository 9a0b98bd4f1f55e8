"""What each objective lets its model see in training, in the held-out loss and in sampling: numbers told in advance.

The model's only answer is the mean of the image that it is shown. Training shows the right half of it (0.75),
evaluation the left half (0.25), and without augmentation there is the whole (0.5).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.nn.augment import Augmentation
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.insulated_flow import InsulatedFlow
from openpi_train.objectives.next_token import NextToken
from openpi_train.sampling.flow import FlowSampler
from openpi_train.sampling.noise_schedule import NoiseSchedule
from openpi_train.sampling.real_time_chunking import Guide
from openpi_train.types import ActionBatch, Observation

B, H, A, T = 2, 3, 2, 4
RIGHT, LEFT, WHOLE = 0.75, 0.25, 0.5
KEYS = jax.random.split(jax.random.key(0), B)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves(Augmentation):
    """Training sees the right half, evaluation the left one."""

    def augment(self, images, keys):
        return {slot: image[..., 4:, :] for slot, image in images.items()}

    def fixed(self, images):
        return {slot: image[..., :4, :] for slot, image in images.items()}


class Grey(nnx.Module):
    """A policy of every kind that says the mean of what it sees."""

    def seen(self, observation):
        return observation.images["base_0_rgb"].mean((1, 2, 3))  # b

    def velocity(self, seen, noisy, time):
        seen = self.seen(seen) if isinstance(seen, Observation) else seen
        return jnp.broadcast_to(seen[:, None, None, None], noisy.shape)

    def token_log_probs(self, observation):
        seen = jnp.broadcast_to(self.seen(observation)[:, None], (B, T - 1))
        return -seen, seen > 0

    def velocity_and_log_probs(self, observation, noisy, time):
        return self.velocity(observation, noisy, time), *self.token_log_probs(observation)

    def context(self, observation):
        return self.seen(observation)

    def denoise(self, seen, noisy, step):
        return jnp.broadcast_to(seen[:, None, None, None], noisy.shape)

    def sample_actions(self, observation, noise, num_steps):
        return jnp.broadcast_to(self.seen(observation)[:, None, None], noise.shape)


def batch():
    columns = jnp.repeat(jnp.array([LEFT, RIGHT]), 4)
    image = jnp.broadcast_to(columns[None, None, :, None], (B, 8, 8, 3))
    seen = Observation(
        images={"base_0_rgb": image},
        image_masks={"base_0_rgb": jnp.ones(B, bool)},
        state=jnp.zeros((B, A)),
        prompt_tokens=jnp.zeros((B, T), jnp.int32),
        prompt_mask=jnp.ones((B, T), bool),
        token_ar_mask=jnp.ones((B, T), bool),
        token_loss_mask=jnp.ones((B, T), bool),
    )
    return ActionBatch(
        observation=seen,
        actions=jnp.asarray(np.random.default_rng(0).normal(size=(B, H, A)), jnp.float32),
        action_mask=jnp.ones((B, H), bool),
        dim_mask=jnp.ones((B, A), bool),
        row=jnp.arange(B),
    )


def of_flow(objective, seen):
    noise, _ = objective.draw(batch(), KEYS)
    wanted = np.asarray(noise, np.float64) - np.asarray(batch().actions)[:, None]
    return np.mean((seen - wanted) ** 2)


FLOW = FlowMatching(augmentation=Halves())
CLEAN = NoiseSchedule(num_train_timesteps=4, prediction_type="sample")
# Each objective with its loss where the model has seen a grey.
CASES = {
    "flow": (FLOW, lambda seen: of_flow(FLOW, seen)),
    "tokens": (NextToken(augmentation=Halves()), lambda seen: seen),
    "insulated": (
        InsulatedFlow(flow=FLOW, flow_weight=2.0, token_weight=0.5),
        lambda seen: 2 * of_flow(FLOW, seen) + seen / 2,
    ),
    "diffusion": (
        Diffusion(augmentation=Halves(), noise_schedule=CLEAN),
        lambda seen: np.mean((seen - np.asarray(batch().actions)) ** 2),
    ),
}


def loss_of(objective, train):
    rows = batch()
    return float(objective.loss(Grey(), rows, objective.norms(rows), KEYS, train=train)[0])


def sampled(objective):
    noise = jnp.zeros((B, H, A))
    found = np.asarray(objective.action_sampler.sample(Grey(), batch().observation, noise, KEYS, 2))
    # A flow: two Euler steps of a constant velocity from time 1 to 0.
    return -found if isinstance(objective.action_sampler, FlowSampler) else found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_sees_augmented_images_and_evaluation_their_fixed_form(name):
    objective, expected = CASES[name]
    assert loss_of(objective, train=True) == pytest.approx(expected(RIGHT), rel=1e-6)
    assert loss_of(objective, train=False) == pytest.approx(expected(LEFT), rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_sampling_sees_what_evaluation_sees(name):
    np.testing.assert_allclose(sampled(CASES[name][0]), np.full((B, H, A), LEFT), rtol=1e-6)


@pytest.mark.parametrize("name", ["flow", "insulated"])
def test_guided_sampling_sees_what_evaluation_sees(name):
    noise, nothing = jnp.zeros((B, H, A)), jnp.zeros((B, H, A))
    guide = Guide(target=nothing, weights=nothing)
    sampler = dataclasses.replace(CASES[name][0].action_sampler, guide=guide)
    found = sampler.sample(Grey(), batch().observation, noise, KEYS, 2)
    np.testing.assert_allclose(found, np.full((B, H, A), -LEFT), rtol=1e-6)


@pytest.mark.parametrize("name", ["flow", "tokens", "insulated"])
def test_without_augmentation_all_see_the_whole_image(name):
    objective, expected = CASES[name]
    if name == "insulated":
        objective = dataclasses.replace(objective, flow=dataclasses.replace(FLOW, augment=False))
    else:
        objective = dataclasses.replace(objective, augment=False)
    assert loss_of(objective, train=True) == loss_of(objective, train=False)
    assert loss_of(objective, train=False) == pytest.approx(expected(WHOLE), rel=1e-6)
    np.testing.assert_allclose(sampled(objective), np.full((B, H, A), WHOLE), rtol=1e-6)
