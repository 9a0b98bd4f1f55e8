"""Random augmentation of training images on the device, with keys per row.

The transformations and their strengths are openpi's (`models/model.py` at 15a9616: augmax's RandomCrop, Resize, Rotate
and ColorJitter; `models_pytorch/preprocessing_pytorch.py`). Ours are drawn per row and camera; openpi's wrist cameras
of a row share their jitter, and its PyTorch port draws once per batch.

Read next: `objectives/flow_matching.py`, which calls it in the training step.
"""

import abc
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt8

from openpi_train.keys import for_purpose
from openpi_train.nn.siglip import float_images
from openpi_train.types import Observation

Images = dict[str, UInt8[Array, "b *o _ _ 3"] | Float[Array, "b *o _ _ 3"]]
# Rec. 601 luma: the perceived brightness of a colour.
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation(abc.ABC):
    """Random changes to the images of each row in training, and the fixed form for evaluation and serving."""

    def __call__(self, observation: Observation, keys: Key[Array, " b"] | None) -> Observation:
        """The observation with augmented images; with `keys` None, in the form for evaluation."""
        images = self.fixed(observation.images) if keys is None else self.augment(observation.images, keys)
        return dataclasses.replace(observation, images=images)

    @abc.abstractmethod
    def augment(self, images: Images, keys: Key[Array, " b"]) -> Images:
        """The augmented images by slot. `keys` holds one key per row."""

    def fixed(self, images: Images) -> Images:
        """The images by slot that evaluation sees (default: the same)."""
        return images


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomCrop(Augmentation):
    """A crop of fixed size, the same for all steps of a row's history: random in training, centred otherwise.

    A call with smaller images raises ValueError.
    """

    # Height and width of the crop in pixels.
    height: int
    width: int

    @jax.named_scope("augment")
    def augment(self, images: Images, keys: Key[Array, " b"]) -> Images:
        """Crop each camera of each row at its own random position."""
        result = {}
        for slot, image in images.items():
            rows, columns = self._room(slot, image)

            def crop(one: Array, key: Array, rows: int = rows, columns: int = columns) -> Array:
                top, left = jax.random.randint(key, (2,), 0, jnp.array([rows + 1, columns + 1]))
                starts = [0] * (one.ndim - 3) + [top, left, 0]
                return jax.lax.dynamic_slice(one, starts, (*one.shape[:-3], self.height, self.width, 3))

            result[slot] = jax.vmap(crop)(image, for_purpose(keys, f"augment/{slot}"))
        return result

    def fixed(self, images: Images) -> Images:
        result = {}
        for slot, image in images.items():
            # Rounds halves to even, like torchvision's center_crop, which diffusion_policy uses.
            top, left = (round(room / 2) for room in self._room(slot, image))
            result[slot] = image[..., top : top + self.height, left : left + self.width, :]
        return result

    def _room(self, slot: str, image: Array) -> tuple[int, int]:
        """The pixels by which the images of a camera exceed the crop in height and width."""
        rows, columns = image.shape[-3] - self.height, image.shape[-2] - self.width
        if rows < 0 or columns < 0:
            raise ValueError(
                f"{slot}: images of {image.shape[-3]} x {image.shape[-2]} pixels are smaller than the crop of "
                f"{self.height} x {self.width}: lower --objective.augmentation.height and .width"
            )
        return rows, columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoAugmentation(Augmentation):
    """No changes to images."""

    def augment(self, images: Images, keys: Key[Array, " b"]) -> Images:
        del keys
        return images


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageAugmentation(Augmentation):
    """Random crop, rotation and colour jitter of a given strength, in one of openpi's two kinds.

    `crop_scale` and `rotation_degrees` apply to all cameras but wrist cameras (slots with "wrist" in their name), whose
    view is fixed to the gripper.

    openpi is what openpi's published weights were trained with: augmax 0.3.4, whose colour jitter changes a share of
    the images in HSV. It leaves the saturation as it is: augmax computes the changed one, and does not use it.
    openpi_torch is as openpi's PyTorch port: brightness, contrast and saturation of every image are multiplied by
    factors drawn from [1 - strength, 1 + strength]; grey is luma here, and the mean of the colours there. `hue` and
    `jittered_share` belong to the former, `saturation` to the latter.
    """

    # openpi: as its JAX trainer; openpi_torch: as its PyTorch port.
    kind: Literal["openpi", "openpi_torch"] = "openpi_torch"  # what runs had before there was a choice
    # Side of the random crop, as a share of the image's; it is scaled back up. openpi's has whole pixels, rounded down.
    crop_scale: float = 0.95
    # Rotation about the centre, drawn from [-rotation_degrees, rotation_degrees].
    rotation_degrees: float = 5.0
    # Strength of the brightness jitter.
    brightness: float = 0.3
    # Strength of the contrast jitter.
    contrast: float = 0.4
    # Strength of the saturation jitter, of openpi_torch.
    saturation: float = 0.5
    # Strength of the hue jitter, in turns of the colour circle, of openpi.
    hue: float = 0.1
    # Share of the images whose colours are changed, of openpi.
    jittered_share: float = 0.5

    @jax.named_scope("augment")
    def augment(self, images: Images, keys: Key[Array, " b"]) -> Images:
        """The changed images by slot, float32 in [-1, 1]. `keys` holds one key per row."""
        result = {}
        for slot, image in images.items():
            row_keys = for_purpose(keys, f"augment/{slot}")
            moves = "wrist" not in slot and (self.crop_scale < 1.0 or self.rotation_degrees > 0.0)
            result[slot] = jax.vmap(lambda one, key, moves=moves: self._one(one, key, moves))(
                float_images(image), row_keys
            )
        return result

    def _one(
        self, image: Float[Array, "height width 3"], key: Key[Array, ""], moves: bool
    ) -> Float[Array, "height width 3"]:
        uniform = jax.random.uniform(key, (7 if self.kind == "openpi" else 6,), jnp.float32, -1.0, 1.0)
        if moves:
            sides = np.array(image.shape[:2], np.float32)
            crop = self.crop_scale * sides
            crop = np.floor(crop) if self.kind == "openpi" else crop
            angle = uniform[0] * np.float32(np.deg2rad(self.rotation_degrees))
            image = moved(image, angle, uniform[1:3] * (sides - crop) / 2, crop / sides)
        brightness, contrast = uniform[3] * self.brightness, uniform[4] * self.contrast
        if self.kind == "openpi_torch":
            return recoloured_in_rgb(image, 1.0 + brightness, 1.0 + contrast, 1.0 + uniform[5] * self.saturation)
        jittered = recoloured_in_hsv(image, brightness, contrast, uniform[5] * self.hue)
        return jnp.where(uniform[6] < 2.0 * self.jittered_share - 1.0, jittered, image)


# openpi's experiments'.
OPENPI = ImageAugmentation(kind="openpi")


def moved(
    image: Float[Array, "height width 3"],
    angle: Float[Array, ""],
    shift: Float[Array, "2"],
    scale: Float[np.ndarray, "2"],
) -> Float[Array, "height width 3"]:
    """A crop of this share of the rows and columns, scaled back to the image's size, then rotated; sampled once.

    Args: `shift` is how far the crop's centre lies below and right of the image's, in pixels; `angle` in radians.
    """
    height, width, _ = image.shape
    y = jnp.arange(height, dtype=jnp.float32)[:, None] - (height - 1) / 2
    x = jnp.arange(width, dtype=jnp.float32)[None, :] - (width - 1) / 2
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    rows = scale[0] * (cosine * y - sine * x) + (height - 1) / 2 + shift[0]
    columns = scale[1] * (sine * y + cosine * x) + (width - 1) / 2 + shift[1]
    return sample_bilinear(image, rows, columns)


def recoloured_in_rgb(
    image: Float[Array, "height width 3"],
    brightness: Float[Array, ""],
    contrast: Float[Array, ""],
    saturation: Float[Array, ""],
) -> Float[Array, "height width 3"]:
    """Factors of brightness, then of contrast about the mean grey, then of saturation about each pixel's grey."""
    mean = 0.5 * (jnp.mean(image, axis=(0, 1)) @ _LUMA + 1.0)  # of the [0, 1] image
    # All three are affine in the pixel: value -> gain * value + offset, and grey likewise.
    gain, offset = brightness * contrast, (1.0 - contrast) * brightness * mean
    # The same in [-1, 1], where value = (image + 1) / 2.
    bright = gain * image + (gain + 2.0 * offset - 1.0)
    grey = jnp.sum(bright * _LUMA, axis=-1, keepdims=True)
    return jnp.clip(grey + saturation * (bright - grey), -1.0, 1.0)


def recoloured_in_hsv(
    image: Float[Array, "height width 3"],
    brightness: Float[Array, ""],
    contrast: Float[Array, ""],
    hue: Float[Array, ""],
) -> Float[Array, "height width 3"]:
    """augmax's ColorJitter: changes of a pixel's value (its largest colour) and hue; its saturation stays.

    Args: `brightness` in [-1, 1]: towards black below 0, towards white above. `contrast` in (-1, 1): the slope at one
    half is tan((contrast + 1) pi / 4), and its inverse at both ends. `hue` in turns.
    """
    red, green, blue = (0.5 * (image[..., colour] + 1.0) for colour in range(3))
    old = jnp.maximum(jnp.maximum(red, green), blue)
    spread = old - jnp.minimum(jnp.minimum(red, green), blue)
    red_leads, green_leads = (red >= green) & (red >= blue), green >= blue
    ahead = jnp.where(red_leads, green - blue, jnp.where(green_leads, blue - red, red - green))
    sector = jnp.where(red_leads, 0.0, jnp.where(green_leads, 2.0, 4.0))  # sixths of a turn
    sixths = sector + ahead / jnp.where(spread > 0.0, spread, 1.0) + 6.0 * hue
    saturation = spread / jnp.where(old > 0.0, old, 1.0)
    value = jnp.where(brightness < 0.0, old * (1.0 + brightness), old * (1.0 - brightness) + brightness)
    slope = jnp.tan((contrast + 1.0) * (np.pi / 4))
    end = slope / (2.0 * (1.0 + slope))  # where the lines of both slopes meet
    low, high = value / slope, 1.0 - (1.0 - value) / slope
    value = jnp.where(value < end, low, jnp.where(value > 1.0 - end, high, slope * (value - 0.5) + 0.5))
    place = (np.array([5.0, 3.0, 1.0], np.float32) + sixths[..., None]) % 6.0
    share = jnp.clip(jnp.minimum(place, 4.0 - place), 0.0, 1.0)
    return 2.0 * value[..., None] * (1.0 - saturation[..., None] * share) - 1.0


def sample_bilinear(
    image: Float[Array, "height width c"], rows: Float[Array, "p q"], columns: Float[Array, "p q"]
) -> Float[Array, "p q c"]:
    """The image at fractional positions, interpolated from the four nearest pixels; black (-1) outside."""
    height, width, channels = image.shape
    # A black frame, so that every place has four neighbours and places outside fade to black.
    framed = jnp.pad(image, ((1, 2), (1, 2), (0, 0)), constant_values=-1.0).reshape(-1, channels)
    rows = jnp.clip(rows + 1.0, 0.0, height + 1.0)
    columns = jnp.clip(columns + 1.0, 0.0, width + 1.0)
    top, left = jnp.floor(rows), jnp.floor(columns)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    corner = top.astype(jnp.int32) * (width + 3) + left.astype(jnp.int32)

    def pixel(offset: int) -> Array:
        return framed.at[corner + offset].get(mode="promise_in_bounds")

    above = pixel(0) + right * (pixel(1) - pixel(0))
    below = pixel(width + 3) + right * (pixel(width + 4) - pixel(width + 3))
    return above + down * (below - above)
