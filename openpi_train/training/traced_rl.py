"""What own rollouts cost, from traced programs: acting in one query, and scoring a rollout.

Nothing is allocated. Read next: `planning/iteration.py`, which forecasts with it; `prepare.py`, the caller.
"""

from typing import Any

import jax

from openpi_train.evaluation.row_sampling import program
from openpi_train.experiment import Experiment
from openpi_train.models.model_config import as_policy
from openpi_train.objectives.policy_objective import PolicyObjective, distribution_of
from openpi_train.parallel.params import ParamLeaves, Params, merge_module
from openpi_train.planning.costs import ROWS, bytes_per_row
from openpi_train.planning.estimate import peak_bytes
from openpi_train.planning.flops import product_flops
from openpi_train.planning.generation import token_flops, token_step_bytes
from openpi_train.planning.rollout_cost import RolloutCost, TokenSteps
from openpi_train.rl.robot_query import query
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.rl.rollout_log_probs import NeededScores, scores_of
from openpi_train.rl.text_rl import TextRL
from openpi_train.sampling.action_distribution import ActionDistribution
from openpi_train.training.step import Trainer
from openpi_train.types import Batch, Observation, Tree


def rollout_cost(experiment: Experiment, trainer: Trainer, params: ParamLeaves, batch: Batch) -> RolloutCost | None:
    """What the rollouts of a run cost; None if it makes none, or in a way that is not known.

    Args:
        trainer: `step.Trainer` on one device, or one tensor group.
        params: the shapes of all parameters by path.
        batch: the shapes of a batch of `ROWS` rollouts.
    """
    rl = experiment.rl
    if not isinstance(rl, RobotRL | TextRL):
        return None
    of_rollout = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // ROWS
    common: Any = {
        "num_rollouts": rl.num_rollouts,
        "num_steps": rl.steps_per_iteration(experiment.batch_size),
        "most_waves": rl.max_waves if rl.mixed_only else 1,
        "scoring_flops": _scoring_flops(experiment, trainer, params, batch.traces),
        "experience_bytes": of_rollout,
        "is_local": isinstance(rl, RobotRL),
    }
    if isinstance(rl, RobotRL):
        return RolloutCost(**common, **_of_robots(rl, trainer, params, batch.traces.observation))
    return RolloutCost(**common, **_of_texts(rl, experiment))


def _of_robots(rl: RobotRL, trainer: Trainer, params: ParamLeaves, observation: Observation) -> dict[str, Any]:
    """One query of `ROWS` episodes, as `RowSampling` computes it."""
    model, distribution = as_policy(trainer.model), distribution_of(trainer.objective)
    assert isinstance(distribution, ActionDistribution)
    seen = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((ROWS, *leaf.shape[2:]), leaf.dtype), observation)
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), ROWS)))
    jaxpr = jax.make_jaxpr(program(trainer, query(model, distribution)))(params, seen, data).jaxpr
    return {
        "acting_flops": product_flops(jaxpr) / ROWS * rl.num_queries(model),
        "acting_bytes_per_row": peak_bytes(jaxpr, bytes_per_row),
        "rows_at_a_time": rl.episodes_per_device,
        "control_steps": rl.num_control_steps,
    }


def _of_texts(rl: TextRL, experiment: Experiment) -> dict[str, Any]:
    """Prompts are read at once, tokens made one after the other; both as long as is allowed."""
    size = rl.generation_size(experiment.model, experiment.data)
    assert size is not None, "RL on texts needs a model of texts"
    of_token, new = token_flops(size), rl.max_new_tokens
    tensor_devices = experiment.sharding.tensor_devices
    tokens = TokenSteps(
        rows=size.rows,
        steps_per_rollout=new,
        # On average half of a completion is there.
        bytes_per_step=token_step_bytes(size, size.length - new / 2, tensor_devices),
        flops_per_row=of_token,
    )
    return {
        "acting_flops": of_token * (size.length - new),
        "acting_bytes_per_row": 0.0,
        "rows_at_a_time": size.rows,
        "control_steps": 0,
        "tokens": tokens,
    }


def _scoring_flops(experiment: Experiment, trainer: Trainer, params: ParamLeaves, traces: Tree) -> float:
    """FLOPs of a rollout's scores before it is learnt from."""
    rl, objective = experiment.rl, trainer.objective
    assert rl is not None and isinstance(objective, PolicyObjective)
    needed = NeededScores.of(objective, rl, rl.steps_per_iteration(experiment.batch_size))
    if not needed.any:
        return 0.0

    def score(params: Params, traces: Tree) -> Any:
        def share(params: ParamLeaves, rows: Tree, _: None) -> Any:
            return scores_of(objective.distribution, merge_module(trainer.graphdef, params), rows, needed)

        return trainer.devices.rows(share, params, traces, None)

    return product_flops(jax.make_jaxpr(score)(params, traces).jaxpr) / ROWS
