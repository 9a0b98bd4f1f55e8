"""ResNet-18, the conditional UNet and the transformer against torch's own, number for number."""

import diffusion_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusion_fixtures.fixed_values import parameter, values

from openpi_train.nn.denoising_transformer import DenoisingTransformer
from openpi_train.nn.resnet import ResNet18, expected_places
from openpi_train.nn.unet1d import ConditionalUnet1d

STEPS = jnp.array([0.0, 57.0])
# Sums over thousands of products, in another order than torch's; outputs are of order 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def recorded():
    return diffusion_case.recorded()


def unet(rngs, dims=3, condition=10, widths=(16, 32, 64), step_width=16):
    return ConditionalUnet1d(dims, condition, widths=widths, step_width=step_width, rngs=rngs)


def transformer(rngs, dims=3, condition=5, obs=2, width=16, depth=2, heads=2):
    sizes = {"horizon": 8, "num_obs_steps": obs, "width": width, "depth": depth, "num_heads": heads}
    return DenoisingTransformer(dims, condition, **sizes, rngs=rngs)


@pytest.mark.slow
def test_parameter_counts_are_those_of_torch():
    known = diffusion_case.facts()["parameters"]
    found = {"unet 14": diffusion_case.count(lambda rngs: unet(rngs, 14, 3 * (512 + 14), (256, 512, 1024), 128))}
    found["resnet"] = diffusion_case.count(lambda rngs: ResNet18(rngs=rngs))
    found["transformer"] = diffusion_case.count(lambda rngs: transformer(rngs, 14, 526, 3, 256, 8, 4))
    assert found == {name: known[name] for name in found}


@pytest.mark.slow
def test_resnet_gives_torchs_features(recorded):
    model = diffusion_case.with_torch_parameters(lambda rngs: ResNet18(rngs=rngs), diffusion_case.resnet_name)
    found = jax.jit(lambda images: model(images))(jnp.tanh(values("images", (2, 48, 64, 3))))
    np.testing.assert_allclose(found, recorded["resnet"], **CLOSE)


@pytest.mark.slow
def test_unet_gives_torchs_chunks_and_every_step_hears_of_the_condition(recorded):
    model = diffusion_case.with_torch_parameters(unet, diffusion_case.unet_name)
    run = jax.jit(lambda noisy, condition: model(noisy, STEPS, condition))
    condition = jnp.asarray(values("condition", (2, 10)))
    for horizon in (8, 16):
        noisy = jnp.asarray(values("noisy", (2, horizon, 3)))
        found = run(noisy, condition)
        np.testing.assert_allclose(found, recorded[f"unet {horizon}"], **CLOSE)
        changed = np.abs(run(noisy, condition + 0.1) - found).max(axis=-1)
        assert changed.min() > 1e-4
    with pytest.raises(ValueError, match=r"horizon of 10 steps cannot be halved 2 times; use a multiple of 4"):
        model(jnp.zeros((2, 10, 3)), STEPS, condition)


def test_transformer_gives_torchs_chunks(recorded):
    model = diffusion_case.with_torch_parameters(transformer, diffusion_case.transformer_name)
    noisy, condition = jnp.asarray(values("noisy", (2, 8, 3))), jnp.asarray(values("condition", (2, 2, 5)))
    found = jax.jit(lambda *x: model(*x))(noisy, STEPS, condition)
    np.testing.assert_allclose(found, recorded["transformer"], **CLOSE)


@pytest.mark.slow
def test_spatial_softmax_gives_robomimics_keypoints_and_the_place_of_a_single_pixel(recorded):
    features = 3 * values("features", (2, 3, 5, 16))
    kernel, bias = parameter("nets.weight", (4, 16, 1, 1))[:, :, 0, 0].T, parameter("nets.bias", (4,))
    found = expected_places(jnp.asarray(features @ kernel + bias))
    np.testing.assert_allclose(found, recorded["keypoints"], rtol=1e-5, atol=1e-6)
    one_hot = np.full((1, 3, 5, 1), -1e9, np.float32)
    one_hot[0, 2, 1] = 0.0
    np.testing.assert_array_equal(expected_places(jnp.asarray(one_hot))[0, 0], [-0.5, 1.0])
