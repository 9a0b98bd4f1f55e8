"""The config of pi0 and pi0.5: sizes, published names, frozen parameters, host steps and FLOP counts.

Field names and defaults are openpi's where openpi has the field. Read next: `pi0_network.py` (the network itself),
`pi0_names.py`, `nn/gemma.py` for the variants.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from flax import nnx

from openpi_train.models import pi0_names, prompted
from openpi_train.models.pi0_network import Pi0
from openpi_train.models.row_text import PromptAndChunkText, PromptText, RowText
from openpi_train.nn.activations import Stack
from openpi_train.nn.gemma_sizes import GemmaConfig, GemmaOverrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pi0Config(prompted.PromptedConfig):
    """pi0, or pi0.5 with `pi05`. Any size of the named variants can be changed by itself:
    `--model.paligemma-variant dummy --model.language.width 128 --model.siglip.depth 2`.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample", "insulation"})

    # The flow time steers the action expert's norms, the state is spelled out in the prompt (pi0.5).
    pi05: bool = False
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
    # Named sizes of the action expert.
    action_expert_variant: str = "gemma_300m"
    # Sizes of the action expert that differ from its variant's.
    action_expert: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)

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
    def prompt_limit(self) -> int:
        """`max_token_len` with its default filled in."""
        if self.max_token_len is not None:
            return self.max_token_len
        if self.knowledge_insulation:
            return 300
        return 200 if self.pi05 else 48

    @property
    def text(self) -> RowText:
        said: Any = {"limit": self.prompt_limit, "with_state": self.state_in_prompt}
        if not self.knowledge_insulation:
            return PromptText(**said)
        return PromptAndChunkText(
            form="pi05",
            fast_tokenizer=self.fast_tokenizer,
            vocab_size=self.vocab_size,
            action_horizon=self.action_horizon,
            action_dim=self.action_dim,
            **said,
        )

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
        return self.decoder_of(path).lora.enabled

    def without_lora(self) -> prompted.PromptedConfig:
        return dataclasses.replace(super().without_lora(), action_expert=self.action_expert.without_lora())

    def decoder_of(self, path: str) -> GemmaConfig:
        return self.experts["action" if "action" in path.split("/") else "language"]

    def num_tokens(self, cameras: int, draws: int = 1) -> tuple[int, int]:
        """Tokens of one row: in the prefix (images, prompt) and in the suffix (state, `draws` noisy chunks)."""
        prefix = cameras * self.siglip.num_tokens(self.image_size) + self.prompt_length
        return prefix, draws * self.action_horizon + (0 if self.pi05 else 1)

    def num_suffix_tokens(self, draws: int) -> int:
        return draws * self.action_horizon + (0 if self.pi05 else 1)

    def flops_per_row(self, cameras: int, draws: int = 1) -> float:
        """Forward FLOPs for one row, two per multiply-add, in matrix products only, as a training step computes them.

        Args:
            cameras: camera slots that the run fills.
            draws: flow draws that share the row's prefix.
        """
        return self._flops_of_all_outputs(cameras, draws) - self.dead_prefix_flops(cameras, draws)

    def dead_prefix_flops(self, cameras: int, draws: int = 1) -> float:
        """What openpi computes beyond `flops_per_row`: the prefix in the last layer, past its keys and values."""
        if self.knowledge_insulation:
            return 0.0
        language, (prefix, suffix) = self.experts["language"], self.num_tokens(cameras, draws)
        seen = prefix if self.fixed_prefix else prefix + suffix
        attention = 4 * seen * language.num_heads * language.head_dim
        return prefix * (language.other_flops + attention)

    def _flops_of_all_outputs(self, cameras: int, draws: int) -> float:
        language, action = self.experts.values()
        prefix, suffix = self.num_tokens(cameras, draws)
        pairs = (prefix + suffix) ** 2
        said = 0.0
        if self.knowledge_insulation or self.fixed_prefix:
            pairs -= prefix * suffix
        if self.knowledge_insulation:
            said = prompted.scores_flops(self.prompt_length - 1, language.width, self.vocab_size)
        attention = 4 * pairs * language.num_heads * language.head_dim * language.depth
        width, steps = action.width, draws * self.action_horizon
        heads = 2 * steps * self.action_dim * width  # multiply-adds
        if self.pi05:
            num_norms = 2 * action.depth + 1
            heads += draws * width * width * (2 + 3 * num_norms)
        else:
            heads += self.action_dim * width + steps * 3 * width * width
        return (
            cameras * self.siglip.flops(self.image_size, language.width)
            + prefix * language.flops_per_token()
            + suffix * action.flops_per_token()
            + attention
            + said
            + 2 * heads
        )

    def activation_bytes_per_row(self, cameras: int, draws: int = 1, tensor_devices: int = 1) -> float:
        """Bytes alive for one row when most are, in the backward pass; an estimate from shapes and `remat`."""
        itemsize, total = self.compute_dtype.itemsize, 0.0
        if self.knowledge_insulation:
            total += prompted.scores_bytes(self.prompt_length - 1, self.vocab_size)
        if self.fixed_prefix:
            language = self.experts["language"]
            cached = 2 * language.depth * language.num_kv_heads * language.head_dim
            total += itemsize * cached * self.num_tokens(cameras)[0]
        for stack, attended_tokens, times in self._stacks(cameras, draws):
            total += times * stack.shared(tensor_devices).bytes(self.used_remat, itemsize, attended_tokens)
        return total

    def tensor_bytes_per_row(self, cameras: int, draws: int = 1, tensor_devices: int = 1) -> float:
        """An upper estimate: the last language layer makes less. Not counted: gradients of low-rank factors."""
        itemsize = self.compute_dtype.itemsize
        stacks = self._stacks(cameras, draws)
        return sum(times * stack.summed_bytes(self.used_remat, itemsize, tensor_devices) for stack, _, times in stacks)

    @property
    def shared_sizes(self) -> dict[str, int]:
        language, action = self.experts.values()
        return {
            "num_heads": language.num_heads,
            "language.mlp_dim": language.mlp_dim,
            "action_expert.mlp_dim": action.mlp_dim,
        }

    def _stacks(self, cameras: int, draws: int) -> list[tuple[Stack, int, int]]:
        """Its stacks of layers, with the tokens that every token may look at, and how often each runs for a row."""
        (language, action), (prefix, suffix) = self.experts.values(), self.num_tokens(cameras, draws)
        tokens = self.siglip.num_tokens(self.image_size)
        seen = prefix if self.fixed_prefix else prefix + suffix
        return [
            (Stack.of_decoder(language, prefix, has_backward=not self.fixed_prefix), seen, 1),
            (Stack.of_decoder(action, suffix), prefix + suffix, 1),
            (Stack.of_tower(self.siglip, tokens, has_backward="vision" not in self.fixed_groups), tokens, cameras),
        ]
