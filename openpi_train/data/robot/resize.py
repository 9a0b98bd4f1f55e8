"""Resizing with padding: equal to openpi's (PIL, bilinear) in every pixel, or to LeRobot's for SmolVLA.

Read next: `transforms.py`.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image

# Number of values in an image. Larger images are scaled channel by channel, because Pillow copies colour images with
# four bytes per pixel, usually twice.
_LARGE = 1 << 22


def resize_with_pad(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale uint8 images [..., H, W, 3] to fit into height x width, centred on black; no copy if they fit."""
    return _placed(images, height, width, _scaled, lambda room: room // 2)


def resize_into_corner(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale uint8 images [..., H, W, 3] to fit into height x width, at the bottom right on black; no copy if they fit.

    As LeRobot's `resize_with_pad` (`policies/common/vla_utils.py` of lerobot 0.6.1) but for rounding to bytes.
    """
    return _placed(images, height, width, _interpolated, lambda room: room)


def _placed(
    images: np.ndarray,
    height: int,
    width: int,
    scale: Callable[[np.ndarray, tuple[int, int]], np.ndarray],
    margin: Callable[[int], int],
) -> np.ndarray:
    """The images as `scale` scales them, on black; `margin` is how much of the free room is above and to the left."""
    if images.shape[-3:-1] == (height, width):
        return images
    if images.dtype != np.uint8 or images.shape[-1] != 3:
        raise ValueError(f"images must be uint8 [..., H, W, 3]; got {images.dtype} {list(images.shape)}")
    ratio = max(images.shape[-2] / width, images.shape[-3] / height)
    inner_height, inner_width = (max(1, int(size / ratio)) for size in images.shape[-3:-1])
    top, left = margin(height - inner_height), margin(width - inner_width)
    flat = images.reshape(-1, *images.shape[-3:])
    result = np.zeros((len(flat), height, width, 3), np.uint8)
    for image, out in zip(flat, result, strict=True):
        out[top : top + inner_height, left : left + inner_width] = scale(image, (inner_width, inner_height))
    return result.reshape(*images.shape[:-3], height, width, 3)


def _scaled(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The image [H, W, 3] scaled to `size` (width, height); both branches give the same values."""
    if image.size <= _LARGE:
        return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    channels = (image[..., channel] for channel in range(3))
    scaled = [Image.fromarray(channel).resize(size, Image.Resampling.BILINEAR) for channel in channels]
    return np.stack([np.asarray(channel) for channel in scaled], axis=-1)


def _interpolated(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The image [H, W, 3] scaled to `size` (width, height): each pixel from its four nearest, also in a smaller image.

    torch's `interpolate(mode="bilinear", align_corners=False)`, rounded.
    """
    values = image.astype(np.float32)
    for axis, wanted in ((0, size[1]), (1, size[0])):
        given = image.shape[axis]
        place = np.clip((np.arange(wanted) + 0.5) * (given / wanted) - 0.5, 0, given - 1)
        before = np.floor(place).astype(np.intp)
        share = (place - before).astype(np.float32).reshape([-1 if dim == axis else 1 for dim in range(3)])
        first = np.take(values, before, axis)
        values = first + share * (np.take(values, np.minimum(before + 1, given - 1), axis) - first)
    return np.rint(values).astype(np.uint8)
