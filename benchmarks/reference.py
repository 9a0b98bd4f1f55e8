"""Our own step modified to do the work of openpi's step (not openpi's program); `step_time.py` compares ours with it.

Layers, loss, optimizer and augmentation are this project's. The step differs from ours where openpi at
15a9616 does: every robot has three cameras (absent ones are black, masked pictures); the last layer is
computed for all tokens; attention is einsum and softmax; prompts are padded to the model's limit; every update is
applied without a NaN check. openpi also recomputes every layer in the backward pass (`remat` "full"), and its layers
are a loop, as here. openpi also multiplies the prefix's queries with the suffix's keys, and masks the products, 0.2 %
of all, which the reference does not. Other differences of openpi are not included: its modules, its loader, its
compiler version, its three resamplings of images.
"""

import dataclasses
from typing import Any

import jax
import optax
from flax import nnx

from benchmarks.steps import Trial
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.parallel.params import ParamUse
from openpi_train.parallel.state import TrainState
from openpi_train.training.step import Metrics, Trainer


def reference(trial: Trial, remat: str) -> Trial:
    """The same run doing openpi's work. The states of both have the same layout, so both can use one state."""
    trainer = reference_of(trial.prepared.trainer, remat)
    experiment = dataclasses.replace(trial.experiment, model=trainer.model, objective=trainer.objective)
    return Trial(experiment, dataclasses.replace(trial.prepared, trainer=trainer))


def reference_of(trainer: Trainer, remat: str) -> "ReferenceTrainer":
    """A trainer that does openpi's work in place of this one's."""
    ours: Any = trainer.model
    model = dataclasses.replace(ours, remat=remat, attention="xla")
    objective = ReferenceFlowMatching(**vars(trainer.objective))
    changes = {"model": model, "objective": objective, "graphdef": _graph(model), "use": ParamUse()}
    fields = {field.name: getattr(trainer, field.name) for field in dataclasses.fields(trainer)}
    return ReferenceTrainer(**{**fields, **changes})


class ReferenceFlowMatching(FlowMatching):
    """The loss, computed from all outputs of the transformer."""

    def loss_at(self, model: Any, *arguments: Any) -> Any:
        """As `FlowMatching.loss_at`."""
        return super().loss_at(_WholeOutputs(model), *arguments)


class _WholeOutputs:
    """A pi0 whose last layer also computes the prefix, although it is not used."""

    def __init__(self, model: Any):
        self._model = model

    def velocity(self, observation: Any, noisy_actions: Any, time: Any) -> Any:
        outputs = self._model.outputs(observation, noisy_actions, time)
        return self._model.read_out(outputs["action"], noisy_actions.shape)


class ReferenceTrainer(Trainer):
    """openpi's update (`scripts/train.py`, `train_step`)."""

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One update, applied without a check."""
        with jax.named_scope("gradient"):
            grads, metrics = self.accumulate(state, batch, self.objective.norms(batch))
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema, decay = state.ema, self.ema_decay or 0.0
        if ema is not None:
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        new = dataclasses.replace(state, step=state.step + 1, params=params, ema=ema, opt_state=opt_state)
        return new, {**metrics, "grad_norm": optax.tree.norm(grads), "param_norm": self.param_norm(new)}


def _graph(model: Any) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0]
