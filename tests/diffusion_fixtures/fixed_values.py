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
