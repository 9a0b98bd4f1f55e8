"""Resizing with padding, equal to openpi's (PIL, bilinear) in every pixel. Read next: `transforms.py`."""

import numpy as np
from PIL import Image

# Number of values in an image. Larger images are scaled channel by channel, because Pillow copies colour images with
# four bytes per pixel, usually twice.
_LARGE = 1 << 22


def resize_with_pad(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale uint8 images [..., H, W, 3] to fit into height x width, centred on black; no copy if they fit."""
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
        out[top : top + inner_height, left : left + inner_width] = _scaled(image, (inner_width, inner_height))
    return result.reshape(*images.shape[:-3], height, width, 3)


def _scaled(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The image [H, W, 3] scaled to `size` (width, height); both branches give the same values."""
    if image.size <= _LARGE:
        return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    channels = (image[..., channel] for channel in range(3))
    scaled = [Image.fromarray(channel).resize(size, Image.Resampling.BILINEAR) for channel in channels]
    return np.stack([np.asarray(channel) for channel in scaled], axis=-1)
