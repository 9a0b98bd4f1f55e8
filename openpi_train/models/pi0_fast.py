"""The config of pi0-FAST: sizes, published names, frozen parameters and host steps.

Field names and defaults are openpi's where openpi has the field. Read next: `pi0_fast_network.py`,
`data/action_prompt.py` for what a row's tokens are, `docs/pi0_fast.md`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from openpi_train.models import pi0_names, prompted
from openpi_train.models.action_tokens import ActionTokens
from openpi_train.models.base import RowTransform
from openpi_train.models.pi0_fast_network import Decoding, Pi0Fast
from openpi_train.nn.gemma_sizes import GemmaConfig, GemmaOverrides
from openpi_train.nn.lora import merge_lora
from openpi_train.sharding.tensor import check_sizes
from openpi_train.types import ActionBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pi0FastConfig(prompted.PromptedConfig):
    """pi0-FAST. Any size of the named variants can be changed by itself: `--model.language.width 128`."""

    provides: ClassVar[frozenset[str]] = frozenset({"logits", "sample"})

    # Dims of an action; set it to the robot's: every dim more costs tokens.
    action_dim: int = 32
    # Steps of an action chunk.
    action_horizon: int = 32
    # Tokens of a row: prompt, state and chunk. What is longer is cut, with a warning.
    max_token_len: int = 250
    # A FAST processor: a directory, or a repository on the Hugging Face hub.
    fast_tokenizer: str = "physical-intelligence/fast"
    # The most tokens that an action chunk is given when it is decoded.
    max_decoding_steps: int = 256
    # Where decoded tokens stand and what they see: as in training, or as in openpi's decoding, which leaves out a
    # position and the positions of masked images, and looks past the first tokens where an image is masked.
    decoding: Decoding = "as_trained"
    # The camera slots over which positions count, whether a robot fills them or not.
    camera_slots: tuple[str, ...] = ("base_0_rgb", "base_1_rgb", "wrist_0_rgb")
    # Named sizes of the language model: gemma_2b, dummy, or a form with _lora.
    paligemma_variant: str = "gemma_2b"
    # Sizes of the language model that differ from its variant's.
    language: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)
    # Tokens that the model knows; the last are FAST's, and 128 more.
    vocab_size: int = 257_152
    # Height and width of the images in pixels.
    image_size: int = 224

    def __post_init__(self):
        problems = self.siglip.check(self.image_size) + self.sizes.check("language")
        for name in ("action_dim", "action_horizon", "prompt_length", "max_decoding_steps", "vocab_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name} {getattr(self, name)} must be at least 1")
        if problems:
            raise ValueError(f"this {type(self).__name__} cannot be built: " + "; ".join(problems))

    @property
    def sizes(self) -> GemmaConfig:
        """The language model's sizes, overrides applied."""
        return self.language.apply(self.paligemma_variant)

    @property
    def prompt_length(self) -> int:
        """Tokens of a row beside those of images, padding included."""
        return self.max_token_len if self.used_token_len is None else self.used_token_len

    @property
    def normalization(self) -> Literal["z_score", "quantile"]:
        return "quantile"

    def build(self, rngs: nnx.Rngs) -> Pi0Fast:
        return Pi0Fast(
            language=self.sizes,
            siglip=self.siglip,
            image_size=self.image_size,
            vocab_size=self.vocab_size,
            slots=self.camera_slots,
            dtype=self.compute_dtype,
            decoding=self.decoding,
            max_decoded_tokens=self.max_decoding_steps,
            read_actions=ActionTokens(self.fast_tokenizer, self.vocab_size, self.action_horizon, self.action_dim),
            remat=self.used_remat,
            attention=self.attention,
            rngs=rngs,
        )

    def batch_spec(self, batch_size: int, cameras: Sequence[str]) -> ActionBatch:
        """The batch's shapes. Raises ValueError for a camera slot that the model does not have."""
        if unknown := sorted(set(cameras) - set(self.camera_slots)):
            raise ValueError(
                f"the model has no camera slot {', '.join(unknown)}; it has {', '.join(self.camera_slots)}: rename the "
                "robot's (--data.datasets.N.robot.cameras), or set --model.camera-slots"
            )
        return prompted.batch_spec(
            batch_size,
            cameras,
            image_size=self.image_size,
            prompt_length=self.prompt_length,
            action_horizon=self.action_horizon,
            action_dim=self.action_dim,
            token_masks=True,
        )

    def transforms(self, tokenizer: Any) -> tuple[RowTransform, ...]:
        return prompted.action_token_transforms(
            tokenizer,
            self.fast_tokenizer,
            form="pi0_fast",
            image_size=self.image_size,
            prompt_length=self.prompt_length,
            vocab_size=self.vocab_size,
            action_dim=self.action_dim,
        )

    def fit_prompts(self, tokenizer: Any, prompts: Iterable[tuple[str, int]]) -> prompted.PromptedConfig:
        """This config with rows as long as any of these prompts and any chunk can be."""
        used = prompted.fitted_length(
            tokenizer,
            prompts,
            prompt_limit=self.max_token_len,
            state_in_prompt=True,
            more=prompted.most_action_tokens(tokenizer, self.action_horizon, self.action_dim),
        )
        return self.with_text_length(used)

    def prompt_tokens(self, tokenizer: Any, prompt: str, num_state_dims: int) -> int:
        return tokenizer.longest_prompt(prompt.lower(), num_state_dims) + prompted.frame_tokens(tokenizer)

    def chunk_tokenizer(self, tokenizer: Any) -> Any:
        return prompted.chunk_tokenizer(self.fast_tokenizer, tokenizer)

    def public_name(self, path: str) -> str:
        return pi0_names.public_name(path)

    def explain(self, missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
        """What to do about a checkpoint of another model, or of other sizes."""
        del missing
        return pi0_names.explain_fast(extra, misshapen)

    @property
    def parameter_groups(self) -> Mapping[str, str]:
        return pi0_names.GROUPS

    def frozen(self, path: str) -> bool:
        """With LoRA the language model keeps all but its factors (as openpi's `get_freeze_filter`)."""
        root, *_, leaf = path.split("/")
        return self.sizes.lora.enabled and root == "transformer" and leaf not in ("lora_a", "lora_b")

    def without_lora(self) -> "Pi0FastConfig":
        """The config of the model that `merge_lora` gives the parameters of."""
        plain = dataclasses.replace(self.language, lora_attention_rank=0, lora_mlp_rank=0)
        return dataclasses.replace(self, language=plain)

    def merge_lora(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """All parameters by path, LoRA's additions folded into the weights: `without_lora()` computes the same."""
        scale = self.sizes.lora.attention_scale
        return merge_lora(
            params,
            lambda name: 1.0 if "/mlp/" in name else scale,
            lambda name: -3 if name.endswith("/output") else None,
        )

    def num_tokens_seen(self, batch: ActionBatch, draws: int = 1) -> Int[Array, ""]:
        """Tokens of present images and of prompts."""
        del draws
        observation = batch.observation
        images = sum((mask.sum() for mask in observation.image_masks.values()), start=jnp.int32(0))
        return images * self.siglip.num_tokens(self.image_size) + observation.prompt_mask.sum()

    def check_tensor(self, tensor_devices: int) -> list[str]:
        sizes = {
            "num_heads": self.sizes.num_heads,
            "language.mlp_dim": self.sizes.mlp_dim,
            "siglip.num_heads": self.siglip.num_heads,
            "siglip.mlp_dim": self.siglip.mlp_dim,
        }
        return check_sizes(sizes, tensor_devices)
