"""Resizing with padding, pixel for pixel as openpi's data side does it (PIL, bilinear). Read next: `transforms.py`."""

import numpy as np
from PIL import Image


def resize_with_pad(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale uint8 images [..., H, W, 3] to fit into height x width, centred on black; images that fit cost nothing."""
    if images.shape[-3:-1] == (height, width):
        return images
    if images.dtype != np.uint8 or images.shape[-1] != 3:
        raise ValueError(f"images must be uint8 [..., H, W, 3]; got {images.dtype} {list(images.shape)}")
    ratio = max(images.shape[-2] / width, images.shape[-3] / height)
    inner_height, inner_width = (max(1, int(size / ratio)) for size in images.shape[-3:-1])
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    flat = images.reshape(-1, *images.shape[-3:])
    result = np.zeros((len(flat), height, width, 3), np.uint8)
    for image, out in zip(flat, result, strict=True):
        small = Image.fromarray(image).resize((inner_width, inner_height), Image.Resampling.BILINEAR)
        out[top : top + inner_height, left : left + inner_width] = np.asarray(small)
    return result.reshape(*images.shape[:-3], height, width, 3)
