"""The interface of reinforcement learning: what a run that learns from its own rollouts does besides its steps.

    RLConfig   a field of the experiment, `rl`
    Actor      makes rollouts with the current parameters: completions of prompts, episodes of a robot
    Rollouts   what came of them

An iteration is one collection of rollouts, and then the optimizer steps that learn from it. A prompt is what rollouts
begin with: of texts the prompt, of robots a task and its initial state. Rollouts at one prompt are a group. Read next:
`rollout_feed.py`, which does all that texts and robots have in common; `text_rl.py`.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from openpi_train.data.core.interface import Data, OpenedData
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.fields import at_least
from openpi_train.generation.generation_size import GenerationSize
from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.objective import Objective
from openpi_train.objectives.policy_objective import PolicyObjective
from openpi_train.parallel.params import Params
from openpi_train.rl.estimator import AdvantageEstimator, Decisions
from openpi_train.rl.local_columns import LocalColumns, joined_columns
from openpi_train.types import Batch, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Rollouts, those at a prompt beside each other. All processes hold equal ones, but for `local`.

    `rewards` are NaN where there is none. `outcomes` are the part of the reward that says what was achieved, without
    terms that shape how: by these a group is mixed or not. `is_cut` marks rollouts that were ended by a limit.
    `mask` marks the units that the policy chose. `columns` and `local` say what it did, and have `sampling_log_probs`
    [n, u], the units' log-probabilities as the sampler computed them. `parts` are other numbers of each rollout, for
    the log; those that are NaN are not of its kind. `decisions` say what was earned when, of robots; None: all of it at
    the end.
    """

    prompt_ids: np.ndarray
    rewards: np.ndarray
    outcomes: np.ndarray
    is_cut: np.ndarray
    mask: np.ndarray
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    local: LocalColumns | None = None
    parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    decisions: Decisions | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    def taken(self, numbers: np.ndarray) -> "Rollouts":
        """These rollouts, in this order."""

        def of(value: Any) -> Any:
            match value:
                case None:
                    return None
                case LocalColumns():
                    return value.taken(numbers)
                case Decisions():
                    return Decisions(rewards=value.rewards[numbers], last_values=value.last_values[numbers])
                case Mapping():
                    return {name: one[numbers] for name, one in value.items()}
            return value[numbers]

        return Rollouts(**{field.name: of(getattr(self, field.name)) for field in dataclasses.fields(self)})


def joined_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """All of these rollouts, in order."""

    def of(values: Sequence[Any]) -> Any:
        match values[0]:
            case None:
                return None
            case LocalColumns():
                return joined_columns(values)
            case Decisions():
                return Decisions(
                    rewards=np.concatenate([value.rewards for value in values]),
                    last_values=np.concatenate([value.last_values for value in values]),
                )
            case Mapping():
                return {name: np.concatenate([value[name] for value in values]) for name in values[0]}
        return np.concatenate(values)

    names = [field.name for field in dataclasses.fields(Rollouts)]
    return Rollouts(**{name: of([getattr(part, name) for part in parts]) for name in names})


class Actor(abc.ABC):
    """Makes rollouts. All processes call it together."""

    # What rollouts depend on besides seed, parameters and the RL's own config, as JSON.
    identity: Mapping[str, Any]
    # Rollout n can take the place of rollout m if n - m is a multiple of this (`LocalColumns.batch_size`).
    num_lanes: int = 1

    @abc.abstractmethod
    def prompt_id(self, draw: int) -> int:
        """The number of the prompt that is drawn as the `draw`-th of an endless, reshuffled pass."""

    def begin_iteration(self, number: int) -> None:  # noqa: B027
        """The iteration of this number begins: its waves follow. Default: nothing."""

    def end_iteration(self) -> None:  # noqa: B027
        """The iteration has all its rollouts. Default: nothing."""

    @abc.abstractmethod
    def act(self, params: Params, draws: Sequence[int], group_size: int) -> Rollouts:
        """`group_size` rollouts at the prompt of each draw, with these parameters by path.

        All randomness comes from the run's seed, the draw and the number of the rollout. The parameters must not be
        kept: the step donates their memory. Raises DataError if a rollout cannot be judged, StoppedError in all
        processes if they agreed to stop meanwhile.
        """

    @abc.abstractmethod
    def traces(self, columns: Mapping[str, jax.Array]) -> Tree:
        """The traces, as the objective's distribution takes them, of the named entries of rollouts and `row`."""

    def metrics(self) -> Mapping[str, float]:
        """What else to log of the last iteration, by the names in `metrics.jsonl`: times only. Default: nothing."""
        return {}

    def demonstrations(self, columns: Mapping[str, jax.Array]) -> Tree:
        """The demonstrations beside rollouts, `RolloutBatch.demonstrations`, of their named entries; default: none."""
        del columns
        return None

    def describe(self, rollouts: Rollouts, number: int) -> str:
        """A readable description of a rollout."""
        return f"rollout at prompt {rollouts.prompt_ids[number]}, reward {rollouts.rewards[number]:g}"

    def shown(self, rollouts: Rollouts, number: int) -> Mapping[str, Any]:
        """What the line of a rollout that is kept to look at says of what was done, as JSON (`rollout_samples.py`)."""
        return {"units": int(rollouts.mask[number].sum()), "what": self.describe(rollouts, number)}

    def pictures(self, rollouts: Rollouts, number: int) -> Sequence[Mapping[str, np.ndarray]]:
        """What was seen in a rollout, from the first picture to the last: uint8 [height, width, 3] by camera.

        Empty if nothing was, or if another process has it.
        """
        del rollouts, number
        return ()

    def close(self) -> None:  # noqa: B027
        """Release threads, processes and files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(abc.ABC):
    """Config of how a run makes rollouts, and learns from them."""

    # Whether prompts are samples of the data, so that --num-epochs counts passes over them.
    takes_samples: ClassVar[bool] = False

    # Groups of an iteration: rollouts at so many prompts.
    num_groups: int = at_least(1, 32)
    # Rollouts at each prompt.
    group_size: int = at_least(1, 8)
    # How often an iteration's rollouts are learnt from. An iteration has epochs x num_groups x group_size / batch_size
    # optimizer steps.
    epochs: int = at_least(1, 1)
    # How rewards become advantages.
    advantages: AdvantageEstimator = dataclasses.field(default_factory=AdvantageEstimator)
    # Learn only from groups whose outcomes differ, and make rollouts at further prompts in place of the others
    # (dynamic sampling).
    mixed_only: bool = False
    # The most times that num_groups prompts are drawn in an iteration, for mixed_only.
    max_waves: int = at_least(1, 4)
    # A prompt whose last rollouts all had an outcome of at least 1 is passed over so many times before it is drawn
    # again.
    skip_solved: int = at_least(0, 0)
    # Do not learn from rollouts that were ended by a limit. They stay in their group's baseline.
    mask_cut: bool = False
    # Rollouts of an iteration that are kept to look at, in rollouts/<iteration> of the run: the best and the worst of
    # some groups.
    num_shown: int = at_least(0, 4)
    # Iterations from one whose rollouts are kept to look at to the next. The first one's are.
    show_interval: int = at_least(1, 10)

    @property
    def num_rollouts(self) -> int:
        """The rollouts that an iteration learns from."""
        return self.num_groups * self.group_size

    def steps_per_iteration(self, batch_size: int) -> int:
        """The optimizer steps of an iteration."""
        return self.epochs * self.num_rollouts // batch_size

    def num_prompts(self, data: Data, opened: OpenedData) -> int:
        """The prompts of a pass over the data. Only where `takes_samples`."""
        del data
        return opened.num_samples

    def check(self, *, objective: Objective, model: ModelConfig, data: Data, batch_size: int) -> list[str]:
        """Invalid settings, as sentences that name the flag to change."""
        problems = [f"--rl.advantages: {problem}" for problem in self.advantages.check(self.num_rollouts)]
        if self.num_rollouts % batch_size:
            problems.append(
                f"--rl.num-groups {self.num_groups} x --rl.group-size {self.group_size} is "
                f"{self.num_rollouts} rollouts, which --batch-size {batch_size} does not divide"
            )
        if self.advantages.needs_groups and self.group_size == 1:
            problems.append(
                f"--rl.advantages.kind {self.advantages.kind} compares rollouts at the same prompt, and "
                "--rl.group-size is 1: every advantage would be 0. Give at least 2"
            )
        if self.mixed_only and self.group_size == 1:
            problems.append("--rl.mixed-only with --rl.group-size 1: no group would be mixed")
        learns = objective if isinstance(objective, PolicyObjective) else None
        if self.advantages.kl_weight and learns and learns.has_reference:
            problems.append(
                "--rl.advantages.kl-weight and --objective.kl-weight hold the policy to its reference twice: "
                "give one of them"
            )
        needs = {"reference"} if self.advantages.kl_weight else set()
        if self.advantages.needs_values:
            needs.add("value")
            if learns is None or not learns.has_critic:
                problems.append(
                    "--rl.advantages.kind gae needs a critic: --objective.value-weight, such as 0.5, and a model that "
                    "has one: an ActorCriticConfig, as in arithmetic_ppo, or a robot policy with --model.critic"
                )
        return problems + model.check_objective(type(objective).__name__, frozenset(needs - objective.needed))

    def require(self) -> None:  # noqa: B027
        """Raise UsageError for a package that acting needs and that is not installed (default: none is)."""

    @abc.abstractmethod
    def batch_spec(
        self, *, objective: Objective, model: ModelConfig, data: Data, opened: OpenedData | None, batch_size: int
    ) -> Batch:
        """The batch that the objective takes, as a tree of `jax.ShapeDtypeStruct`; without opened data, the largest."""

    def generation_size(self, model: ModelConfig, data: Data) -> GenerationSize | None:
        """The most texts that a device generates at a time for rollouts. Default: none."""
        del model, data
        return None

    @abc.abstractmethod
    def actor(self, running: EvaluationContext, data: Data) -> Actor:
        """Who acts in this run. Raises DataError or UsageError if nothing can be done with its data."""
