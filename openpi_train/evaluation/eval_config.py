"""Evaluation of robot policies: open-loop action errors, and success rates in an environment.

Read next: `action_error.py`, `closed_loop_success.py`.
"""

import dataclasses
import logging

from openpi_train.data.robot.opened import OpenedDatasets
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.evaluation.action_error import ActionError
from openpi_train.evaluation.closed_loop_success import ClosedLoopSuccess
from openpi_train.evaluation.measure import EvaluationContext, Evaluations, Measure
from openpi_train.fields import at_least
from openpi_train.objectives.policy_objective import distribution_of
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.chain_distribution import ChainDistribution

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(Evaluations):
    """Evaluation of a robot policy."""

    # Number of training rows, always the same, on which the open-loop action error is also measured.
    num_train_rows: int = at_least(0, 0)
    # Denoising steps of the sampler in evaluations.
    num_sample_steps: int = at_least(1, 10)
    # Closed-loop evaluation in an environment.
    closed_loop: ClosedLoop = dataclasses.field(default_factory=ClosedLoop)

    def check(self) -> list[str]:
        try:
            _ = self.closed_loop.task_numbers
        except ValueError as error:
            return [f"--eval.closed-loop.tasks {' '.join(self.closed_loop.tasks or ())}: {error}"]
        every = self.closed_loop.interval
        if every and (not self.interval or every % self.interval):
            return [
                f"--eval.closed-loop.interval {every} is not a multiple of --eval.interval {self.interval}: closed "
                "loops run only at evaluations"
            ]
        return []

    def require(self) -> None:
        if self.closed_loop.num_episodes:
            self.closed_loop.env.require()

    def prompts(self) -> list[tuple[str, int]]:
        env = self.closed_loop.env
        return [(env.instruction(task), env.state_dim) for task in range(len(env.tasks))]

    def measures(self, running: EvaluationContext) -> list[Measure]:
        distribution = distribution_of(running.trainer.objective)
        trained = distribution.num_steps if isinstance(distribution, ChainDistribution) else self.num_sample_steps
        if trained != self.num_sample_steps:
            logger.warning(
                "evaluations sample in %d denoising steps, and RL acts in %d: they measure another policy. Give "
                "--eval.num-sample-steps %d",
                *(self.num_sample_steps, trained, trained),
            )
        found: list[Measure] = []
        if "sample" in running.trainer.model.provides:
            if not isinstance(running.data, OpenedDatasets):
                raise UsageError(
                    f"eval: EvalConfig measures action errors, but {type(running.data).__name__} has no actions; "
                    "give the experiment another eval, such as evaluation.measure.Evaluations()"
                )
            rows = running.data.training_rows(self.num_train_rows, running.batch_size, running.trainer.plan.batch)
            found.append(ActionError(running, self.num_sample_steps, running.data.mean_action(), rows))
        if self.closed_loop.num_episodes:
            found.append(ClosedLoopSuccess(running, self.closed_loop, self.num_sample_steps))
        return found
