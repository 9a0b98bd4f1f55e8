"""Parameters and inputs that torch's networks and ours are given alike: each a function of its name and shape."""

import zlib

import numpy as np


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers, float32."""
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Of a size that keeps activations near 1; `name` is torch's."""
    found = values(name, shape)
    if len(shape) > 1:
        return found / np.float32(np.sqrt(np.prod(shape[1:])))
    return np.float32(name.endswith("weight")) + np.float32(0.1) * found


def model_output(x, step):
    """What stands for a network in sampler tests."""
    return 0.6 * x + 0.3 * x**3 / (1 + x**2) + 0.01 * (step % 7)


# What a whole policy is asked: two cameras of 19 x 23 pixels, cropped to 16 x 16, and a state of which one dim rests.
ROWS, HISTORY, HORIZON, EXECUTED, DRAWS = 3, 2, 8, 4, 2
CAMERAS, IMAGE, CROP = ("front", "wrist"), (19, 23), (16, 16)
ACTION_DIM, STATE_DIM = 3, 3
# Diffusion steps of each draw and row; the first and the last are among them.
STEPS = np.array([[0, 99, 57], [31, 1, 98]])
# Upper left corners of training's crops: camera, row, (y, x).
CORNERS = np.array([[[0, 5], [2, 0], [1, 6]], [[1, 3], [0, 0], [2, 2]]])


def seen() -> dict[str, np.ndarray]:
    """Images uint8 [rows, history, height, width, 3] by camera, and `state`, `actions` in a robot's units."""
    pixels = {name: 127 + 60 * values(name, (ROWS, HISTORY, *IMAGE, 3)) for name in CAMERAS}
    images = {name: np.clip(image, 0, 255).astype(np.uint8) for name, image in pixels.items()}
    return images | {"state": told("state", (ROWS, HISTORY)), "actions": told("actions", (ROWS, HORIZON))}


def told(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of a robot, float64: of another range in each dim, the last of the state's at rest."""
    dims = {"state": STATE_DIM, "actions": ACTION_DIM}[name]
    found = 0.5 * values(f"{name} {shape}", (*shape, dims)).astype(np.float64) * (1 + np.arange(dims)) + np.arange(dims)
    if name == "state":
        found[..., -1] = 7.0
    return found
