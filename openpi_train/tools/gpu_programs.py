"""The programs of a run, lowered for devices that need not be there: the `compile` verb compiles them.

Read next: `gpu_step.py`; `lowered_generator.py`, `evaluation/row_sampling.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from openpi_train.data.robot.config import DataConfig
from openpi_train.evaluation import row_sampling
from openpi_train.evaluation.held_out_loss import loss_sums
from openpi_train.experiment import Experiment
from openpi_train.fields import too_small
from openpi_train.models.model_config import PolicyConfig, as_policy
from openpi_train.objectives.policy_objective import distribution_of
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import module_params
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.forecast import Forecast, Machine
from openpi_train.planning.gpu import plugin
from openpi_train.planning.gpu.targets import GpuTarget
from openpi_train.policy.sampler import Sampler
from openpi_train.rl.robot_query import query
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.runtime.device_kinds import JaxDevice
from openpi_train.runtime.device_limits import CLIENT_SHARE
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.action_distribution import ActionDistribution
from openpi_train.tools.lowered_generator import LoweredGenerator
from openpi_train.tools.requests import Program
from openpi_train.training.settling import Settling
from openpi_train.training.step import Trainer
from openpi_train.types import Tree


def lowered(
    program: Program, experiment: Experiment, machine: Machine, target: GpuTarget, cameras: Sequence[str] = ()
) -> tuple[Forecast | None, Any]:
    """The step's forecast, None of other programs, and the program: a `jax.stages.Lowered`.

    `cameras` are the slots that rows fill; none: those of the data. Call it within `plugin.pretended`. Raises
    UsageError for a program that a run does not have.
    """
    if problem := why_not(program, experiment, cameras):
        raise UsageError(problem)
    devices = plugin.devices(
        target, int(machine.available_bytes / CLIENT_SHARE), machine.num_devices, machine.num_hosts
    )
    if program == "sampling":
        return None, _sampling(experiment, devices, cameras)
    if program in ("reading", "decoding"):
        generator = _generator(Settling(given=experiment, machine=machine).on_kind, devices)
        return None, generator.reading() if program == "reading" else generator.decoding()
    training = Training.of(experiment, machine, devices, cameras)
    with jax.set_mesh(training.trainer.plan.real_mesh):
        if program == "step":
            return training.forecast, training.step()
        return None, training.query() if program == "acting" else training.evaluation()


def why_not(program: Program, experiment: Experiment, cameras: Sequence[str] = ()) -> str | None:
    """Why a run does not have this program, or cannot have it compiled here, as a sentence."""
    name, offload = experiment.name, experiment.sharding.offload
    if problems := too_small(experiment):
        return "\n".join(problems)
    if cameras and (problem := _slots_problem(experiment, cameras)):
        return problem
    if program == "sampling":
        acts = isinstance(experiment.model, PolicyConfig) and isinstance(experiment.data, DataConfig)
        return None if acts else f"--program sampling: {name} has no policy that samples action chunks"
    if program in ("reading", "decoding"):
        return (
            None
            if experiment.generation_sizes()
            else f"--program {program}: {name} completes no texts; a language model does for its evaluations, with "
            "--eval.num-prompts"
        )
    if program == "acting" and not _acts(experiment):
        return (
            f"--program acting: {name} makes no rollouts of a robot; what completes texts is compiled by --program "
            "reading and --program decoding"
        )
    if program == "evaluation" and experiment.rl is not None:
        return f"--program evaluation: {name} learns from its own rollouts, and has no held-out loss"
    if offload != "none":
        return (
            f"--sharding.offload {offload} cannot be compiled for GPUs that are not there: jax leaves everything in "
            "the device's memory then; use `plan --compiler cpu`"
        )
    return None


def _slots_problem(experiment: Experiment, cameras: Sequence[str]) -> str | None:
    """Why rows cannot fill these camera slots, as a sentence."""
    model, given = experiment.model, f"--cameras {','.join(cameras)}"
    if not isinstance(model, PolicyConfig):
        return f"{given}: {experiment.name} has a model without cameras; leave it out"
    of_data = experiment.data.cameras if isinstance(experiment.data, DataConfig) else ()
    known = dict.fromkeys((*of_data, *(model.known_slots or ())))
    if unknown := [slot for slot in cameras if slot not in known]:
        return f"{given}: {experiment.name} has no camera slot {', '.join(unknown)}; it has {', '.join(known)}"
    return None


def _acts(experiment: Experiment) -> bool:
    return isinstance(experiment.rl, RobotRL) and isinstance(distribution_of(experiment.objective), ActionDistribution)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A run under the strategy and policy of the flags, or else those that a run on this machine would choose.

    `state` and `batch` are the shapes of the state and of a batch.
    """

    experiment: Experiment
    forecast: Forecast
    trainer: Trainer
    state: Any
    batch: Any

    @classmethod
    def of(
        cls, experiment: Experiment, machine: Machine, devices: Sequence[JaxDevice], cameras: Sequence[str]
    ) -> "Training":
        model: Any = experiment.model
        batch_spec = (lambda rows: model.rows.batch_spec(rows, cameras)) if cameras else None
        prepared = Settling(given=experiment, machine=machine, batch_spec=batch_spec, devices=devices).prepared
        experiment, plan = prepared.experiment, prepared.trainer.plan
        return cls(
            experiment=experiment,
            forecast=prepared.forecast,
            trainer=prepared.trainer,
            state=prepared.layout.abstract(),
            batch=_placed(plan.batch, (batch_spec or experiment.batch_spec)(experiment.batch_size)),
        )

    def step(self) -> Any:
        """The training step."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        return self.trainer.jitted_step(shardings).lower(self.state, self.batch)

    def query(self) -> Any:
        """What draws chunks for as many episodes as a device acts in at a time."""
        rl: Any = self.experiment.rl
        distribution: Any = distribution_of(self.trainer.objective)
        plan = self.trainer.plan
        rows = plan.num_row_groups * min(rl.episodes_per_device, rl.num_rollouts // plan.num_row_groups)
        seen = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[2:]), leaf.dtype), self.batch.traces.observation
        )
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), rows)))
        program = row_sampling.program(self.trainer, query(as_policy(self.trainer.model), distribution))
        return jax.jit(program).lower(self._params, *_placed(plan.batch, (seen, data)))

    def evaluation(self) -> Any:
        """What sums the loss of a held-out batch."""
        trainer, index = self.trainer, jax.ShapeDtypeStruct((), np.int32)
        norms = jax.eval_shape(trainer.objective.norms, self.batch)
        sums = jax.jit(lambda *inputs: loss_sums(trainer, *inputs))
        return sums.lower(self.state.params, self.state.frozen, norms, self.batch, index)

    @property
    def _params(self) -> dict[str, Any]:
        return {**self.state.frozen, **self.state.params}


def _sampling(experiment: Experiment, devices: Sequence[JaxDevice], cameras: Sequence[str]) -> Any:
    """What samples action chunks for `--batch-size` observations: float32 parameters, whole on every device."""
    # Attention as it is served (`policy/restore.py`).
    model, data = as_policy(experiment.model.with_compute(attention="auto")), experiment.data
    assert isinstance(data, DataConfig)
    plan = Plan(mesh=make_mesh(1, devices), strategy="replicated")
    shapes: dict[str, Any] = module_params(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
    sampler = Sampler(
        model=model,
        objective=experiment.objective,
        params=_placed(plan.replicated, shapes),
        plan=plan,
        cameras=tuple(cameras) or data.cameras,
        seed=0,
        num_steps=experiment.robot_eval.num_sample_steps,
        batch_sizes=(experiment.batch_size,),
        text_lengths=None,
    )
    return sampler.lower(sampler.sizes[0])


def _generator(experiment: Experiment, devices: Sequence[JaxDevice]) -> LoweredGenerator:
    """What completes texts, with as many rows on each device as the run has: of its uses the one with most tokens."""
    plan = Plan(mesh=make_mesh(1, devices, experiment.sharding.tensor_devices), strategy="replicated")
    return LoweredGenerator(max(experiment.generation_sizes(), key=lambda size: size.rows * size.length), plan)


def _placed(sharding: jax.sharding.Sharding, shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
