"""The config of pi0 and pi0.5: sizes, published names, frozen parameters and host steps.

Field names and defaults are openpi's where openpi has the field. Read next: `pi0_network.py` (the network itself),
`pi0_names.py`, `nn/gemma.py` for the variants.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from openpi_train.models import pi0_names, prompted
from openpi_train.models.base import RowTransform
from openpi_train.models.pi0_network import Pi0
from openpi_train.nn.gemma_sizes import GemmaConfig, GemmaOverrides
from openpi_train.nn.lora import merge_lora
from openpi_train.sharding.tensor import check_sizes
from openpi_train.types import ActionBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pi0Config(prompted.PromptedConfig):
    """pi0, or pi0.5 with `pi05`. Any size of the named variants can be changed by itself:
    `--model.paligemma-variant dummy --model.language.width 128 --model.siglip.depth 2`.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample", "insulation"})

    # The flow time steers the action expert's norms, the state is spelled out in the prompt (pi0.5).
    pi05: bool = False
    # Width of state and actions; shorter ones are padded with zeros.
    action_dim: int = 32
    # Steps of an action chunk.
    action_horizon: int = 50
    # The most tokens of a prompt; None means 48, 200 with `pi05`, or 300, the chunk's tokens among them, if insulated.
    # Rows are as long as the run's longest prompt.
    max_token_len: int | None = None
    # Whether the prompt holds the discretised state; None means as `pi05`.
    discrete_state_input: bool | None = None
    # No gradient goes from the action expert into the language model, which learns to say the chunk as FAST tokens
    # (with the objective InsulatedFlow, as in pi05_bridge_insulated).
    knowledge_insulation: bool = False
    # With it, a FAST processor: a directory, or a repository on the Hugging Face hub.
    fast_tokenizer: str = "physical-intelligence/fast"
    # Named sizes of the language expert: gemma_2b, gemma_300m, dummy, or a form with _lora.
    paligemma_variant: str = "gemma_2b"
    # Named sizes of the action expert.
    action_expert_variant: str = "gemma_300m"
    # Sizes of the language expert that differ from its variant's.
    language: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)
    # Sizes of the action expert that differ from its variant's.
    action_expert: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)
    # Tokens that the language expert knows; at least as many as the tokenizer has.
    vocab_size: int = 257_152
    # Height and width of the images in pixels.
    image_size: int = 224

    def __post_init__(self):
        language, action = self.experts.values()
        problems = self.siglip.check(self.image_size)
        for name in ("action_dim", "action_horizon", "prompt_limit", "prompt_length", "vocab_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            first, second = getattr(language, name), getattr(action, name)
            if first != second:
                problems.append(f"the experts attend jointly but {name} is {first} in `language`, {second} in `action`")
        for expert, config in self.experts.items():
            problems += config.check(expert)
        if self.knowledge_insulation and not self.pi05:
            problems.append("knowledge_insulation goes by pi0.5's prompt, which holds the state: set pi05, too")
        if problems:
            raise ValueError(f"this {type(self).__name__} cannot be built: " + "; ".join(problems))

    @property
    def experts(self) -> dict[str, GemmaConfig]:
        """The sizes of both experts, overrides applied."""
        return {
            "language": self.language.apply(self.paligemma_variant),
            "action": self.action_expert.apply(self.action_expert_variant),
        }

    @property
    def prompt_length(self) -> int:
        """Prompt tokens of a row, padding included."""
        return self.prompt_limit if self.used_token_len is None else self.used_token_len

    @property
    def prompt_limit(self) -> int:
        """`max_token_len` with its default filled in."""
        if self.max_token_len is not None:
            return self.max_token_len
        if self.knowledge_insulation:
            return 300
        return 200 if self.pi05 else 48

    @property
    def state_in_prompt(self) -> bool:
        """`discrete_state_input` with its default filled in."""
        return self.pi05 if self.discrete_state_input is None else self.discrete_state_input

    @property
    def normalization(self) -> Literal["z_score", "quantile"]:
        return "quantile" if self.pi05 else "z_score"

    @property
    def fixed_prefix(self) -> bool:
        """Whether nothing trains of what makes the prefix's keys and values."""
        return "backbone" in self.fixed_groups

    def build(self, rngs: nnx.Rngs) -> Pi0:
        experts = self.experts
        return Pi0(
            language=experts["language"],
            action=experts["action"],
            siglip=self.siglip,
            image_size=self.image_size,
            vocab_size=self.vocab_size,
            action_dim=self.action_dim,
            action_horizon=self.action_horizon,
            adaptive=self.pi05,
            insulated=self.knowledge_insulation,
            fixed_prefix=self.fixed_prefix,
            dtype=self.compute_dtype,
            remat=self.used_remat,
            attention=self.attention,
            rngs=rngs,
        )

    def check_objective(self, name: str, needs: frozenset[str]) -> list[str]:
        problems = super().check_objective(name, needs)
        if self.knowledge_insulation and "insulation" not in needs:
            problems.append(
                f"--model.knowledge-insulation with objective {name}: its gradient does not reach the language model, "
                "which nothing would train; use InsulatedFlow (as pi05_bridge_insulated does), or leave the flag out"
            )
        if "insulation" in needs and not self.knowledge_insulation:
            problems.append(
                f"objective {name} trains the language model by action tokens, which rows have only with "
                "--model.knowledge-insulation: give that, or use FlowMatching (as pi05_bridge does)"
            )
        return problems

    def batch_spec(self, batch_size: int, cameras: Sequence[str]) -> ActionBatch:
        return prompted.batch_spec(
            batch_size,
            cameras,
            image_size=self.image_size,
            prompt_length=self.prompt_length,
            action_horizon=self.action_horizon,
            action_dim=self.action_dim,
            token_masks=self.knowledge_insulation,
        )

    def transforms(self, tokenizer: Any) -> tuple[RowTransform, ...]:
        sizes: Any = {
            "image_size": self.image_size,
            "prompt_length": self.prompt_length,
            "action_dim": self.action_dim,
        }
        if self.knowledge_insulation:
            fast: Any = {"form": "pi05", "vocab_size": self.vocab_size}
            return prompted.action_token_transforms(tokenizer, self.fast_tokenizer, **fast, **sizes)
        return prompted.transforms(
            tokenizer, prompt_limit=self.prompt_limit, state_in_prompt=self.state_in_prompt, **sizes
        )

    def fit_prompts(self, tokenizer: Any, prompts: Iterable[tuple[str, int]]) -> prompted.PromptedConfig:
        """This config with rows as long as the longest of these prompts; padding is masked and takes up no position."""
        said = 0
        if self.knowledge_insulation:
            said = prompted.most_action_tokens(tokenizer, self.action_horizon, self.action_dim)
        used = prompted.fitted_length(
            tokenizer, prompts, prompt_limit=self.prompt_limit, state_in_prompt=self.state_in_prompt, more=said
        )
        return self.with_text_length(used)

    def prompt_tokens(self, tokenizer: Any, prompt: str, num_state_dims: int) -> int:
        frame = prompted.frame_tokens(tokenizer) if self.knowledge_insulation else 0
        return min(tokenizer.longest_prompt(prompt, self._dims_in_prompt(num_state_dims)) + frame, self.prompt_limit)

    def chunk_tokenizer(self, tokenizer: Any) -> Any:
        return prompted.chunk_tokenizer(self.fast_tokenizer, tokenizer) if self.knowledge_insulation else None

    def _dims_in_prompt(self, num_state_dims: int) -> int | None:
        return num_state_dims if self.state_in_prompt else None

    def public_name(self, path: str) -> str:
        return pi0_names.public_name(path)

    @property
    def parameter_groups(self) -> Mapping[str, str]:
        return pi0_names.GROUPS

    def explain(self, missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
        return pi0_names.explain(self.pi05, missing, extra, misshapen)

    def frozen(self, path: str) -> bool:
        """A LoRA'd expert keeps all but its factors (as openpi's `get_freeze_filter`); images and heads stay free."""
        parts = path.split("/")
        if parts[0] != "transformer" or parts[-1] in ("lora_a", "lora_b"):
            return False
        expert = "action" if "action" in parts else "language"
        return self.experts[expert].lora.enabled

    def without_lora(self) -> "Pi0Config":
        """The config of the model that `merge_lora` gives the parameters of."""

        def plain(overrides: GemmaOverrides) -> GemmaOverrides:
            return dataclasses.replace(overrides, lora_attention_rank=0, lora_mlp_rank=0)

        return dataclasses.replace(self, language=plain(self.language), action_expert=plain(self.action_expert))

    def merge_lora(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """All parameters by path, LoRA's additions folded into the weights: `without_lora()` computes the same."""

        def scale(name: str) -> float:
            expert = "action" if "/action/" in name else "language"
            return 1.0 if "/mlp/" in name else self.experts[expert].lora.attention_scale

        return merge_lora(params, scale, lambda name: -3 if name.endswith("/output") else None)

    def num_tokens_seen(self, batch: ActionBatch, draws: int = 1) -> Int[Array, ""]:
        """Tokens of present images and of prompts, states and noisy actions."""
        observation = batch.observation
        images = sum((mask.sum() for mask in observation.image_masks.values()), start=jnp.int32(0))
        suffix = (draws * self.action_horizon + (0 if self.pi05 else 1)) * batch.row.shape[0]
        return images * self.siglip.num_tokens(self.image_size) + observation.prompt_mask.sum() + suffix

    def check_tensor(self, tensor_devices: int) -> list[str]:
        language, action = self.experts.values()
        sizes = {
            "num_heads": language.num_heads,
            "language.mlp_dim": language.mlp_dim,
            "action_expert.mlp_dim": action.mlp_dim,
            "siglip.num_heads": self.siglip.num_heads,
            "siglip.mlp_dim": self.siglip.mlp_dim,
        }
        return check_sizes(sizes, tensor_devices)
