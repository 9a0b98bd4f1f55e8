"""What every model config promises.

Read next: `../families.py`, where families are registered; `pi0/pi0.py`; `objectives/objective.py`, for who calls the
built module.
"""

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Int

from openpi_train.data.robot.row_format import RowFormat
from openpi_train.models.compute import Compute
from openpi_train.models.param_rules import ParamRules
from openpi_train.nn.attention import Attention
from openpi_train.parallel.remat import Remat
from openpi_train.runtime.exits import UsageError
from openpi_train.types import OPENPI_SLOTS, Batch

Row = dict[str, Any]
RowTransform = Callable[[Row], Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """The frozen description of a model: everything needed to build it and to shape its batches.

    A family writes its fields, `provides` and `build`, and `rows` of a policy; the rest has defaults. What belongs
    together is one value: `compute`, `param_rules`, `base`, `rows`.

    `provides` names what the built module can do, so that an objective's `needs` can be checked before anything is
    built: `velocity`, `denoise`, `sample`, `logits` (the module's `token_log_probs`), `insulation` (its
    `velocity_and_log_probs`), `reconstruction` (its `reconstruct`), `chunk_tokens` (its `sample_chunk` and
    `chunk_scores`), `token_scores` (activations of texts, by calling it, and their `scores`), `reference` (its
    `reference`, a fixed model with token scores), `rewards` (of a row's texts), `value` (its `values` of
    texts, or its `value` of what a robot saw), `return_logits` (of what a robot saw), `indicator` (a velocity is told
    how good its chunk is), `log_prob`.
    """

    provides: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """A freshly initialised module, parameters in float32."""

    def __post_init__(self):
        if problems := self.problems():
            raise ValueError(f"this {type(self).__name__} cannot be built: " + "; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong with its fields, as sentences; a config of which something is wrong is refused (ValueError)."""
        return []

    @property
    def compute(self) -> Compute:
        """How its layers compute (default: in float32, without anything to choose)."""
        return Compute()

    def with_compute(self, *, remat: Remat | None = None, attention: Attention | None = None) -> "ModelConfig":
        """This config with another of its `compute.remat_choices`, or its attention computed so; None: as it is.

        Default: the same, for a model without such a choice.
        """
        del remat, attention
        return self

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

    @property
    def smaller_runs(self) -> Sequence[str]:
        """What else to train where a run needs more memory than there is, as sentences (default: nothing is known)."""
        return ()

    @property
    def start_advice(self) -> str:
        """What to do where no start weights are given, as a clause."""
        return "fine-tune with --weight-loader.params-path <checkpoint>/params"

    @property
    def param_rules(self) -> ParamRules:
        """What is known of its parameters: published names, groups, which stay fixed (default: nothing)."""
        return ParamRules()

    @property
    def base(self) -> "Base | None":
        """The model whose checkpoints this one starts from, beside its own (default: none)."""
        return None

    def without_lora(self) -> "ModelConfig":
        """The config of the model that `ParamRules.merge_lora` gives the parameters of (default: the same)."""
        return self

    def without_critic(self) -> "ModelConfig":
        """The config of the same model without a head that only training needs (default: the same)."""
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A model whose checkpoints start another one.

    Attributes:
        model: its config.
        start: the parameters by path with which the other one starts, from those of `model`; the rest is newly drawn.
    """

    model: ModelConfig
    start: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


@runtime_checkable
class KnowsFixed(Protocol):
    """A module that leaves out work for gradients that nothing asks for. Its outputs stay the same."""

    def leave_fixed(self, groups: Collection[str]) -> None:
        """Be told, when freshly built, in which of `ParamRules.groups` nothing trains."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(ModelConfig):
    """A model of robots' actions. Its batch is a `types.ActionBatch`."""

    # Control steps of an action chunk.
    action_horizon: int
    # Tokens that the model knows.
    vocab_size: int

    @property
    @abc.abstractmethod
    def rows(self) -> RowFormat:
        """What it sees around a control step, and how a robot's row becomes a row of its batch."""

    @property
    def known_slots(self) -> tuple[str, ...] | None:
        """The camera slots that `--data.robot` fills (default: openpi's); None: those that the robot has."""
        return OPENPI_SLOTS

    def for_robot(self, num_state_dims: int, num_action_dims: int, cameras: Sequence[str]) -> "PolicyConfig":
        """This config for a robot of so many dims with these camera slots (default: the same for every robot)."""
        del num_state_dims, num_action_dims, cameras
        return self

    @property
    def chunk_processor(self) -> str:
        """The FAST processor of its action tokens: a folder, or a name on the hub; empty: it has none (default)."""
        return ""

    def with_chunk_processor(self, path: str) -> "PolicyConfig":
        """This config with another FAST processor, if it has one."""
        del path
        return self


def below_one(config: ModelConfig, *names: str) -> list[str]:
    """Which of these numbers of a config are not at least 1, as sentences."""
    return [f"{name} {getattr(config, name)} must be at least 1" for name in names if getattr(config, name) < 1]


# What a model has only if a field of it is so large, by what objectives need: the field, its least value, and what an
# objective does with it.
_CHOSEN = {
    "indicator": ("indicator", 1, "tells the model how good a chunk was: give --model.indicator"),
    "value": ("critic", 1, "trains a critic (--objective.value-weight): give --model.critic"),
    "return_logits": ("return_bins", 2, "trains a distribution of returns: give --model.return-bins, such as 201"),
}


def check_chosen(model: ModelConfig, objective: str, needs: frozenset[str]) -> list[str]:
    """Why the objective of this name cannot train the model, which has these parts only by choice, as sentences."""
    return [
        f"objective {objective} {told}"
        for need, (field, least, told) in _CHOSEN.items()
        if need in needs and getattr(model, field) < least
    ]


def as_policy(model: ModelConfig) -> PolicyConfig:
    """The model, where robots' actions are needed. Raises UsageError where it has none."""
    if not isinstance(model, PolicyConfig):
        raise UsageError(f"this is for robot policies, and {type(model).__name__} has no actions")
    return model
