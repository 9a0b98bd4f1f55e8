"""The config of the PaliGemma policy with a flow-matching head (S4's VLA): sizes, transforms and frozen parameters.

Its backbone is published PaliGemma's (224, 448 or 896 pixels); `models/paligemma/paligemma_torch.py` reads its files.
Read next: `paligemma_network.py`, `docs/understand/robot_policies.md`.
"""

import dataclasses
from typing import ClassVar

from flax import nnx

from openpi_train.models import prompted
from openpi_train.models.model_config import below_one
from openpi_train.models.paligemma.paligemma_network import PaliGemmaFlow
from openpi_train.models.param_rules import ParamRules
from openpi_train.models.pi0 import pi0_names
from openpi_train.models.row_text import PromptText
from openpi_train.nn.gemma_sizes import GemmaConfig, GemmaOverrides

_BACKBONE = "backbone/"
# Names that `--freeze` takes in addition to patterns.
_GROUPS = {
    "vision": f"{_BACKBONE}image_encoder/.*",
    "language": f"{_BACKBONE}transformer/.*",
    "backbone": f"{_BACKBONE}.*",
    "head": "head/.*",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaliGemmaFlowConfig(prompted.GemmaPolicyConfig):
    """A PaliGemma backbone and a flow head on its last activations. Any size can be changed by itself:
    `--model.paligemma-variant dummy --model.language.width 128 --model.head.depth 2`.

    Head only: `--freeze backbone`. Low-rank adapters in the backbone, all else in it frozen: `gemma_2b_lora`.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample"})

    # Steps of an action chunk.
    action_horizon: int = 50
    # Maximum number of prompt tokens; rows are as long as the run's longest prompt.
    max_token_len: int = 48
    # Named sizes of the flow head.
    head_variant: str = "gemma_300m"
    # Sizes of the flow head that differ from its variant's.
    head: GemmaOverrides = dataclasses.field(default_factory=GemmaOverrides)

    def problems(self) -> list[str]:
        problems = self.siglip.check(self.image_size)
        problems += below_one(self, "action_dim", "action_horizon", "max_token_len", "vocab_size")
        for part, sizes in self.decoders.items():
            problems += sizes.check(part)
        if self.decoders["head"].lora.enabled:
            problems.append("the head has no start weights for low-rank factors; use a plain variant")
        return problems

    @property
    def decoders(self) -> dict[str, GemmaConfig]:
        return {
            "language": self.language.apply(self.paligemma_variant),
            "head": self.head.apply(self.head_variant),
        }

    @property
    def text(self) -> PromptText:
        return PromptText(limit=self.max_token_len, with_state=False)

    def build(self, rngs: nnx.Rngs) -> PaliGemmaFlow:
        compute = self.compute
        return PaliGemmaFlow(
            **self.decoders,
            siglip=self.siglip,
            image_size=self.image_size,
            vocab_size=self.vocab_size,
            action_dim=self.action_dim,
            action_horizon=self.action_horizon,
            dtype=compute.dtype,
            remat=compute.remat,
            attention=self.attention,
            rngs=rngs,
        )

    @property
    def param_rules(self) -> ParamRules:
        return ParamRules(
            public_name=_public_name,
            groups=_GROUPS,
            frozen=self._frozen,
            explain=_explain,
            merge_lora=self._merge_lora,
        )

    def _frozen(self, path: str) -> bool:
        """With low-rank adapters, the whole backbone except the adapters is frozen, including the image tower."""
        is_factor = path.endswith(("/lora_a", "/lora_b"))
        return self.decoders["language"].lora.enabled and path.startswith(_BACKBONE) and not is_factor

    def num_suffix_tokens(self, draws: int) -> int:
        return draws * self.action_horizon + 1


def _public_name(path: str) -> str:
    """openpi's and big_vision's name for the backbone's parameters; the head's keep their own."""
    return pi0_names.public_name(path.removeprefix(_BACKBONE)) if path.startswith(_BACKBONE) else path


def _explain(missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
    """Advice for a checkpoint of other sizes."""
    del missing, extra
    found = []
    if any(name.endswith("/pos_embedding") for name in misshapen):
        found.append("it is for images of another size: --model.image-size 224, 448 or 896, as its name says")
    elif any(name.startswith("PaliGemma/img/") for name in misshapen):
        found.append("the image tower has other sizes: --model.siglip.width (also .depth, .mlp-dim, .num-heads)")
    if any(name.startswith("PaliGemma/llm/") for name in misshapen):
        found.append(
            "the language model has other sizes: --model.paligemma-variant, --model.language.width (also .depth, "
            ".mlp-dim, .num-heads, .num-kv-heads, .head-dim), --model.vocab-size"
        )
    if any(name.startswith("head/") for name in misshapen):
        found.append("the head has other sizes: --model.head-variant, --model.head, --model.action-dim")
    return found
