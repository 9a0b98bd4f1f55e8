"""Image augmentation: a function of image and key alone, the identity at strength zero, and augmax's by value.

`recorded/augmax.npz` is by `record_augmax.py`: images by augmax as openpi calls it, and the amounts that it drew.
"""

import colorsys
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train import registry
from openpi_train.keys import row_keys
from openpi_train.nn.augment import (
    OPENPI,
    ImageAugmentation,
    moved,
    recoloured_in_hsv,
    recoloured_in_rgb,
    sample_bilinear,
)

TORCH = ImageAugmentation(kind="openpi_torch")
KINDS = {"openpi": OPENPI, "openpi_torch": TORCH}
NONE = {"crop_scale": 1.0, "rotation_degrees": 0.0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
NOTHING = dataclasses.replace(TORCH, **NONE)


@pytest.fixture(scope="module")
def images():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 24, 32, 3), np.uint8)
    return {"base_0_rgb": jnp.asarray(pixels), "left_wrist_0_rgb": jnp.asarray(pixels[::-1])}


@pytest.fixture(scope="module", params=KINDS)
def augment(request):
    return jax.jit(KINDS[request.param].augment)


@pytest.fixture(scope="module")
def recorded():
    with np.load(Path(__file__).parent / "recorded" / "augmax.npz") as file:
        return dict(file)


def unit(image):
    """In [0, 1], float64."""
    return np.asarray(image, np.float64) / 2 + 0.5


def signed(image):
    """In [-1, 1], from uint8."""
    return jnp.asarray(np.float32(image) / 255 * 2 - 1)


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


@pytest.mark.parametrize("kind", KINDS)
def test_without_strength_the_image_is_only_converted(images, kind):
    changed = jax.jit(dataclasses.replace(NOTHING, kind=kind).augment)(images, row_keys(0, 0, jnp.arange(4)))
    for slot, image in images.items():
        # The grey value is added and subtracted, or a hue of up to eleven sixths of a turn rounded, in float32.
        np.testing.assert_allclose(changed[slot], np.asarray(image, np.float32) / 255 * 2 - 1, atol=2 * 2.0**-20)


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


def test_colours_are_jittered_as_by_augmax(recorded):
    """Amount by amount: where augmax used them, and the image as it was where not."""
    amounts = [jnp.asarray(recorded[name]) for name in ("brightness", "contrast", "hue")]
    changed = unit(jax.vmap(recoloured_in_hsv, (None, 0, 0, 0))(signed(recorded["image"]), *amounts))
    found = np.where(recorded["changes"][:, None, None, None], changed, recorded["image"] / 255)
    assert 0 < recorded["changes"].sum() < len(found)
    # float32 in two programs: differences of colours, at least 1 / 255 of a hue's sixth, are divided by one another.
    np.testing.assert_allclose(found, recorded["jittered"], rtol=0, atol=255 * 2.0**-24)


def test_images_are_cropped_and_rotated_as_by_augmax(recorded):
    """A crop of whole pixels, 22 of 24 rows and 30 of 32 columns; augmax counts angles the other way round."""
    image = signed(recorded["image"])
    scale = np.array([22 / 24, 30 / 32], np.float32)
    found = jax.vmap(moved, (None, 0, 0, None))(image, -recorded["angle"], recorded["shift"], scale)
    # Places of up to 32 are rounded in two programs; a neighbour differs by up to 1.
    np.testing.assert_allclose(unit(found), recorded["moved"], rtol=0, atol=4 * 32 * 2.0**-24)


@pytest.mark.parametrize(("kind", "crop"), [("openpi", (22, 30)), ("openpi_torch", (22.8, 30.4))])
def test_crops_and_angles_are_drawn_from_their_whole_range(kind, crop):
    """Read off an image that says its own rows and columns: openpi's crops have whole pixels, 95 % rounded down."""
    sides, count = np.array([24, 32]), 512
    places = np.stack([*np.mgrid[0:24, 0:32], np.zeros((24, 32))], axis=-1)
    image = jnp.asarray(places / [23, 31, 1] * 2 - 1, jnp.float32)
    moving = dataclasses.replace(NOTHING, kind=kind, crop_scale=0.95, rotation_degrees=5.0)
    images = {"base_0_rgb": jnp.broadcast_to(image, (count, 24, 32, 3))}
    found = unit(jax.jit(moving.augment)(images, row_keys(0, 0, jnp.arange(count)))["base_0_rgb"])
    rows, columns = found[..., 0] * 23, found[..., 1] * 31
    # One pixel down, from the four pixels in the middle.
    down = np.stack([rows[:, 12, 15] - rows[:, 11, 15], columns[:, 12, 15] - columns[:, 11, 15]], axis=-1)
    down *= sides / crop
    angles = np.rad2deg(np.arctan2(down[:, 1], down[:, 0]))
    np.testing.assert_allclose(np.hypot(*down.T), 1, atol=1e-4)
    assert 4.9 < np.abs(angles).max() < 5.001
    assert abs(angles.mean()) < 4 * (10 / np.sqrt(12)) / np.sqrt(count)
    for axis, values in enumerate((rows, columns)):
        shift = values[:, 11:13, 15:17].mean((1, 2)) - (sides[axis] - 1) / 2
        room = (sides[axis] - crop[axis]) / 2
        assert 0.97 * room < np.abs(shift).max() < room + 1e-3
        assert abs(shift.mean()) < 4 * (2 * room / np.sqrt(12)) / np.sqrt(count)


@pytest.fixture(scope="module")
def drawn(recorded):
    """Two colours as changed by augmax, and by us, in as many draws."""
    rows = len(recorded["drawn"])
    image = jnp.broadcast_to(jnp.asarray(recorded["colours"]) * 2 - 1, (rows, *recorded["colours"].shape))
    ours = jax.jit(OPENPI.augment)({"left_wrist_0_rgb": image}, row_keys(0, 0, jnp.arange(rows)))["left_wrist_0_rgb"]
    return recorded["drawn"], unit(ours)[:, 0]


def test_colours_are_distributed_as_augmaxs(recorded, drawn):
    unchanged = [np.isclose(one, recorded["colours"][0], atol=1e-6).all((1, 2)) for one in drawn]
    count = len(recorded["drawn"])
    # Four deviations of a difference of two shares of one half.
    assert abs(unchanged[0].mean() - unchanged[1].mean()) < 4 * np.sqrt(2 * 0.25 / count)
    for place in range(6):
        a, b = (np.sort(one[~same].reshape(-1, 6)[:, place]) for one, same in zip(drawn, unchanged, strict=True))
        every = np.concatenate([a, b])
        shares = [np.searchsorted(one, every, "right") / len(one) for one in (a, b)]
        # Smirnov's bound for one of a thousand pairs of samples.
        assert np.abs(shares[0] - shares[1]).max() < 1.95 * np.sqrt(1 / len(a) + 1 / len(b)), place


def test_saturations_stay_and_hues_turn_by_up_to_a_tenth(recorded, drawn):
    """By the standard library's HSV. Over all draws a hue turns by a quarter of the strength on average: 9 degrees."""
    for changed in drawn:
        pairs = [(old, new) for row in changed for old, new in zip(recorded["colours"][0], row, strict=True)]
        hues, saturations = np.transpose(
            [np.subtract(colorsys.rgb_to_hsv(*new)[:2], colorsys.rgb_to_hsv(*old)[:2]) for old, new in pairs]
        )
        turns = np.abs((hues + 0.5) % 1 - 0.5)
        assert np.abs(saturations).max() < 1e-5
        assert 0.09 < turns.max() < 0.1 + 1e-5
        # Uniform in 0 to .1 for one half, else 0: its deviation is .032, and each draw is of both colours.
        assert abs(turns.mean() - 0.025) < 4 * 0.032 / np.sqrt(len(changed))


def test_brightness_contrast_and_saturation_are_applied_one_after_the_other_in_rgb():
    """In the way of openpi's PyTorch port, step by step, with luma for grey; without colours that would be clipped."""
    luma = np.array([0.299, 0.587, 0.114])
    image = np.random.default_rng(3).uniform(0.3, 0.6, (5, 7, 3))
    for brightness, contrast, saturation in ((1.2, 1, 1), (1, 1.3, 1), (1, 1, 0.6), (0.8, 1.3, 1.4), (1.2, 0.7, 0.5)):
        want = image * brightness
        mean = (want @ luma).mean()
        want = (want - mean) * contrast + mean
        grey = (want @ luma)[..., None]
        want = (want - grey) * saturation + grey
        assert 0 < want.min() < want.max() < 1
        amounts = map(jnp.float32, (brightness, contrast, saturation))
        found = unit(recoloured_in_rgb(jnp.asarray(image * 2 - 1, jnp.float32), *amounts))
        np.testing.assert_allclose(found, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("kind", "strength"), [("openpi", "hue"), ("openpi_torch", "saturation")])
def test_every_strength_acts_alone(kind, strength):
    """A pixel's brightness, contrast or third amount, by which kind has it; the other kind's does nothing."""
    image = {"left_wrist_0_rgb": jnp.asarray(np.random.default_rng(1).uniform(-0.5, 0.5, (1, 6, 6, 3)), jnp.float32)}
    keys = row_keys(0, 0, jnp.arange(1))
    nothing = dataclasses.replace(NOTHING, kind=kind, jittered_share=1.0)
    plain = nothing.augment(image, keys)["left_wrist_0_rgb"]
    for name in ("brightness", "contrast", "saturation", "hue"):
        changed = dataclasses.replace(nothing, **{name: 0.1}).augment(image, keys)["left_wrist_0_rgb"]
        acts = name in ("brightness", "contrast", strength)
        assert (float(jnp.abs(changed - plain).max()) > 1e-3) == acts, name


def test_openpis_experiments_are_augmented_as_its_weights_were_trained():
    """Also all others that do not choose for themselves. Runs of before there was a choice read back what they had."""
    for name in ("pi0_libero_low_mem_finetune", "pi05_bridge", "pi0_fast_bridge"):
        objective = registry.load(name).objective
        assert objective.used_augmentation == OPENPI, name
    assert ImageAugmentation().kind == "openpi_torch"


@pytest.mark.slow
def test_sampling_at_whole_places_copies_and_between_them_averages():
    image = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (5, 6, 3)), jnp.float32)
    rows, columns = jnp.meshgrid(jnp.arange(5.0), jnp.arange(6.0), indexing="ij")
    np.testing.assert_array_equal(sample_bilinear(image, rows, columns), image)
    between = sample_bilinear(image, jnp.full((1, 1), 1.5), jnp.full((1, 1), 2.5))
    np.testing.assert_allclose(between[0, 0], image[1:3, 2:4].mean((0, 1)), atol=1e-6)
    outside = sample_bilinear(image, jnp.array([[-1.0, 99.0]]), jnp.array([[2.0, -50.0]]))
    np.testing.assert_array_equal(outside, -jnp.ones((1, 2, 3)))
