"""Decoding and encoding of pictures: JPEG by simplejpeg (libjpeg-turbo), everything else by pillow.

Read next: `formats/rlds/rlds_source.py` (reads encoded frames by offset).

JPEG is decoded with libjpeg's accurate integer DCT, as in pillow and OpenCV. TensorFlow's default is the fast DCT,
whose pixels differ by up to 17 of 255 on the Bridge sample (tested in
`tests/data/formats/rlds/test_rlds_tensorflow.py`).
"""

import io
from typing import Literal

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from openpi_train.data.core.findings import Finding
from openpi_train.data.core.source import Source

_JPEG_MAGIC = b"\xff\xd8\xff"


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width of an encoded picture, read from its header alone. Raises ValueError."""
    if data[:3] == _JPEG_MAGIC:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        return int(height), int(width)
    with _opened(data) as picture:
        return picture.height, picture.width


def pixel_mode(data: bytes) -> str:
    """Pillow's mode of an encoded picture, from its header: "RGB", "L" (grey), "I;16" (16 bits). Raises ValueError."""
    if data[:3] == _JPEG_MAGIC:
        return "L" if simplejpeg.decode_jpeg_header(data)[2].lower() == "gray" else "RGB"
    with _opened(data) as picture:
        return picture.mode


def is_deep(mode: str) -> bool:
    """Whether a picture has more than 8 bits per pixel in one channel, as depth has."""
    return mode.startswith(("I", "F"))


def is_grey(mode: str) -> bool:
    """Whether a picture has one channel of at most 8 bits."""
    return mode in ("1", "L", "LA")


def says_depth(camera: str) -> bool:
    """Whether a camera's name says that it is depth, which is only a hint."""
    return "depth" in camera.lower()


def grey_camera(camera: str, where: str) -> Finding:
    """The finding that a camera has pictures of one channel."""
    return Finding(
        kind="grey camera",
        count=1,
        unit="cameras",
        where=where,
        what=f"{camera}, by its first picture",
        training="its channel is red, green and blue",
        remedy="If it is depth, give the robot's cameras without it",
    )


def decode_into(data: bytes, out: np.ndarray) -> None:
    """Decode one picture straight into `out`, uint8 [height, width, 3].

    Gray and palette pictures become RGB; an alpha channel is dropped.
    Raises ValueError if the bytes are damaged or the picture has another size.
    """
    height, width = image_size(data)
    if (height, width) != out.shape[:2]:
        raise ValueError(f"the picture is {height}x{width}, expected {out.shape[0]}x{out.shape[1]}")
    if data[:3] == _JPEG_MAGIC:
        simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=out)
        return
    with _opened(data) as picture:
        if is_deep(picture.mode):
            raise ValueError(f"the picture has pixel mode {picture.mode!r}, not 8 bits per channel")
        try:
            out[...] = np.asarray(picture.convert("RGB"))
        except (OSError, SyntaxError) as error:  # pillow's errors for truncated data and for broken PNG chunks
            raise ValueError(str(error)) from error


def decode(data: bytes) -> np.ndarray:
    """One encoded picture as uint8 [height, width, 3]. Raises ValueError as `decode_into` does."""
    out = np.empty((*image_size(data), 3), np.uint8)
    decode_into(data, out)
    return out


def encode(image: np.ndarray, encoding: Literal["jpeg", "png"] = "jpeg", quality: int = 95) -> bytes:
    """Encode uint8 [height, width, 3] (PNG also [height, width] and [height, width, 1]).

    JPEG keeps the full colour resolution (4:4:4), because subsampling loses much in small pictures of small objects.
    """
    if image.dtype != np.uint8:
        raise ValueError(f"an image of dtype {image.dtype} cannot be encoded; convert it to uint8 in 0..255 first")
    if encoding == "jpeg":
        return simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=quality, colorspace="RGB")
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image).save(buffer, format="PNG")
    return buffer.getvalue()


def blank_cameras(source: Source, samples: int = 8) -> tuple[str, ...]:
    """The cameras whose frames all show one constant colour, judged by a few steps spread over the dataset.

    Flags such as Bridge's `has_image_3` cannot be trusted for this: they are False for real pictures too.
    """
    steps = np.unique(np.linspace(0, source.num_steps - 1, samples).astype(np.int64))
    frames = {camera: source.frames(steps, camera) for camera in source.cameras}
    return tuple(camera for camera, pixels in frames.items() if np.ptp(pixels.reshape(-1, 3), axis=0).max() == 0)


def _opened(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{len(data)} bytes are not a picture that pillow can read ({data[:8]!r}...)") from error
