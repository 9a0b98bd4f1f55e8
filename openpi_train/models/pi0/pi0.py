"""The config of pi0 and pi0.5: sizes, published names, frozen parameters and transforms.

Field names and defaults are openpi's where openpi has the field. Cameras are those of the run's robots
(`Robot.cameras`). Read next: `pi0_network.py` (the network itself),
`pi0_names.py`, `nn/gemma.py` for the variants.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from flax import nnx

from openpi_train.fields import at_least
from openpi_train.models import prompted
from openpi_train.models.model_config import Base, below_one, check_chosen
from openpi_train.models.param_rules import ParamRules
from openpi_train.models.pi0 import pi0_names
from openpi_train.models.pi0.pi0_network import Pi0
from openpi_train.models.row_text import PromptAndChunkText, PromptText, RowText
from openpi_train.nn.gemma_sizes import GemmaConfig, GemmaOverrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pi0Config(prompted.GemmaPolicyConfig):
    """pi0, or pi0.5 with `pi05`. Any size of the named variants can be changed by itself:
    `--model.paligemma-variant dummy --model.language.width 128 --model.siglip.depth 2`.
    """

    provides: ClassVar[frozenset[str]] = frozenset(
        {"velocity", "sample", "insulation", "indicator", "action_times", "value", "return_logits"}
    )

    # pi0.5: the flow time modulates the action expert's norms, and the prompt contains the state.
    pi05: bool = False
    # Steps of an action chunk.
    action_horizon: int = 50
    # Maximum number of prompt tokens; None means 48, 200 with `pi05`, or 300, including the chunk's tokens, if
    # insulated.
    # Rows are as long as the run's longest prompt.
    max_token_len: int | None = None
    # Whether the prompt contains the discretised state; None: the same as `pi05`.
    discrete_state_input: bool | None = None
    # Velocities can be told whether their chunk is better than expected, by two learned vectors that are added to the
    # action tokens (with IndicatorFlow, as in tabletop_few_indicator, or AdvantageConditionedFlow). A start may lack
    # them.
    indicator: bool = False
    # A head says what the policy will earn, for RL with a critic (PolicyGradient with a value_weight above 0). A start
    # may lack it.
    critic: bool = False
    # A head says how likely each of so many returns is (ReturnDistribution; RECAP has 201); 0: there is none. A start
    # may lack it.
    return_bins: int = at_least(0, 0)
    # Stop gradients from the action expert into the language model, which learns to predict the chunk as FAST
    # tokens
    # (with the objective InsulatedFlow, as in pi05_bridge_insulated).
    knowledge_insulation: bool = False
    # FAST processor for knowledge insulation: a directory, or a repository on the Hugging Face hub.
    fast_tokenizer: str = "physical-intelligence/fast"
    # Named sizes of the action expert.
    action_expert_variant: str = "gemma_300m"
    # Sizes of the action expert that differ from its variant's.
    action_expert: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)

    @property
    def smaller_runs(self) -> Sequence[str]:
        if (self.paligemma_variant, self.action_expert_variant) != ("gemma_2b", "gemma_300m"):
            return ()
        flags = "--model.paligemma-variant gemma_2b_lora --model.action-expert-variant gemma_300m_lora --ema-decay None"
        return (f"train low-rank adapters only, as {'pi05_lora' if self.pi05 else 'pi0_lora'}: {flags}",)

    def problems(self) -> list[str]:
        language, action = self.experts.values()
        problems = self.siglip.check(self.image_size)
        problems += below_one(self, "action_dim", "action_horizon", "prompt_limit", "vocab_size")
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            first, second = getattr(language, name), getattr(action, name)
            if first != second:
                problems.append(f"the experts attend jointly but {name} is {first} in `language`, {second} in `action`")
        for expert, config in self.experts.items():
            problems += config.check(expert)
        if self.knowledge_insulation and not self.pi05:
            problems.append("knowledge_insulation needs pi0.5's prompt, which contains the state: also set pi05")
        return problems

    @property
    def experts(self) -> dict[str, GemmaConfig]:
        """The sizes of both experts, overrides applied."""
        return {
            "language": self.language.apply(self.paligemma_variant),
            "action": self.action_expert.apply(self.action_expert_variant),
        }

    @property
    def decoders(self) -> dict[str, GemmaConfig]:
        """The experts, which attend jointly."""
        return {"language": self.experts["language"], "action_expert": self.experts["action"]}

    @property
    def chunk_processor(self) -> str:
        return self.fast_tokenizer

    def with_chunk_processor(self, path: str) -> "Pi0Config":
        return dataclasses.replace(self, fast_tokenizer=path)

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
    def rows(self) -> prompted.PromptedRows:
        return dataclasses.replace(super().rows, normalization="quantile" if self.pi05 else "z_score")

    def build(self, rngs: nnx.Rngs) -> Pi0:
        experts, compute = self.experts, self.compute
        return Pi0(
            language=experts["language"],
            action=experts["action"],
            siglip=self.siglip,
            image_size=self.image_size,
            vocab_size=self.vocab_size,
            action_dim=self.action_dim,
            action_horizon=self.action_horizon,
            adaptive=self.pi05,
            indicator=self.indicator,
            critic=self.critic,
            return_bins=self.return_bins,
            insulated=self.knowledge_insulation,
            dtype=compute.dtype,
            remat=compute.remat,
            attention=self.attention,
            rngs=rngs,
        )

    def check_objective(self, name: str, needs: frozenset[str]) -> list[str]:
        problems = super().check_objective(name, needs)
        if self.knowledge_insulation and "insulation" not in needs:
            problems.append(
                f"--model.knowledge-insulation with objective {name}: the gradient does not reach the language model, "
                "which nothing would train; use InsulatedFlow (as pi05_bridge_insulated does), or leave the flag out"
            )
        problems += check_chosen(self, name, needs)
        if "insulation" in needs and not self.knowledge_insulation:
            problems.append(
                f"objective {name} trains the language model by action tokens, which rows have only with "
                "--model.knowledge-insulation: give that, or use FlowMatching (as pi05_bridge does)"
            )
        return problems

    @property
    def base(self) -> Base | None:
        """The same model without the indicator, whose vectors start at 0, and without heads for values."""
        plain = dataclasses.replace(self.without_critic(), indicator=False)
        return None if plain == self else Base(model=plain)

    @property
    def param_rules(self) -> ParamRules:
        return ParamRules(
            public_name=pi0_names.public_name,
            groups=pi0_names.GROUPS,
            frozen=self._frozen,
            explain=functools.partial(pi0_names.explain, self.pi05),
            merge_lora=self._merge_lora,
        )

    def _frozen(self, path: str) -> bool:
        """An expert with LoRA is frozen except its factors (as openpi's `get_freeze_filter`); images and heads
        train."""
        parts = path.split("/")
        if parts[0] != "transformer" or parts[-1] in ("lora_a", "lora_b"):
            return False
        return self.decoder_of(path).lora.enabled

    def without_lora(self) -> prompted.GemmaPolicyConfig:
        return dataclasses.replace(super().without_lora(), action_expert=self.action_expert.without_lora())

    def without_critic(self) -> "Pi0Config":
        return dataclasses.replace(self, critic=False, return_bins=0)

    def decoder_of(self, path: str) -> GemmaConfig:
        return self.experts["action" if "action" in path.split("/") else "language"]

    def num_suffix_tokens(self, draws: int) -> int:
        return draws * self.action_horizon + (0 if self.pi05 else 1)
