"""The one optimizer step of every run. Read next: `loop.py`, which calls it, and `objectives/base.py` for the loss.

norms on the whole batch -> per micro-batch loss and gradient, summed -> clip -> optimizer on trainable leaves -> EMA.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from openpi_train.keys import row_keys
from openpi_train.models.base import ModelConfig
from openpi_train.nn.params import Params, merge_module
from openpi_train.objectives.base import Objective
from openpi_train.optim import learning_rate
from openpi_train.sharding.strategy import Plan
from openpi_train.training.state import TrainState

Metrics = dict[str, Float[Array, ""]]
# openpi's parameter norm leaves these out (by published name), and everything with fewer than two dims.
NOT_A_KERNEL = re.compile(r".*/(bias|scale|pos_embedding|input_embedding)")


StepFunction = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """What the step needs beside state and batch; all of it static."""

    graphdef: nnx.GraphDef
    model: ModelConfig
    objective: Objective
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    plan: Plan
    seed: int
    grad_accum: int = 1
    ema_decay: float | None = None

    def compile_step(self, state_shardings: Any, state: Any, batch: Any) -> StepFunction:
        """The step, compiled ahead for the shapes of `state` and `batch` (the whole, global one).

        State is donated; it leaves with the shardings that it came with.
        """
        step = jax.jit(
            self.step,
            in_shardings=(state_shardings, self.plan.batch),
            out_shardings=(state_shardings, self.plan.replicated),
            donate_argnums=0,
        )
        return step.lower(state, batch).compile()

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One update on one optimizer batch. An update with NaN or Inf in it is not applied: `skipped` is 1 then."""
        norms = self.objective.norms(batch)
        grads, metrics = self.accumulate(state, batch, norms)
        grad_norm = optax.tree.norm(grads)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            decay = self.ema_decay or 0.0
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics["loss"])
        keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=keep(params, state.params),
            ema=keep(ema, state.ema),
            opt_state=keep(opt_state, state.opt_state),
        )
        return new, {
            **metrics,
            "grad_norm": grad_norm,
            "param_norm": self.param_norm(new),
            "learning_rate": learning_rate(self.schedule, num_updates(state)),
            "skipped": 1.0 - finite,
        }

    def accumulate(self, state: TrainState, batch: Any, norms: Any) -> tuple[Params, Metrics]:
        """Gradient and metrics of the whole batch, micro-batch by micro-batch. Shares are summed, never averaged."""

        def share(params, micro):
            keys = row_keys(self.seed, state.step, micro.row)
            model = merge_module(self.graphdef, {**state.frozen, **params})
            return self.objective.loss(model, micro, norms, keys)

        gradient = jax.value_and_grad(share, has_aux=True)
        if self.grad_accum == 1:
            (_, metrics), grads = gradient(state.params, batch)
            return self.cut_like(grads), metrics

        # Row i of a device goes to micro-batch i % grad_accum, so no row changes its device.
        micros = jax.tree.map(
            lambda x: x.reshape(x.shape[0] // self.grad_accum, self.grad_accum, *x.shape[1:]).swapaxes(0, 1), batch
        )

        def add(total, micro):
            (_, metrics), grads = gradient(state.params, micro)
            return jax.tree.map(jnp.add, total, (self.cut_like(grads), metrics)), None

        first = jax.tree.map(lambda x: x[0], micros)
        shapes = jax.eval_shape(gradient, state.params, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[1], shapes[0][1]))
        total, _ = jax.lax.scan(add, (self.cut_like(zeros[0]), zeros[1]), micros)
        return total

    def cut_like(self, grads: Params) -> Params:
        """The gradient, laid out as the plan says."""
        return jax.lax.with_sharding_constraint(grads, self.plan.tree("grads", grads))

    def param_norm(self, state: TrainState) -> Float[Array, ""]:
        """The norm over all kernels, trainable or not (openpi's `param_norm`), float32."""
        kernels = {
            path: leaf.astype(jnp.float32)
            for path, leaf in {**state.frozen, **state.params}.items()
            if leaf.ndim > 1 and not NOT_A_KERNEL.fullmatch(self.model.public_name(path))
        }
        return optax.tree.norm(kernels)


def num_updates(state: TrainState) -> Int[Array, ""]:
    """Updates that were applied so far: the step less those that were skipped. The schedule goes by it."""
    counts = [count for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]
    return counts[0]
