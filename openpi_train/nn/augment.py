"""Random augmentation of training images on the device, with keys per row.

The transformations and their strengths are openpi's (`models/model.py` at 15a9616: augmax's RandomCrop, Resize, Rotate
and ColorJitter); ours are drawn per row and done in one resampling instead of three.

Read next: `objectives/flow_matching.py`, which calls it in the training step.
"""

import abc
import dataclasses

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
    """Random crop, rotation and colour jitter of a given strength.

    `crop_scale` and `rotation_degrees` apply to all cameras but wrist cameras (slots with "wrist" in their name), whose
    view is fixed to the gripper. Brightness, contrast and saturation are multiplied by factors drawn from
    [1 - strength, 1 + strength].
    """

    # Side of the random crop, as a share of the image's; it is scaled back up.
    crop_scale: float = 0.95
    # Rotation about the centre, drawn from [-rotation_degrees, rotation_degrees].
    rotation_degrees: float = 5.0
    # Strength of the brightness jitter.
    brightness: float = 0.3
    # Strength of the contrast jitter.
    contrast: float = 0.4
    # Strength of the saturation jitter.
    saturation: float = 0.5

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
        uniform = jax.random.uniform(key, (6,), jnp.float32, -1.0, 1.0)
        if moves:
            image = self._move(image, uniform[:3])
        return self._recolour(image, uniform[3:])

    def _move(self, image: Float[Array, "height width 3"], uniform: Float[Array, "3"]) -> Array:
        """Crop, scale back and rotate: compute the source position of every pixel, then sample bilinearly."""
        height, width, _ = image.shape
        angle = uniform[0] * np.float32(np.deg2rad(self.rotation_degrees))
        shift = uniform[1:] * (1.0 - self.crop_scale) / 2 * jnp.array([height, width], jnp.float32)
        y = jnp.arange(height, dtype=jnp.float32)[:, None] - (height - 1) / 2
        x = jnp.arange(width, dtype=jnp.float32)[None, :] - (width - 1) / 2
        sine, cosine = jnp.sin(angle) * self.crop_scale, jnp.cos(angle) * self.crop_scale
        rows = cosine * y - sine * x + (height - 1) / 2 + shift[0]
        columns = sine * y + cosine * x + (width - 1) / 2 + shift[1]
        return sample_bilinear(image, rows, columns)

    def _recolour(self, image: Float[Array, "height width 3"], uniform: Float[Array, "3"]) -> Array:
        """Brightness, then contrast about the mean grey, then saturation about each pixel's grey, in one pass."""
        strengths = jnp.array([self.brightness, self.contrast, self.saturation], jnp.float32)
        brightness, contrast, saturation = 1.0 + uniform * strengths
        mean = 0.5 * (jnp.mean(image, axis=(0, 1)) @ _LUMA + 1.0)  # of the [0, 1] image
        # All three are affine in the pixel: value -> gain * value + offset, and grey likewise.
        gain, offset = brightness * contrast, (1.0 - contrast) * brightness * mean
        # The same in [-1, 1], where value = (image + 1) / 2.
        bright = gain * image + (gain + 2.0 * offset - 1.0)
        grey = jnp.sum(bright * _LUMA, axis=-1, keepdims=True)
        return jnp.clip(grey + saturation * (bright - grey), -1.0, 1.0)


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
