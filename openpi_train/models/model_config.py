"""What every model config promises.

Read next: `../families.py`, where families are registered; `pi0/pi0.py`; `objectives/objective.py`, for who calls the
built module.
"""

import abc
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from openpi_train.data.robot.normalize import Form
from openpi_train.data.robot.windows import WindowShape
from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer
from openpi_train.nn.attention import Attention, Heads
from openpi_train.parallel.params import ParamLeaves
from openpi_train.runtime.exits import UsageError
from openpi_train.types import OPENPI_SLOTS, Batch

Row = dict[str, Any]
RowTransform = Callable[[Row], Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """The frozen description of a model: everything needed to build it and to shape its batches.

    `provides` names what the built module can do, so that an objective's `needs` can be checked before anything is
    built: `velocity`, `denoise`, `sample`, `logits` (the module's `token_log_probs`), `insulation` (its
    `velocity_and_log_probs`), `reconstruction` (its `reconstruct`), `chunk_tokens` (its `sample_chunk` and
    `chunk_scores`), `token_scores` (activations of texts, by calling it, and their `scores`), `reference` (its
    `reference`, a fixed model with token scores), `rewards` (of a row's texts), `value`, `log_prob`.
    """

    provides: ClassVar[frozenset[str]] = frozenset()

    @property
    def compute_dtype(self) -> DTypeLike:
        """The type of activations in its stacks of layers, which read their weights in it."""
        return jnp.float32

    @property
    def needs_loss_scale(self) -> bool:
        """Whether the loss must be scaled up for the backward pass: gradients are float16 on their way."""
        return False

    @abc.abstractmethod
    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """A freshly initialised module, parameters in float32."""

    def leave_fixed(self, module: nnx.Module, groups: Collection[str]) -> None:
        """Tell `module`, freshly built, in which of the `parameter_groups` nothing trains (default: it need not know).

        Its outputs stay the same; it may leave out work for gradients that nothing asks for.
        """
        del module, groups

    def check_tensor(self, tensor_devices: int) -> list[str]:
        """Why the layers cannot be shared out over so many devices, as sentences; by default they cannot be at all."""
        if tensor_devices == 1:
            return []
        return [
            f"--sharding.tensor-devices {tensor_devices}: {type(self).__name__} has no layers that devices can share "
            "out; allowed: 1"
        ]

    def check_objective(self, name: str, needs: frozenset[str]) -> list[str]:
        """Why the objective of this name, which has these needs, cannot train this model, as sentences."""
        missing = needs - self.provides
        if not missing:
            return []
        return [
            f"objective {name} needs {', '.join(sorted(missing))}, which model {type(self).__name__} does not provide "
            f"(it has: {', '.join(sorted(self.provides))})"
        ]

    def num_tokens_seen(self, batch: Batch, draws: int = 1) -> Int[Array, ""] | None:
        """Tokens of a batch that others attend to, padding left out; None for a model of no tokens (the default)."""
        del batch, draws
        return None

    def remat_choices(self) -> Mapping[str | None, "ModelConfig"]:
        """This config under every rematerialisation policy that it leaves open, by name, least recomputation first.

        Default: the config itself, for a model without policies.
        """
        return {None: self}

    @property
    def attention_kind(self) -> Attention | None:
        """Who computes its attention (default: it has none, or no choice)."""
        return None

    @property
    def attention_heads(self) -> Sequence[Heads]:
        """The heads of all its attention, if it is left open who computes it (default: it is not)."""
        return ()

    def with_attention(self, kind: Attention) -> "ModelConfig":
        """This config with its attention computed so (default: it has none, or no choice)."""
        del kind
        return self

    @property
    def smaller_runs(self) -> Sequence[str]:
        """What else to train where a run needs more memory than there is, as sentences (default: nothing is known)."""
        return ()

    def public_name(self, path: str) -> str:
        """The name under which the parameter `path` is published in checkpoints (default: its own)."""
        return path

    def explain(self, missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
        """What the model can say of a checkpoint that does not fit it, as sentences with what to do.

        Of published names: those that the checkpoint lacks, those that the model does not know, those of other shapes.
        """
        del missing, extra, misshapen
        return []

    @property
    def base(self) -> "ModelConfig | None":
        """The model whose checkpoints this one starts from, beside its own (default: none)."""
        return None

    def from_base(self, params: ParamLeaves) -> dict[str, Any]:
        """The parameters by path with which this model starts, from those of `base`; the others are newly drawn."""
        return dict(params)

    def without_lora(self) -> "ModelConfig":
        """The config of the model that `merge_lora` gives the parameters of (default: the same)."""
        return self

    def merge_lora(self, params: ParamLeaves) -> dict[str, Any]:
        """Parameters by path with low-rank adapters folded into the weights; as they are where there are none."""
        return dict(params)

    @property
    def parameter_groups(self) -> Mapping[str, str]:
        """Names that `--freeze` takes beside patterns, each with the pattern of paths that it stands for."""
        return {}

    def frozen(self, path: str) -> bool:
        """Whether the model's own design keeps this parameter fixed (LoRA's base weights, for one)."""
        del path
        return False

    def frozen_dtype(self, path: str) -> DTypeLike:
        """The type in which a run keeps this parameter if it is frozen (default: bfloat16, as openpi does).

        Nothing updates a frozen parameter, so it needs no float32 master copy.
        """
        del path
        return jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(ModelConfig):
    """A model of robots' actions: what it sees around a control step, and how a robot's row becomes a row of its batch.

    Its batch is a `types.ActionBatch`.
    """

    # Whether a row's text reaches the model; one that reads none needs no tokenizer.
    reads_text: ClassVar[bool] = True

    # Control steps of an action chunk.
    action_horizon: int
    # Tokens that the model knows.
    vocab_size: int

    @property
    def window(self) -> WindowShape:
        """What the model sees and predicts around a control step: by default that step, and a chunk from it on."""
        return WindowShape(horizon=self.action_horizon)

    @property
    def known_slots(self) -> tuple[str, ...] | None:
        """The camera slots that `--data.robot` fills (default: openpi's); None: those that the robot has."""
        return OPENPI_SLOTS

    def for_robot(self, num_state_dims: int, num_action_dims: int, cameras: Sequence[str]) -> "PolicyConfig":
        """This config for a robot of so many dims with these camera slots (default: the same for every robot)."""
        del num_state_dims, num_action_dims, cameras
        return self

    @property
    def normalization(self) -> Form:
        """The form of normalisation that the model was designed for."""
        return "z_score"

    @abc.abstractmethod
    def batch_spec(self, batch_size: int, cameras: Sequence[str], text_length: int | None = None) -> Batch:
        """The batch as a tree of `jax.ShapeDtypeStruct`.

        `cameras` are the slots that the run's robots fill; `text_length` is the number of text tokens of a row, padding
        included. None: `text_limit`.
        """

    @abc.abstractmethod
    def transforms(self, tokenizer: PromptTokenizer, text_length: int | None = None) -> tuple[RowTransform, ...]:
        """The host steps from a normalised row to the arrays of `batch_spec`, in order (numpy in, numpy out)."""

    def check_dims(self, num_state_dims: int, num_action_dims: int) -> None:
        """Raise ValueError, with the flag to give, if the model takes no rows of so many dims (default: takes all)."""

    @property
    def text_limit(self) -> int | None:
        """The most text tokens of a row, padding included; None for a model without text (default)."""
        return None

    def text_length(self, tokenizer: PromptTokenizer, prompts: Iterable[tuple[str, int]]) -> int | None:
        """The text tokens of a row that the longest of these prompts needs (default: `text_limit`).

        Each prompt comes with the number of state dims of its robot. Padding beyond that length changes no result.
        """
        del tokenizer, prompts
        return self.text_limit

    def prompt_tokens(self, tokenizer: PromptTokenizer, prompt: str, num_state_dims: int) -> int:
        """The most tokens of a row's text with this instruction, but for those of its chunk (default: 0).

        `num_state_dims` are those of its robot. Asked for only where there is a `text_limit`.
        """
        del tokenizer, prompt, num_state_dims
        return 0

    @property
    def chunk_processor(self) -> str:
        """The FAST processor of its action tokens: a folder, or a name on the hub; empty: it has none (default)."""
        return ""

    def with_chunk_processor(self, path: str) -> "PolicyConfig":
        """This config with another FAST processor, if it has one."""
        del path
        return self

    def chunk_tokenizer(self, tokenizer: PromptTokenizer) -> Any:
        """What makes the tokens of a chunk with which a row's text goes on (a `FastTokenizer`); None: it does not."""
        del tokenizer
        return None


def as_policy(model: ModelConfig) -> PolicyConfig:
    """The model, where robots' actions are needed. Raises UsageError where it has none."""
    if not isinstance(model, PolicyConfig):
        raise UsageError(f"this is for robot policies, and {type(model).__name__} has no actions")
    return model
