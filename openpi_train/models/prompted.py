"""What models that read images and a prompt have in common: settings, their rows, and the tokens that these become.

Read next: `pi0.py`, `pi0_fast.py`, `paligemma.py` and `smolvla.py`, whose configs are made of the first classes, and
their networks, which call the last functions.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from openpi_train.data.robot.row_format import RowFormat
from openpi_train.data.robot.windows import WindowShape
from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer
from openpi_train.models.compute import Compute
from openpi_train.models.compute_config import TransformerConfig
from openpi_train.models.model_config import PolicyConfig, RowTransform
from openpi_train.models.row_text import RowText
from openpi_train.nn.gemma_sizes import GemmaConfig, GemmaOverrides
from openpi_train.nn.lora import merge_lora
from openpi_train.nn.siglip import SiglipConfig, float_images
from openpi_train.parallel.params import ParamLeaves
from openpi_train.types import TOKEN_MASKS, ActionBatch, Observation, RolloutBatch, action_batch

# The sizes of image tower and decoders that tensor groups share out.
SHARED_SIZES = ("num_heads", "mlp_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptedConfig(TransformerConfig, PolicyConfig):
    """What the configs of these models have in common: how they compute, and the text of their rows."""

    RETIRED: ClassVar[frozenset[str]] = frozenset({"used_token_len", "fixed_groups"})

    # Width of state and actions; shorter ones are padded with zeros.
    action_dim: int = 32
    # Tokens that the language model knows: at least as many as the tokenizer has; FAST's are the last but 128.
    vocab_size: int = 257_152
    # Height and width of the images in pixels; PaliGemma is published for 224, 448 and 896.
    image_size: int = 224
    # Sizes of the image tower.
    siglip: SiglipConfig = dataclasses.field(default_factory=SiglipConfig)

    @property
    @abc.abstractmethod
    def text(self) -> RowText:
        """What the text of a row is."""

    @property
    def rows(self) -> "PromptedRows":
        return PromptedRows(
            window=WindowShape(horizon=self.action_horizon),
            vocab_size=self.vocab_size,
            text=self.text,
            image_size=self.image_size,
            action_dim=self.action_dim,
        )

    def num_tokens_seen(self, batch: ActionBatch | RolloutBatch, draws: int = 1) -> Int[Array, ""]:
        """Tokens of present images and of prompts, and those behind them."""
        seen = batch.observation
        others = self.num_suffix_tokens(draws) * math.prod(seen.prompt_mask.shape[:-1])
        images = sum((mask.sum() for mask in seen.image_masks.values()), start=jnp.int32(0))
        return images * self.tokens_per_image + seen.prompt_mask.sum() + others

    @property
    def tokens_per_image(self) -> int:
        """Tokens of an image before the prompt."""
        return self.siglip.num_tokens(self.image_size)

    def num_suffix_tokens(self, draws: int) -> int:
        """Tokens of a row behind images and prompt: of its state and of so many noisy chunks (default: none)."""
        del draws
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaPolicyConfig(PromptedConfig):
    """Such a model with PaliGemma's language model, and low-rank factors in it."""

    # Named sizes of the language model: gemma_2b, gemma_300m, dummy, or a form with _lora.
    paligemma_variant: str = "gemma_2b"
    # Sizes of the language model that differ from its variant's.
    language: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)

    @property
    @abc.abstractmethod
    def decoders(self) -> Mapping[str, GemmaConfig]:
        """The sizes of `language` and of a decoder beside it, by field, overrides applied."""

    @property
    def compute(self) -> Compute:
        parts = {**self.decoders, "siglip": self.siglip}
        shared = {f"{name}.{size}": getattr(part, size) for name, part in parts.items() for size in SHARED_SIZES}
        heads = tuple(dict.fromkeys(part.heads for part in parts.values()))
        return dataclasses.replace(super().compute, heads=heads, shared_sizes=shared)

    def decoder_of(self, path: str) -> GemmaConfig:
        """The sizes of the decoder to which a parameter belongs that may have low-rank factors."""
        del path
        return self.decoders["language"]

    def without_lora(self) -> "GemmaPolicyConfig":
        return dataclasses.replace(self, language=self.language.without_lora())

    def _merge_lora(self, params: ParamLeaves) -> dict[str, Any]:
        """For its `ParamRules`: all parameters by path, LoRA's additions folded into the weights."""

        def scale(name: str) -> float:
            return 1.0 if "/mlp/" in name else self.decoder_of(name).lora.attention_scale

        return merge_lora(params, scale, lambda name: -3 if name.endswith("/output") else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptedRows(RowFormat):
    """Rows of square images, a text, and states and actions padded to one width.

    Attributes:
        text: the text of a row.
        image_size: height and width of the images in pixels.
        action_dim: width of state and actions.
        into_corner: whether images are padded at the right and below alone.
        slots: the camera slots that the model has; None: all that robots have.
    """

    text: RowText
    image_size: int
    action_dim: int
    into_corner: bool = False
    slots: tuple[str, ...] | None = None

    @property
    def text_limit(self) -> int:
        return self.text.limit

    def text_length(self, tokenizer: PromptTokenizer, prompts: Iterable[tuple[str, int]]) -> int:
        return self.text.fitted_length(tokenizer, prompts)

    def batch_spec(self, batch_size: int, cameras: Sequence[str], text_length: int | None = None) -> ActionBatch:
        """The batch's shapes. Raises ValueError for a camera slot that the model does not have."""
        if self.slots is not None and (unknown := sorted(set(cameras) - set(self.slots))):
            raise ValueError(
                f"the model has no camera slot {', '.join(unknown)}; it has {', '.join(self.slots)}: rename the "
                "robot's (--data.datasets.N.robot.cameras), or set --model.camera-slots"
            )
        length = self.text_limit if text_length is None else text_length

        def spec(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

        masks = ["prompt_mask", *(TOKEN_MASKS if self.text.token_masks else ())]
        return action_batch(
            {
                **{f"image/{slot}": spec(jnp.uint8, self.image_size, self.image_size, 3) for slot in cameras},
                **{f"image_mask/{slot}": spec(jnp.bool_) for slot in cameras},
                "state": spec(jnp.float32, self.action_dim),
                "prompt_tokens": spec(jnp.int32, length),
                **{name: spec(jnp.bool_, length) for name in masks},
                "actions": spec(jnp.float32, self.window.horizon, self.action_dim),
                "action_mask": spec(jnp.bool_, self.window.horizon),
                "dim_mask": spec(jnp.bool_, self.action_dim),
                "row": spec(jnp.int32),
            }
        )

    def transforms(self, tokenizer: PromptTokenizer, text_length: int | None = None) -> tuple[RowTransform, ...]:
        # Imported here: image libraries are only needed where rows are made.
        from openpi_train.data.robot.transforms import PadDims, ResizeImages

        tokenize = self.text.tokenize(tokenizer, self.text_limit if text_length is None else text_length)
        resize = ResizeImages(self.image_size, into_corner=self.into_corner)
        return resize, tokenize, PadDims(self.action_dim)

    def check_dims(self, num_state_dims: int, num_action_dims: int) -> None:
        from openpi_train.data.robot.transforms import PadDims, blank_row

        PadDims(self.action_dim)(blank_row(num_state_dims, num_action_dims))

    def prompt_tokens(self, tokenizer: PromptTokenizer, prompt: str, num_state_dims: int) -> int:
        return self.text.prompt_tokens(tokenizer, prompt, num_state_dims)

    def chunk_tokenizer(self, tokenizer: PromptTokenizer) -> Any:
        return self.text.chunk_tokenizer(tokenizer)


def embed_prefix(
    embed_images: Callable[[Array], Array], embed_text: Callable[[Array], Array], observation: Observation
) -> tuple[Float[Array, "b p d"], Bool[Array, "b p"]]:
    """Tokens of the present images, in the order of their slots' names, then of the prompt; and which count.

    `embed_images` turns images "b height width 3" into tokens "b t d", `embed_text` tokens "b t" into such.
    """
    slots = sorted(observation.images)
    tokens, masks = [], []
    if slots:
        images = jnp.stack([float_images(observation.images[slot]) for slot in slots], axis=1)
        b, cameras = images.shape[:2]
        # One pass for all cameras. Rows stay outermost, so a batch cut over devices moves nowhere.
        encoded = embed_images(images.reshape(b * cameras, *images.shape[2:]))
        tokens.append(encoded.reshape(b, cameras * encoded.shape[1], encoded.shape[2]))
        masks += [jnp.repeat(observation.image_masks[slot][:, None], encoded.shape[1], axis=1) for slot in slots]
    tokens.append(embed_text(observation.prompt_tokens))
    masks.append(observation.prompt_mask)
    return jnp.concatenate(tokens, axis=1), jnp.concatenate(masks, axis=1)


def causal_tokens(observation: Observation, num_prefix: int) -> Bool[Array, "b p"] | None:
    """Which of all `num_prefix` tokens, the prompt's being the last, come one by one; None where that is not said."""
    said = observation.token_ar_mask
    return None if said is None else jnp.pad(said, ((0, 0), (num_prefix - said.shape[1], 0)))
