"""The interface of practice: what a run that learns from its own attempts does besides its steps.

    Practice       the config: a field of the experiment
    Actor          makes attempts with the current parameters: completions of prompts, episodes of a robot
    Attempts       what came of them

An iteration is one collection of attempts, and then the optimizer steps that learn from it. A context is what attempts
begin with: a prompt, a task and its initial state. Attempts at one context are a group. Read next: `practice_feed.py`,
which does all that texts and robots have in common; `text_practice.py`.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from openpi_train.data.core.interface import OpenedData
from openpi_train.evaluation.measure import Running
from openpi_train.fields import at_least
from openpi_train.generation.generation_size import GenerationSize
from openpi_train.parallel.params import Params
from openpi_train.practice.estimator import AdvantageEstimator
from openpi_train.practice.local_columns import LocalColumns, joined_columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempts:
    """Attempts, those at a context beside each other. All processes hold equal ones, but for `local`.

    `rewards` are NaN where there is none. `outcomes` are the part of the reward that says what was achieved, without
    terms that shape how: by these a group is mixed or not. `is_cut` marks attempts that were ended by a limit.
    `mask` marks the units that the policy chose. `columns` and `local` say what it did, and have `sampling_log_probs`
    [n, u], the units' log-probabilities as the sampler computed them. `parts` are other numbers of each attempt, for
    the log; those that are NaN are not of its kind.
    """

    contexts: np.ndarray
    rewards: np.ndarray
    outcomes: np.ndarray
    is_cut: np.ndarray
    mask: np.ndarray
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    local: LocalColumns | None = None
    parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rewards)

    def taken(self, numbers: np.ndarray) -> "Attempts":
        """These attempts, in this order."""

        def of(value: Any) -> Any:
            match value:
                case None:
                    return None
                case LocalColumns():
                    return value.taken(numbers)
                case Mapping():
                    return {name: one[numbers] for name, one in value.items()}
            return value[numbers]

        return Attempts(**{field.name: of(getattr(self, field.name)) for field in dataclasses.fields(self)})


def joined_attempts(parts: Sequence[Attempts]) -> Attempts:
    """All of these attempts, in order."""

    def of(values: Sequence[Any]) -> Any:
        match values[0]:
            case None:
                return None
            case LocalColumns():
                return joined_columns(values)
            case Mapping():
                return {name: np.concatenate([value[name] for value in values]) for name in values[0]}
        return np.concatenate(values)

    names = [field.name for field in dataclasses.fields(Attempts)]
    return Attempts(**{name: of([getattr(part, name) for part in parts]) for name in names})


class Actor(abc.ABC):
    """Makes attempts. All processes call it together."""

    # What attempts depend on besides seed, parameters and the practice's own config, as JSON.
    identity: Mapping[str, Any]
    # Attempt n can take the place of attempt m if n - m is a multiple of this (`LocalColumns.batch_size`).
    num_lanes: int = 1

    @abc.abstractmethod
    def context(self, draw: int) -> int:
        """The number of the context that is drawn as the `draw`-th of an endless, reshuffled pass."""

    def begin_iteration(self, number: int) -> None:  # noqa: B027
        """The iteration of this number begins: its waves follow. Default: nothing."""

    def end_iteration(self) -> None:  # noqa: B027
        """The iteration has all its attempts. Default: nothing."""

    @abc.abstractmethod
    def act(self, params: Params, draws: Sequence[int], group_size: int) -> Attempts:
        """`group_size` attempts at the context of each draw, with these parameters by path.

        All randomness comes from the run's seed, the draw and the number of the attempt. The parameters must not be
        kept: the step donates their memory. Raises DataError if an attempt cannot be judged, StoppedError in all
        processes if they agreed to stop meanwhile.
        """

    @abc.abstractmethod
    def traces(self, columns: Mapping[str, Any]) -> Any:
        """The traces, as the objective's law takes them, of the named entries of attempts and `row`."""

    def metrics(self) -> Mapping[str, float]:
        """What else to log of the last iteration, by the names in `metrics.jsonl`: times only. Default: nothing."""
        return {}

    def demonstrations(self, columns: Mapping[str, Any]) -> Any:
        """The demonstrations beside attempts, `PracticeBatch.demonstrations`, of their named entries; default: none."""
        del columns
        return None

    def describe(self, attempts: Attempts, number: int) -> str:
        """A readable description of an attempt."""
        return f"attempt at context {attempts.contexts[number]}, reward {attempts.rewards[number]:g}"

    def pictures(self, attempts: Attempts, number: int) -> Sequence[Mapping[str, np.ndarray]]:
        """What was seen in an attempt, from the first picture to the last: uint8 [height, width, 3] by camera.

        Empty if nothing was, or if another process has it.
        """
        del attempts, number
        return ()

    def close(self) -> None:  # noqa: B027
        """Release threads, processes and files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Practice(abc.ABC):
    """Config of how a run makes attempts, and learns from them."""

    # Whether contexts are samples of the data, so that --num-epochs counts passes over them.
    takes_samples: ClassVar[bool] = False

    # Groups of an iteration: attempts at so many contexts.
    num_groups: int = at_least(1, 32)
    # Attempts at each context.
    group_size: int = at_least(1, 8)
    # How often an iteration's attempts are learnt from. An iteration has epochs x num_groups x group_size / batch_size
    # optimizer steps.
    epochs: int = at_least(1, 1)
    # How rewards become advantages.
    advantages: AdvantageEstimator = dataclasses.field(default_factory=AdvantageEstimator)
    # Learn only from groups whose outcomes differ, and make attempts at further contexts in place of the others
    # (dynamic sampling).
    mixed_only: bool = False
    # The most times that num_groups contexts are drawn in an iteration, for mixed_only.
    max_waves: int = at_least(1, 4)
    # A context whose last attempts all had an outcome of at least 1 is passed over so many times before it is drawn
    # again.
    skip_solved: int = at_least(0, 0)
    # Do not learn from attempts that were ended by a limit. They stay in their group's baseline.
    mask_cut: bool = False
    # Attempts of an iteration that are kept to look at, in attempts/<iteration> of the run: the best and the worst of
    # some groups.
    num_shown: int = at_least(0, 4)
    # Iterations from one whose attempts are kept to look at to the next. The first one's are.
    show_interval: int = at_least(1, 10)

    @property
    def num_attempts(self) -> int:
        """The attempts that an iteration learns from."""
        return self.num_groups * self.group_size

    def steps_per_iteration(self, batch_size: int) -> int:
        """The optimizer steps of an iteration."""
        return self.epochs * self.num_attempts // batch_size

    def num_contexts(self, data: Any, opened: OpenedData) -> int:
        """The contexts of a pass over the data. Only of a practice that takes samples."""
        del data
        return opened.num_samples

    def check(self, *, objective: Any, model: Any, data: Any, batch_size: int) -> list[str]:
        """Invalid settings, as sentences that name the flag to change."""
        problems = [f"--practice.advantages: {problem}" for problem in self.advantages.check(self.num_attempts)]
        if self.num_attempts % batch_size:
            problems.append(
                f"--practice.num-groups {self.num_groups} x --practice.group-size {self.group_size} is "
                f"{self.num_attempts} attempts, which --batch-size {batch_size} does not divide"
            )
        if self.advantages.needs_groups and self.group_size == 1:
            problems.append(
                f"--practice.advantages.kind {self.advantages.kind} compares attempts at the same context, and "
                "--practice.group-size is 1: every advantage would be 0. Give at least 2"
            )
        if self.mixed_only and self.group_size == 1:
            problems.append("--practice.mixed-only with --practice.group-size 1: no group would be mixed")
        if self.advantages.kl_weight and getattr(objective, "kl_weight", 0):
            problems.append(
                "--practice.advantages.kl-weight and --objective.kl-weight hold the policy to its reference twice: "
                "give one of them"
            )
        needs = {"reference"} if self.advantages.kl_weight else set()
        if self.advantages.needs_values:
            needs.add("value")
            if not getattr(objective, "value_weight", 0):
                problems.append(
                    "--practice.advantages.kind gae needs a critic: an ActorCriticConfig as the model and "
                    "--objective.value-weight, such as 0.1, as arithmetic_ppo has; robots' policies have none"
                )
        return problems + model.check_objective(type(objective).__name__, frozenset(needs - objective.needed))

    def require(self) -> None:  # noqa: B027
        """Raise UsageError for a package that acting needs and that is not installed (default: none is)."""

    @abc.abstractmethod
    def batch_spec(self, *, objective: Any, model: Any, data: Any, opened: OpenedData | None, batch_size: int) -> Any:
        """The batch that the objective takes, as a tree of `jax.ShapeDtypeStruct`; without opened data, the largest."""

    def generation_size(self, model: Any, data: Any) -> GenerationSize | None:
        """The most texts that a device generates at a time for attempts. Default: none."""
        del model, data
        return None

    @abc.abstractmethod
    def actor(self, running: Running, data: Any) -> Actor:
        """Who acts in this run. Raises DataError or UsageError if nothing can be done with its data."""
