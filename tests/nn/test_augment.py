"""Image augmentation: a function of image and key alone, the identity at strength zero."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.keys import row_keys
from openpi_train.nn.augment import ImageAugmentation, sample_bilinear

NOTHING = ImageAugmentation(crop_scale=1.0, rotation_degrees=0.0, brightness=0.0, contrast=0.0, saturation=0.0)


@pytest.fixture(scope="module")
def images():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 24, 32, 3), np.uint8)
    return {"base_0_rgb": jnp.asarray(pixels), "left_wrist_0_rgb": jnp.asarray(pixels[::-1])}


@pytest.fixture(scope="module")
def augment():
    return jax.jit(ImageAugmentation().augment)


def test_permuting_rows_permutes_the_result(images, augment):
    keys = row_keys(0, 3, jnp.arange(4))
    order = jnp.array([2, 0, 3, 1])
    plain = augment(images, keys)
    permuted = augment(jax.tree.map(lambda image: image[order], images), keys[order])
    for slot in images:
        np.testing.assert_array_equal(permuted[slot], plain[slot][order])


def test_a_row_alone_is_changed_as_in_a_batch(images, augment):
    keys = row_keys(0, 3, jnp.arange(4))
    whole = augment(images, keys)
    alone = augment(jax.tree.map(lambda image: image[1:2], images), keys[1:2])
    for slot in images:
        # Two programs: the angle's sine and cosine may differ in their last bit, and with them the places from which
        # pixels are read, up to 32 in rows and in columns, between neighbours that differ by up to 2.
        np.testing.assert_allclose(alone[slot][0], whole[slot][1], rtol=0, atol=2 * 2 * 32 * 2.0**-24)


def test_rows_steps_and_cameras_draw_differently(images, augment):
    same = {slot: jnp.broadcast_to(images["base_0_rgb"][:1], (4, 24, 32, 3)) for slot in ("base_0_rgb", "base_1_rgb")}
    first, second = augment(same, row_keys(0, 0, jnp.arange(4))), augment(same, row_keys(0, 1, jnp.arange(4)))
    assert not np.allclose(first["base_0_rgb"][0], first["base_0_rgb"][1])
    assert not np.allclose(first["base_0_rgb"], first["base_1_rgb"])
    assert not np.allclose(first["base_0_rgb"], second["base_0_rgb"])


def test_without_strength_the_image_is_only_converted(images):
    changed = jax.jit(NOTHING.augment)(images, row_keys(0, 0, jnp.arange(4)))
    for slot, image in images.items():
        # Two additions and a subtraction of the grey value round in float32.
        np.testing.assert_allclose(changed[slot], np.asarray(image, np.float32) / 255 * 2 - 1, atol=1e-6)


def test_uint8_and_float_images_give_the_same(images, augment):
    keys = row_keys(0, 0, jnp.arange(4))
    floats = jax.tree.map(lambda image: image.astype(jnp.float32) / 255 * 2 - 1, images)
    for slot, changed in augment(images, keys).items():
        np.testing.assert_allclose(augment(floats, keys)[slot], changed, atol=1e-6)


def test_wrist_cameras_are_not_moved(images):
    moving = dataclasses.replace(NOTHING, crop_scale=0.9, rotation_degrees=5.0)
    changed = jax.jit(moving.augment)(images, row_keys(0, 0, jnp.arange(4)))
    plain = jax.tree.map(lambda image: np.asarray(image, np.float32) / 255 * 2 - 1, images)
    np.testing.assert_allclose(changed["left_wrist_0_rgb"], plain["left_wrist_0_rgb"], atol=1e-6)
    assert not np.allclose(changed["base_0_rgb"], plain["base_0_rgb"], atol=0.1)


@pytest.mark.slow
def test_brightness_alone_scales_the_unit_range():
    grey = {"base_0_rgb": jnp.full((64, 4, 4, 3), 0.0, jnp.float32)}  # 0.5 in [0, 1]
    bright = dataclasses.replace(NOTHING, brightness=0.3)
    values = (np.asarray(bright.augment(grey, row_keys(0, 0, jnp.arange(64)))["base_0_rgb"]) + 1) / 2
    factors = values[:, 0, 0, 0] / 0.5
    np.testing.assert_allclose(values, values[:, :1, :1, :1] + np.zeros_like(values), atol=1e-6)
    assert 0.7 <= factors.min() < 0.85
    assert 1.15 < factors.max() <= 1.3


@pytest.mark.slow
def test_sampling_at_whole_places_copies_and_between_them_averages():
    image = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (5, 6, 3)), jnp.float32)
    rows, columns = jnp.meshgrid(jnp.arange(5.0), jnp.arange(6.0), indexing="ij")
    np.testing.assert_array_equal(sample_bilinear(image, rows, columns), image)
    between = sample_bilinear(image, jnp.full((1, 1), 1.5), jnp.full((1, 1), 2.5))
    np.testing.assert_allclose(between[0, 0], image[1:3, 2:4].mean((0, 1)), atol=1e-6)
    outside = sample_bilinear(image, jnp.array([[-1.0, 99.0]]), jnp.array([[2.0, -50.0]]))
    np.testing.assert_array_equal(outside, -jnp.ones((1, 2, 3)))
