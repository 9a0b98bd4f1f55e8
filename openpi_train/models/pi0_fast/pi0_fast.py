"""The config of pi0-FAST: sizes, published names, frozen parameters and transforms.

Field names and defaults are openpi's where openpi has the field. Read next: `pi0_fast_network.py`,
`data/robot/action_prompt.py` for the tokens of a row, `docs/understand/robot_policies.md`.
"""

import dataclasses
import math
from typing import ClassVar

from flax import nnx
from jaxtyping import Array, Int

from openpi_train.models import prompted
from openpi_train.models.model_config import below_one
from openpi_train.models.param_rules import ParamRules
from openpi_train.models.pi0 import pi0_names
from openpi_train.models.pi0_fast.action_tokens import ActionTokens
from openpi_train.models.pi0_fast.pi0_fast_network import Decoding, Pi0Fast
from openpi_train.models.row_text import PromptAndChunkText
from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.types import ActionBatch, RolloutBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pi0FastConfig(prompted.GemmaPolicyConfig):
    """pi0-FAST. Any size of the named variants can be changed by itself: `--model.language.width 128`."""

    provides: ClassVar[frozenset[str]] = frozenset({"logits", "sample", "chunk_tokens"})

    # Dims of an action; set it to the robot's, since every extra dim costs tokens.
    action_dim: int = 32
    # Steps of an action chunk.
    action_horizon: int = 32
    # Maximum tokens of a row: prompt, state and chunk. Longer rows are truncated, with a warning.
    max_token_len: int = 250
    # A FAST processor: a directory, or a repository on the Hugging Face hub.
    fast_tokenizer: str = "physical-intelligence/fast"
    # Maximum number of tokens of a decoded action chunk.
    max_decoding_steps: int = 256
    # Positions and attention of decoded tokens: as in training, or as in openpi's decoding, which skips one
    # position and those of masked images, and does not attend to the first tokens if an image is masked.
    decoding: Decoding = "as_trained"
    # Camera slots that take positions, whether or not a robot fills them.
    camera_slots: tuple[str, ...] = ("base_0_rgb", "base_1_rgb", "wrist_0_rgb")
    # Slots that no robot fills are black pictures, which the model attends to, as openpi trains; otherwise they cost
    # nothing.
    black_cameras: bool = False

    def problems(self) -> list[str]:
        problems = self.siglip.check(self.image_size) + self.sizes.check("language")
        problems += below_one(self, "action_dim", "action_horizon", "max_token_len", "max_decoding_steps", "vocab_size")
        return problems

    @property
    def sizes(self) -> GemmaConfig:
        """The language model's sizes, overrides applied."""
        return self.language.apply(self.paligemma_variant)

    @property
    def decoders(self) -> dict[str, GemmaConfig]:
        return {"language": self.sizes}

    @property
    def text(self) -> PromptAndChunkText:
        return PromptAndChunkText(
            form="pi0_fast",
            limit=self.max_token_len,
            with_state=True,
            fast_tokenizer=self.fast_tokenizer,
            vocab_size=self.vocab_size,
            action_horizon=self.action_horizon,
            action_dim=self.action_dim,
        )

    @property
    def known_slots(self) -> tuple[str, ...]:
        return self.camera_slots

    @property
    def chunk_processor(self) -> str:
        return self.fast_tokenizer

    def with_chunk_processor(self, path: str) -> "Pi0FastConfig":
        return dataclasses.replace(self, fast_tokenizer=path)

    @property
    def rows(self) -> prompted.PromptedRows:
        return dataclasses.replace(super().rows, normalization="quantile", slots=self.camera_slots)

    def build(self, rngs: nnx.Rngs) -> Pi0Fast:
        compute = self.compute
        return Pi0Fast(
            language=self.sizes,
            siglip=self.siglip,
            image_size=self.image_size,
            vocab_size=self.vocab_size,
            slots=self.camera_slots,
            black_slots=self.camera_slots if self.black_cameras else (),
            dtype=compute.dtype,
            decoding=self.decoding,
            max_decoded_tokens=self.max_decoding_steps,
            read_actions=ActionTokens(self.fast_tokenizer, self.vocab_size, self.action_horizon, self.action_dim),
            remat=compute.remat,
            attention=self.attention,
            rngs=rngs,
        )

    def num_tokens_seen(self, batch: ActionBatch | RolloutBatch, draws: int = 1) -> Int[Array, ""]:
        seen = batch.observation
        absent = len(set(self.camera_slots) - set(seen.images)) if self.black_cameras else 0
        black = absent * self.siglip.num_tokens(self.image_size) * math.prod(seen.prompt_mask.shape[:-1])
        return super().num_tokens_seen(batch, draws) + black

    @property
    def param_rules(self) -> ParamRules:
        return ParamRules(
            public_name=pi0_names.public_name,
            groups=pi0_names.GROUPS,
            frozen=self._frozen,
            explain=lambda missing, extra, misshapen: pi0_names.explain_fast(extra, misshapen),
            merge_lora=self._merge_lora,
        )

    def _frozen(self, path: str) -> bool:
        """With LoRA the language model is frozen except the factors (as openpi's `get_freeze_filter`)."""
        root, *_, leaf = path.split("/")
        return self.sizes.lora.enabled and root == "transformer" and leaf not in ("lora_a", "lora_b")
