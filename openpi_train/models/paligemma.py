"""The config of the PaliGemma policy with a flow-matching head (S4's VLA): sizes, host steps, what trains, FLOP counts.

Its backbone is published PaliGemma's (224, 448 or 896 pixels); `interop/paligemma_torch.py` reads its files.
Read next: `paligemma_network.py`, `docs/paligemma.md`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from openpi_train.models import pi0_names, prompted
from openpi_train.models.base import RowTransform
from openpi_train.models.paligemma_network import PaliGemmaFlow
from openpi_train.nn.activations import Stack
from openpi_train.nn.gemma_sizes import GemmaConfig, GemmaOverrides
from openpi_train.nn.lora import merge_lora
from openpi_train.sharding.tensor import check_sizes
from openpi_train.types import ActionBatch

_BACKBONE = "backbone/"
# What `--freeze` takes beside patterns.
_GROUPS = {
    "vision": f"{_BACKBONE}image_encoder/.*",
    "language": f"{_BACKBONE}transformer/.*",
    "backbone": f"{_BACKBONE}.*",
    "head": "head/.*",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaliGemmaFlowConfig(prompted.PromptedConfig):
    """A PaliGemma backbone and a flow head on its last activations. Any size can be changed by itself:
    `--model.paligemma-variant dummy --model.language.width 128 --model.head.depth 2`.

    Head only: `--freeze backbone`. Low-rank adapters in the backbone, all else in it frozen: `gemma_2b_lora`.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample"})

    # Width of state and actions; shorter ones are padded with zeros.
    action_dim: int = 32
    # Steps of an action chunk.
    action_horizon: int = 50
    # The most tokens of a prompt; rows are as long as the run's longest prompt.
    max_token_len: int = 48
    # Named sizes of the language model: gemma_2b, dummy, or a form with _lora.
    paligemma_variant: str = "gemma_2b"
    # Sizes of the language model that differ from its variant's.
    language: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)
    # Named sizes of the flow head.
    head_variant: str = "gemma_300m"
    # Sizes of the flow head that differ from its variant's.
    head: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)
    # Tokens that the language model knows; at least as many as the tokenizer has.
    vocab_size: int = 257_152
    # Height and width of the images in pixels; PaliGemma is published for 224, 448 and 896.
    image_size: int = 224

    def __post_init__(self):
        problems = self.siglip.check(self.image_size)
        for name in ("action_dim", "action_horizon", "max_token_len", "prompt_length", "vocab_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name} {getattr(self, name)} must be at least 1")
        for part, sizes in self.decoders.items():
            problems += sizes.check(part)
        if self.decoders["head"].lora.enabled:
            problems.append("the head has no start weights for low-rank factors; use a plain variant")
        if problems:
            raise ValueError(f"this {type(self).__name__} cannot be built: " + "; ".join(problems))

    @property
    def decoders(self) -> dict[str, GemmaConfig]:
        """The sizes of language model and head, overrides applied."""
        return {
            "language": self.language.apply(self.paligemma_variant),
            "head": self.head.apply(self.head_variant),
        }

    @property
    def prompt_length(self) -> int:
        """Prompt tokens of a row, padding included."""
        return self.max_token_len if self.used_token_len is None else self.used_token_len

    def build(self, rngs: nnx.Rngs) -> PaliGemmaFlow:
        return PaliGemmaFlow(
            **self.decoders,
            siglip=self.siglip,
            image_size=self.image_size,
            vocab_size=self.vocab_size,
            action_dim=self.action_dim,
            action_horizon=self.action_horizon,
            dtype=self.compute_dtype,
            remat=self.used_remat,
            attention=self.attention,
            rngs=rngs,
        )

    def batch_spec(self, batch_size: int, cameras: Sequence[str]) -> ActionBatch:
        return prompted.batch_spec(
            batch_size,
            cameras,
            image_size=self.image_size,
            prompt_length=self.prompt_length,
            action_horizon=self.action_horizon,
            action_dim=self.action_dim,
        )

    def transforms(self, tokenizer: Any) -> tuple[RowTransform, ...]:
        return prompted.transforms(
            tokenizer,
            image_size=self.image_size,
            prompt_limit=self.max_token_len,
            prompt_length=self.prompt_length,
            action_dim=self.action_dim,
            state_in_prompt=False,
        )

    def fit_prompts(self, tokenizer: Any, prompts: Iterable[tuple[str, int]]) -> prompted.PromptedConfig:
        """This config with rows as long as the longest of these prompts; padding is masked and takes up no position."""
        used = prompted.fitted_length(tokenizer, prompts, prompt_limit=self.max_token_len, state_in_prompt=False)
        return self.with_text_length(used)

    def prompt_tokens(self, tokenizer: Any, prompt: str, num_state_dims: int) -> int:
        del num_state_dims
        return min(tokenizer.longest_prompt(prompt), self.max_token_len)

    def public_name(self, path: str) -> str:
        """openpi's name for the backbone's parameters, which is also big_vision's; the head's are as they are."""
        return pi0_names.public_name(path.removeprefix(_BACKBONE)) if path.startswith(_BACKBONE) else path

    @property
    def parameter_groups(self) -> Mapping[str, str]:
        return _GROUPS

    def explain(self, missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
        """What to do about a checkpoint of other sizes."""
        del missing, extra
        found = []
        if any(name.endswith("/pos_embedding") for name in misshapen):
            found.append("it is for images of another size: --model.image-size 224, 448 or 896, as its name says")
        elif any(name.startswith("PaliGemma/img/") for name in misshapen):
            found.append("the image tower has other sizes: --model.siglip")
        if any(name.startswith("PaliGemma/llm/") for name in misshapen):
            found.append(
                "the language model has other sizes: --model.paligemma-variant, --model.language, --model.vocab-size"
            )
        if any(name.startswith("head/") for name in misshapen):
            found.append("the head has other sizes: --model.head-variant, --model.head, --model.action-dim")
        return found

    def frozen(self, path: str) -> bool:
        """With low-rank adapters the backbone keeps all but their factors, the image tower too."""
        is_factor = path.endswith(("/lora_a", "/lora_b"))
        return self.decoders["language"].lora.enabled and path.startswith(_BACKBONE) and not is_factor

    def without_lora(self) -> "PaliGemmaFlowConfig":
        """The config of the model that `merge_lora` gives the parameters of."""
        plain = dataclasses.replace(self.language, lora_attention_rank=0, lora_mlp_rank=0)
        return dataclasses.replace(self, language=plain)

    def merge_lora(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """All parameters by path, LoRA's additions folded into the weights."""
        scale = self.decoders["language"].lora.attention_scale
        return merge_lora(
            params,
            lambda name: 1.0 if "/mlp/" in name else scale,
            lambda name: -3 if name.endswith("/output") else None,
        )

    def num_tokens(self, cameras: int, draws: int = 1) -> tuple[int, int]:
        """Tokens of one row: images and prompt in the backbone, `draws` noisy chunks in the head."""
        return cameras * self.siglip.num_tokens(self.image_size) + self.prompt_length, draws * self.action_horizon

    def num_tokens_seen(self, batch: ActionBatch, draws: int = 1) -> Int[Array, ""]:
        """Tokens of present images and of prompts, states and noisy actions."""
        observation = batch.observation
        images = sum((mask.sum() for mask in observation.image_masks.values()), start=jnp.int32(0))
        others = (draws * self.action_horizon + 1) * batch.row.shape[0]
        return images * self.siglip.num_tokens(self.image_size) + observation.prompt_mask.sum() + others

    def flops_per_row(self, cameras: int, draws: int = 1) -> float:
        """Forward FLOPs for one row, two per multiply-add, in matrix products only."""
        language, head = self.decoders.values()
        prefix, actions = self.num_tokens(cameras, draws)
        context = prefix + 1  # and the state

        def attention(sizes: GemmaConfig, queries: int, keys: int) -> int:
            return 4 * queries * keys * sizes.num_heads * sizes.head_dim * sizes.depth

        keys_and_values = 4 * context * language.width * head.num_kv_heads * head.head_dim * head.depth
        norms_and_time = draws * head.width**2 * (2 + 3 * (2 * head.depth + 1))
        ends = 2 * actions * self.action_dim * head.width + self.action_dim * language.width
        return (
            cameras * self.siglip.flops(self.image_size, language.width)
            + prefix * language.flops_per_token()
            + attention(language, prefix, prefix)
            + keys_and_values
            + actions * head.flops_per_token()
            + attention(head, actions, context + actions)
            + 2.0 * (norms_and_time + ends)
        )

    def activation_bytes_per_row(self, cameras: int, draws: int = 1, tensor_devices: int = 1) -> float:
        """Bytes alive for one row when most are, in the backward pass; an estimate from shapes and `remat`."""
        itemsize, total = self.compute_dtype.itemsize, 0.0
        for stack, attended_tokens, times in self._stacks(cameras, draws):
            total += times * stack.shared(tensor_devices).bytes(self.used_remat, itemsize, attended_tokens)
        head, context = self.decoders["head"], self.num_tokens(cameras)[0] + 1
        return total + itemsize * 2 * context * head.num_kv_heads * head.head_dim * head.depth

    def tensor_bytes_per_row(self, cameras: int, draws: int = 1, tensor_devices: int = 1) -> float:
        """An estimate: what the layers add up, and not the gradient of the context's keys."""
        itemsize = self.compute_dtype.itemsize
        stacks = self._stacks(cameras, draws)
        return sum(times * stack.summed_bytes(self.used_remat, itemsize, tensor_devices) for stack, _, times in stacks)

    def check_tensor(self, tensor_devices: int) -> list[str]:
        language, head = self.decoders.values()
        sizes = {
            "language.num_heads": language.num_heads,
            "language.mlp_dim": language.mlp_dim,
            "head.num_heads": head.num_heads,
            "head.mlp_dim": head.mlp_dim,
            "siglip.num_heads": self.siglip.num_heads,
            "siglip.mlp_dim": self.siglip.mlp_dim,
        }
        return check_sizes(sizes, tensor_devices)

    def _stacks(self, cameras: int, draws: int) -> list[tuple[Stack, int, int]]:
        """Its stacks of layers, with the tokens that every token may look at, and how often each runs for a row."""
        language, head = self.decoders.values()
        prefix, actions = self.num_tokens(cameras, draws)
        tokens = self.siglip.num_tokens(self.image_size)
        return [
            (Stack.of_decoder(language, prefix, has_backward="backbone" not in self.fixed_groups), prefix, 1),
            (Stack.of_decoder(head, actions), prefix + 1 + actions, 1),
            (Stack.of_tower(self.siglip, tokens, has_backward="vision" not in self.fixed_groups), tokens, cameras),
        ]
