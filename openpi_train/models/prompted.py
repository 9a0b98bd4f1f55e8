"""What models that read images and a prompt have in common: settings, their rows, and the tokens that these become.

Read next: `pi0.py`, `pi0_fast.py` and `paligemma.py`, whose configs call the first functions, and their networks, which
call the last.
"""

import dataclasses
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import jax
import jax.numpy as jnp
import tyro
from jaxtyping import Array, Bool, Float

from openpi_train.data.text_lengths import rounded
from openpi_train.models.base import PolicyConfig, RowTransform
from openpi_train.nn.attention import Attention
from openpi_train.nn.gemma import Gemma
from openpi_train.nn.layers import Remat, RematChoice
from openpi_train.nn.siglip import Siglip, SiglipConfig, float_images
from openpi_train.types import TOKEN_MASKS, ActionBatch, Observation, action_batch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptedConfig(PolicyConfig):
    """What the configs of these models have in common: how they compute, and the length of their rows' text."""

    # The tokens of a row, set when a run opens its data; None: max_token_len.
    used_token_len: Annotated[int | None, tyro.conf.Suppress] = None
    # Names of `parameter_groups` in which nothing trains, set when a run is laid out.
    fixed_groups: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    # Type of the activations. Parameters are float32.
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    # Sizes of the image tower.
    siglip: SiglipConfig = dataclasses.field(default_factory=SiglipConfig)
    # What the backward pass recomputes: nothing; all but the products with weights; all but attention; whole layers.
    # auto: the one with the shortest step of those with which the run fits its devices, by the plan.
    remat: RematChoice = "auto"
    # Who computes attention: XLA, or cuDNN's fused kernels on NVIDIA GPUs; auto is XLA.
    attention: Attention = "auto"

    @property
    def compute_dtype(self) -> Any:
        """The `dtype` field."""
        return jnp.dtype(self.dtype)

    @property
    def needs_loss_scale(self) -> bool:
        return self.dtype == "float16"

    @property
    def used_remat(self) -> Remat:
        """`remat`; nothing is recomputed where `auto` was not settled, as in what has no backward pass."""
        return "none" if self.remat == "auto" else self.remat

    def remat_choices(self) -> Mapping[str | None, "PromptedConfig"]:
        names = get_args(Remat) if self.remat == "auto" else (self.remat,)
        return {name: dataclasses.replace(self, remat=name) for name in names}

    def with_text_length(self, length: int) -> "PromptedConfig":
        return dataclasses.replace(self, used_token_len=length)

    def training_only(self, trained: Collection[str]) -> "PromptedConfig":
        groups = self.parameter_groups.items()
        fixed = (name for name, pattern in groups if not any(re.fullmatch(pattern, path) for path in trained))
        return dataclasses.replace(self, fixed_groups=tuple(fixed))


def batch_spec(
    batch_size: int,
    cameras: Sequence[str],
    *,
    image_size: int,
    prompt_length: int,
    action_horizon: int,
    action_dim: int,
    token_masks: bool = False,
) -> ActionBatch:
    """The batch as a tree of `jax.ShapeDtypeStruct`; state and actions are both `action_dim` wide."""

    def spec(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    return action_batch(
        {
            **{f"image/{slot}": spec(jnp.uint8, image_size, image_size, 3) for slot in cameras},
            **{f"image_mask/{slot}": spec(jnp.bool_) for slot in cameras},
            "state": spec(jnp.float32, action_dim),
            "prompt_tokens": spec(jnp.int32, prompt_length),
            "prompt_mask": spec(jnp.bool_, prompt_length),
            **{name: spec(jnp.bool_, prompt_length) for name in TOKEN_MASKS if token_masks},
            "actions": spec(jnp.float32, action_horizon, action_dim),
            "action_mask": spec(jnp.bool_, action_horizon),
            "dim_mask": spec(jnp.bool_, action_dim),
            "row": spec(jnp.int32),
        }
    )


def transforms(
    tokenizer: Any, *, image_size: int, prompt_limit: int, prompt_length: int, action_dim: int, state_in_prompt: bool
) -> tuple[RowTransform, ...]:
    """The host steps from a normalised row to the arrays of `batch_spec`."""
    # Imported here: image and tokenizer libraries are only needed where rows are made.
    from openpi_train.data.transforms import PadDims, ResizeImages, TokenizePrompt

    return (
        ResizeImages(image_size),
        TokenizePrompt(tokenizer, prompt_limit, state_in_prompt, prompt_length),
        PadDims(action_dim),
    )


def action_token_transforms(
    tokenizer: Any,
    fast_tokenizer: str,
    *,
    form: Literal["pi0_fast", "pi05"],
    image_size: int,
    prompt_length: int,
    vocab_size: int,
    action_dim: int,
) -> tuple[RowTransform, ...]:
    """The host steps of a model that also says chunks as FAST tokens. Raises ValueError where these are words, too."""
    from openpi_train.data.action_prompt import TokenizeActionPrompt, check_vocabulary
    from openpi_train.data.transforms import PadDims, ResizeImages

    fast = chunk_tokenizer(fast_tokenizer, tokenizer)
    check_vocabulary(tokenizer, fast, vocab_size)
    return (
        ResizeImages(image_size),
        TokenizeActionPrompt(tokenizer, fast, vocab_size, prompt_length, action_dim, form),
        PadDims(action_dim),
    )


def frame_tokens(tokenizer: Any) -> int:
    """The tokens around those of a chunk, with which a prompt goes on."""
    return len(tokenizer.encode("Action: ") + tokenizer.encode("|", eos=True))


def most_action_tokens(tokenizer: Any, action_horizon: int, action_dim: int) -> int:
    """The most tokens that a prompt can go on with: a chunk of two bytes per number, each a token, and its frame."""
    return frame_tokens(tokenizer) + 2 * action_horizon * action_dim


def chunk_tokenizer(fast_tokenizer: str, tokenizer: Any) -> Any:
    """The FAST processor of this name; read once."""
    from openpi_train.data.fast import load_fast

    return load_fast(fast_tokenizer, offline=tokenizer.offline)


def fitted_length(
    tokenizer: Any, prompts: Iterable[tuple[str, int]], *, prompt_limit: int, state_in_prompt: bool, more: int = 0
) -> int:
    """Tokens of a row that the longest of these prompts and `more` need, at most `prompt_limit`."""
    lengths = [more + tokenizer.longest_prompt(text, dims if state_in_prompt else None) for text, dims in prompts]
    longest = max(lengths, default=prompt_limit)
    used = rounded(longest, prompt_limit)
    logger.info("prompts have at most %d tokens, rows %d (--model.max-token-len: %d)", longest, used, prompt_limit)
    return used


def embed_prefix(
    image_encoder: Siglip, transformer: Gemma, observation: Observation
) -> tuple[Float[Array, "b p d"], Bool[Array, "b p"]]:
    """Tokens of the present images, in the order of their slots' names, then of the prompt; and which count."""
    slots = sorted(observation.images)
    tokens, masks = [], []
    if slots:
        images = jnp.stack([float_images(observation.images[slot]) for slot in slots], axis=1)
        b, cameras = images.shape[:2]
        # One pass for all cameras. Rows stay outermost, so a batch cut over devices moves nowhere.
        encoded = image_encoder(images.reshape(b * cameras, *images.shape[2:]))
        tokens.append(encoded.reshape(b, cameras * encoded.shape[1], encoded.shape[2]))
        masks += [jnp.repeat(observation.image_masks[slot][:, None], encoded.shape[1], axis=1) for slot in slots]
    tokens.append(transformer.embed(observation.prompt_tokens))
    masks.append(observation.prompt_mask)
    return jnp.concatenate(tokens, axis=1), jnp.concatenate(masks, axis=1)


def causal_tokens(observation: Observation, num_prefix: int) -> Bool[Array, "b p"] | None:
    """Which of all `num_prefix` tokens, the prompt's being the last, come one by one; None where that is not said."""
    said = observation.token_ar_mask
    return None if said is None else jnp.pad(said, ((0, 0), (num_prefix - said.shape[1], 0)))
