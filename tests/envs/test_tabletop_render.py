"""What the cameras show: things where a pinhole camera puts them, in their colours, large enough to tell apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.envs import tabletop_env, tabletop_render
from openpi_train.envs import tabletop_scene as world
from openpi_train.envs.tabletop_env import TabletopEnv

ENV = TabletopEnv()
ROWS = 32


@pytest.fixture(scope="module")
def scenes():
    keys = jax.random.split(jax.random.key(5), ROWS)
    scenes = ENV.reset(keys, jnp.arange(ROWS) % len(ENV.tasks))
    # The gripper out of the way, high behind the table's far corner.
    return dataclasses.replace(scenes, tip=jnp.tile(jnp.asarray([[0.24, 0.24, 0.22]]), (ROWS, 1)))


@pytest.fixture(scope="module")
def pictures(scenes):
    return {name: np.asarray(picture) for name, picture in ENV.observe(scenes).images.items()}


def pixel(point, size=64):
    """Row and column of a point in the base camera's picture, by the pinhole formula."""
    eye, target = np.array(tabletop_render.BASE_EYE), np.array(tabletop_render.BASE_TARGET)
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, [0, 0, 1.0])
    right /= np.linalg.norm(right)
    above = np.cross(right, forward)
    offset = np.asarray(point, float) - eye
    across, up = (offset @ right / (offset @ forward), offset @ above / (offset @ forward))
    scale = size / 2 / tabletop_render.BASE_TANGENT
    return int(size / 2 - up * scale), int(size / 2 + across * scale)


@pytest.mark.slow
def test_every_block_shows_its_colour_where_a_pinhole_camera_puts_it(scenes, pictures):
    for row in range(ROWS):
        for block, colour in zip(np.asarray(scenes.blocks[row]), np.asarray(scenes.colours[row]), strict=True):
            shown = pictures["image_0"][row][pixel([*block[:2], world.BLOCK_HEIGHT_M])]
            assert tuple(shown) == world.COLOUR_RGB[colour]


def test_every_block_is_at_least_six_pixels_wide_and_tall(scenes, pictures):
    for row in range(ROWS):
        hue = np.argmin(
            np.abs(
                pictures["image_0"][row][:, :, None].astype(int)
                - np.concatenate([world.COLOUR_RGB, tabletop_render.PALETTE])[None, None]
            ).sum(-1),
            axis=-1,
        )
        for block, colour in zip(np.asarray(scenes.blocks[row]), np.asarray(scenes.colours[row]), strict=True):
            centre = pixel([*block[:2], world.BLOCK_HEIGHT_M])
            patch = hue[max(centre[0] - 8, 0) : centre[0] + 12, max(centre[1] - 8, 0) : centre[1] + 9] == colour
            assert patch.any(0).sum() >= 6
            assert patch.any(1).sum() >= 6


def finger_tips(picture):
    """Where the fingers' ends show: nothing else is as dark in every channel."""
    return np.asarray(picture).max(-1) <= max(tabletop_render.PALETTE[tabletop_render.TIPS])


def test_left_on_the_table_is_left_in_the_picture():
    assert pixel([-0.1, 0, 0])[1] < pixel([0.1, 0, 0])[1]
    assert pixel([0, 0.1, 0])[0] < pixel([0, -0.1, 0])[0]


def test_bowl_and_plate_show_in_their_colours(scenes, pictures):
    palette = tabletop_render.PALETTE
    seen = {tabletop_render.BOWL: 0, tabletop_render.PLATE: 0}
    for row in range(ROWS):
        for item, place in ((tabletop_render.BOWL, scenes.bowl), (tabletop_render.PLATE, scenes.plate)):
            shown = tuple(pictures["image_0"][row][pixel([*np.asarray(place[row]), 0.0])])
            seen[item] += shown == palette[item]
    # A block in front may hide the middle of either now and then.
    assert min(seen.values()) >= 0.8 * ROWS


def test_the_wrist_camera_turns_with_the_gripper(scenes):
    low = dataclasses.replace(scenes, tip=jnp.zeros((ROWS, 3)).at[:, 2].set(0.15), turn=jnp.zeros((ROWS, 3)))
    turned = dataclasses.replace(low, turn=low.turn.at[:, 2].set(0.5))
    before, after = ENV.observe(low).images["image_1"], ENV.observe(turned).images["image_1"]
    changed = (np.asarray(before) != np.asarray(after)).any(-1).mean((1, 2))
    assert changed.min() > 0.03
    # The fingers turn with it: the dark tips stay where they are.
    assert np.array_equal(finger_tips(before), finger_tips(after))
    assert finger_tips(before).any((1, 2)).all()


@pytest.mark.slow
def test_height_shows_the_gripper_rises_in_the_picture_above_its_shadow(scenes):
    heights = jnp.asarray([0.02, 0.2])
    raised = jax.tree.map(lambda leaf: leaf[:2], scenes)
    raised = dataclasses.replace(raised, tip=jnp.zeros((2, 3)).at[:, 2].set(heights), blocks=raised.starts + 0.1)
    low, high = np.asarray(ENV.observe(raised).images["image_0"])
    lowest_row = [np.flatnonzero(finger_tips(one).any(1)).max() for one in (low, high)]
    assert lowest_row[1] < lowest_row[0] - 6


@pytest.mark.slow
def test_the_batch_equals_the_loop(scenes, pictures):
    """One pixel in a thousand may fall on the other side of an edge, by the rounding of other instruction orders."""
    draw = jax.jit(tabletop_env.render, static_argnames=("camera", "size"))
    for name in ENV.cameras:
        for row in range(3):
            alone = np.asarray(draw(jax.tree.map(lambda leaf, row=row: leaf[row], scenes), camera=name, size=64))
            assert (alone != pictures[name][row]).any(-1).mean() <= 1e-3


@pytest.mark.slow
def test_larger_pictures_show_the_same_scene(scenes, pictures):
    large = np.asarray(TabletopEnv(image_size=128).observe(scenes).images["image_0"])
    assert large.shape == (ROWS, 128, 128, 3)
    shrunk = large.reshape(ROWS, 64, 2, 64, 2, 3).mean((2, 4))
    assert np.abs(shrunk - pictures["image_0"]).mean() < 6


def test_an_unknown_camera_is_an_error(scenes):
    with pytest.raises(ValueError, match="no camera 'image_2'; cameras are image_0, image_1"):
        tabletop_env.render(jax.tree.map(lambda leaf: leaf[0], scenes), "image_2")
