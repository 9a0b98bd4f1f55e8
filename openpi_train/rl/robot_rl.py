"""`RobotRL`: a robot policy acts in an environment and learns from the outcome. Read next: `robot_actor.py`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from openpi_train.data.core.interface import Data, OpenedData
from openpi_train.data.robot.config import DataConfig
from openpi_train.envs.env import Env, NoEnv
from openpi_train.envs.in_processes import ProcessEnv
from openpi_train.envs.task_choice import chosen_tasks
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.fields import at_least, setting
from openpi_train.models.model_config import ModelConfig, PolicyConfig
from openpi_train.objectives.objective import Objective
from openpi_train.objectives.policy_objective import PolicyObjective, distribution_of
from openpi_train.rl.rollouts import Actor, RLConfig
from openpi_train.sampling.action_distribution import ActionDistribution
from openpi_train.sampling.action_token_distribution import ActionTokenDistribution
from openpi_train.sampling.denoising_distribution import DenoisingDistribution
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.types import RolloutBatch, Tree, tree_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobotRL(RLConfig):
    """Episodes in an environment, rewarded with 1 for success, and as the environment itself does.

    The data's robot and norm stats are used; its demonstrations are learnt from with `num_demonstrations` alone.
    """

    # The environment to act in.
    env: Env = dataclasses.field(default_factory=NoEnv)
    # Its tasks that it learns, by name or by number from 0; None: all.
    tasks: tuple[str, ...] | None = None
    # Initial states of each task; None: new ones for ever.
    states_per_task: int | None = at_least(1, None)
    # Number of actions of each chunk that are executed before the next query; None: the model's own number.
    execute: int | None = at_least(1, None)
    # Control steps after which an episode counts as failed; None: the environment's own limit.
    max_steps: int | None = at_least(1, None)
    # Weight of the environment's own rewards, summed up until success or the end, beside success. Groups are mixed or
    # not by success alone.
    dense_weight: float = 0.0
    # An episode that the limit of control steps ends is cut, not over: gae goes on with what the critic expects then.
    # Without, the limit is part of the task: nothing follows it, as nothing follows success.
    bootstrap: bool = True
    # Number of episodes on one device at a time.
    episodes_per_device: int = at_least(1, 16)
    # Batches of so many episodes that are under way at a time: with 2 the policy acts for one while the simulators of
    # the other step. None: 2 where the environment is in worker processes (ProcessEnv), else 1.
    num_slots: int | None = at_least(1, None, on_resume="accept")
    # Chunks of the run's demonstrations that are learnt from beside each rollout, by an objective that does so
    # (IndicatorFlow).
    num_demonstrations: int = at_least(0, 0)
    # Number of the run's dataset whose robot and norm stats are used.
    dataset: int = at_least(0, 0)
    # Folder in which the episodes are kept as a LeRobot dataset; None: they are not kept.
    keep: str | None = setting(None, on_resume="accept")
    # Keep the episodes of the first iteration and of every so many.
    keep_every: int = at_least(1, 1, on_resume="accept")
    # Keep episodes without success, too.
    keep_failed: bool = setting(True, on_resume="accept")

    def check(self, *, objective: Objective, model: ModelConfig, data: Data, batch_size: int) -> list[str]:
        problems = super().check(objective=objective, model=model, data=data, batch_size=batch_size)
        if not isinstance(data, DataConfig) or not isinstance(model, PolicyConfig):
            return [
                *problems,
                "RobotRL needs a robot policy and a robot's data, for its units and norm stats; the run's are "
                f"{type(model).__name__} and {type(data).__name__}",
            ]
        distribution = distribution_of(objective)
        if not isinstance(distribution, ActionDistribution):
            problems.append(f"RobotRL needs an objective whose distribution draws actions: {_distributions_of(model)}")
        elif not distribution.needed <= model.provides:
            problems.append(
                f"{type(distribution).__name__} is no distribution of a {type(model).__name__}: "
                f"{_distributions_of(model)}"
            )
        takes_them = isinstance(objective, PolicyObjective) and objective.uses_demonstrations
        if self.num_demonstrations and not takes_them:
            problems.append(
                f"--rl.num-demonstrations {self.num_demonstrations}: {type(objective).__name__} learns from own "
                "rollouts only; give 0, or the objective IndicatorFlow"
            )
        if not self.env.tasks:
            problems.append("--rl.env has no task: there is nothing to learn from rollouts")
        else:
            problems += self._check_tasks()
        if self.dense_weight and not self.env.has_reward:
            problems.append(
                f"--rl.dense-weight {self.dense_weight}: {type(self.env).__name__} has no rewards but success; give 0"
            )
        ahead = model.rows.window.num_ahead
        if self.execute is not None and self.execute > ahead:
            problems.append(f"--rl.execute {self.execute}: a chunk has {ahead} actions from the present step on")
        if self.mixed_only and batch_size % self.group_size:
            problems.append(
                f"--rl.mixed-only: --batch-size {batch_size} is not a multiple of --rl.group-size "
                f"{self.group_size}; a group, whose pictures stay where they are, must be in one batch"
            )
        if self.skip_solved and self.states_per_task is None:
            problems.append(
                f"--rl.skip-solved {self.skip_solved} passes over initial states that were solved, and no state "
                "is drawn twice: give --rl.states-per-task"
            )
        if self.num_slots is not None and self.num_slots > (2 if isinstance(self.env, ProcessEnv) else 1):
            problems.append(
                f"--rl.num-slots {self.num_slots}: an environment in worker processes (ProcessEnv) has 1 or 2, "
                "any other has 1"
            )
        if self.keep is not None and self.env.control_hz % 1:
            problems.append(
                f"--rl.keep {self.keep}: {type(self.env).__name__} has {self.env.control_hz:g} control steps per "
                "second, and LeRobot's format needs a whole number: leave --rl.keep out"
            )
        return problems

    def _check_tasks(self) -> list[str]:
        try:
            chosen_tasks(self.env, self.tasks)
        except ValueError as error:
            return [f"--rl.tasks {' '.join(self.tasks or ())}: {error}"]
        return []

    def require(self) -> None:
        self.env.require()

    def num_executed(self, model: PolicyConfig) -> int:
        """`execute` with its default filled in."""
        return model.rows.window.num_executed if self.execute is None else self.execute

    @property
    def slots(self) -> int:
        """`num_slots` with its default filled in."""
        return (2 if isinstance(self.env, ProcessEnv) else 1) if self.num_slots is None else self.num_slots

    @property
    def num_control_steps(self) -> int:
        """`max_steps` with its default filled in."""
        return self.env.max_steps if self.max_steps is None else self.max_steps

    def num_queries(self, model: PolicyConfig) -> int:
        """The most queries of an episode."""
        return math.ceil(self.num_control_steps / self.num_executed(model))

    def batch_spec(
        self, *, objective: Any, model: Any, data: Any, opened: OpenedData | None, batch_size: int
    ) -> RolloutBatch:
        distribution, queries = objective.distribution, self.num_queries(model)
        rows = model.rows.batch_spec(batch_size, data.cameras, None if opened is None else opened.text_length)

        def of(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

        def several(count: int, tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: of(leaf.dtype, count, *leaf.shape[1:]), tree)

        observation, chunk = several(queries, rows.observation), rows.actions.shape[1:]
        kept = {name: of(leaf.dtype, queries, *leaf.shape) for name, leaf in distribution.kept_spec(chunk).items()}
        numbers = ("advantages", "log_probs", "sampling_log_probs", "reference_log_probs", "values", "returns")
        return tree_of(
            RolloutBatch,
            traces=distribution.traces(observation, kept, of(jnp.bool_, queries, *chunk), of(jnp.int32)),
            mask=of(jnp.bool_, queries * distribution.num_units),
            is_rollout=of(jnp.bool_),
            is_fresh=of(jnp.bool_),
            demonstrations=several(self.num_demonstrations, rows) if self.num_demonstrations else None,
            **dict.fromkeys(numbers, of(jnp.float32, queries * distribution.num_units)),
        )

    def actor(self, running: EvaluationContext, data: Data) -> Actor:
        from openpi_train.rl.robot_actor import RobotActor  # which imports this module

        return RobotActor(self, running)


def _distributions_of(model: PolicyConfig) -> str:
    """The distributions by which a policy can act, as advice."""
    names = [
        distribution.__name__
        for distribution in (FlowDistribution, DenoisingDistribution, ActionTokenDistribution)
        if distribution().needed <= model.provides
    ]
    if not names:
        return f"a {type(model).__name__} has none"
    example = f"objective=PolicyGradient(distribution={names[0]}())"
    return f"give it {' or '.join(names)} in an experiment's file, such as {example}"
