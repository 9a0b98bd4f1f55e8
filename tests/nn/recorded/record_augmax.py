"""Records what augmax does to images as openpi calls it: `augmax.npz`, which `tests/nn/test_augment.py` compares with.

    python -m venv augmax && augmax/bin/pip install augmax==0.4.1 jax==0.5.3
    augmax/bin/python tests/nn/recorded/record_augmax.py

augmax 0.4.1 computes what 0.3.4 does, openpi's: they differ in `tree_map`'s name. The transformations and their numbers
are those of openpi's `models/model.py: preprocess_observation` at 15a9616. What a key stands for is drawn a second time
here, as augmax draws it, so that a test can give the same amounts.
"""

import math
from pathlib import Path

import augmax
import jax
import jax.numpy as jnp
import numpy as np

BRIGHTNESS, CONTRAST, HUE, DEGREES = 0.3, 0.4, 0.1, 5.0  # ColorJitter's own default of the hue
HEIGHT, WIDTH, NUM_KEYS, NUM_DRAWS = 24, 32, 8, 1024


def moving(height, width):
    return [
        augmax.RandomCrop(int(width * 0.95), int(height * 0.95)),
        augmax.Resize(width, height),
        augmax.Rotate((-DEGREES, DEGREES)),
    ]


def jitter():
    return augmax.ColorJitter(brightness=BRIGHTNESS, contrast=CONTRAST, saturation=0.5)


def colour_amounts(key):
    """Of brightness, contrast and hue, and whether they are used: `ColorJitter.pixelwise`."""
    first, second, third, _, _ = jax.random.split(key, 5)
    amounts = [
        jax.random.uniform(one, minval=-strength, maxval=strength)
        for one, strength in ((first, BRIGHTNESS), (second, CONTRAST), (third, HUE))
    ]
    return *amounts, jax.random.bernoulli(key, 0.5)


def place_amounts(key):
    """Centre of the crop (rows, columns) and angle: `RandomCrop`, `Rotate`, and the keys of `GeometricChain`."""
    crop, _, rotation = jax.random.split(key, 3)
    room = jnp.array([(HEIGHT - int(HEIGHT * 0.95)) / 2, (WIDTH - int(WIDTH * 0.95)) / 2])
    radians = math.radians(DEGREES)
    return (
        jax.random.uniform(crop, [2], minval=-room, maxval=room),
        jax.random.uniform(rotation, minval=-radians, maxval=radians),
    )


def main():
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (HEIGHT // 4, WIDTH // 4, 3))
    image = np.clip(np.kron(coarse, np.ones((4, 4, 1))) + rng.integers(-20, 21, (HEIGHT, WIDTH, 3)), 0, 255)
    image[0, :6] = [[0, 0, 0], [255, 255, 255], [90, 90, 90], [0, 200, 200], [200, 200, 0], [255, 0, 255]]
    image = image.astype(np.uint8)
    unit = jnp.asarray(image, jnp.float32) / 255

    keys = jax.random.split(jax.random.key(0), NUM_KEYS)
    # One transformation of a chain gets the one key that `split` makes of the chain's; and so does one of its parts.
    inner = jax.vmap(lambda key: jax.random.split(jax.random.split(key, 1)[0], 1)[0])(keys)
    brightness, contrast, hue, changes = jax.vmap(colour_amounts)(inner)
    jittered = jax.vmap(augmax.Chain(jitter()), (0, None))(keys, unit)
    first = jax.vmap(lambda key: jax.random.split(key, 1)[0])(keys)
    shift, angle = jax.vmap(place_amounts)(first)
    moved = jax.vmap(augmax.Chain(*moving(HEIGHT, WIDTH)), (0, None))(keys, unit)

    many = jax.random.split(jax.random.key(1), NUM_DRAWS)
    colours = jnp.array([[[0.6, 0.3, 0.2], [0.2, 0.5, 0.7]]], jnp.float32)
    drawn = jax.vmap(augmax.Chain(jitter()), (0, None))(many, colours)
    np.savez_compressed(
        Path(__file__).with_name("augmax.npz"),
        image=image,
        brightness=brightness, contrast=contrast, hue=hue, changes=changes, jittered=jittered,
        shift=shift, angle=angle, moved=moved,
        colours=colours, drawn=drawn[:, 0].astype(np.float32),
    )  # fmt: skip


if __name__ == "__main__":
    main()
