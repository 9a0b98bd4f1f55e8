"""The optimizer step of every run. Read next: `parallel/devices.py` (accumulation), `parallel/update.py`, `loop.py`.

norms on the whole batch -> per micro-batch loss and gradient, summed -> clip -> optimizer on trainable leaves -> EMA.
In float16 the loss is scaled up, and the gradient is scaled down before clipping (`optim/loss_scale.py`).
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from openpi_train.keys import row_keys
from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.objective import Norms, Objective
from openpi_train.optim import EmaWarmup, LossScale, LossScaling, learning_rate
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.params import Params, ParamUse, merge_module, use_params
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import Plan
from openpi_train.parallel.update import Update
from openpi_train.types import Batch

Metrics = dict[str, Float[Array, ""]]
# openpi's parameter norm excludes these (by published name), and everything with fewer than two dims. The second
# pattern has the names of language models.
NOT_A_KERNEL = re.compile(r".*/(bias|scale|pos_embedding|input_embedding)|.*(norm|embed_tokens)/weight")


# XLA for GPUs joins sums over the devices of different layers, so that some begin only when their results are needed.
_APART = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 0}

StepFunction = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything that the step needs besides state and batch; all static."""

    graphdef: nnx.GraphDef
    model: ModelConfig
    objective: Objective
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    plan: Plan
    seed: int
    grad_accum: int = 1
    # What the step does with parameters; which of them are frozen the state says.
    use: ParamUse = dataclasses.field(default_factory=ParamUse)
    ema_decay: float | None = None
    ema_warmup: EmaWarmup = dataclasses.field(default_factory=EmaWarmup)
    loss_scaling: LossScaling | None = None

    def compile_step(self, state_shardings: TrainState, state: TrainState, batch: Batch) -> StepFunction:
        """The step, compiled ahead for the shapes of `state` and `batch` (the whole, global one)."""
        return self.traced_step(state_shardings, state, batch).lower().compile()

    def traced_step(self, state_shardings: TrainState, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """The step, traced for these shapes: a `jax.stages.Traced`."""
        return self.jitted_step(state_shardings).trace(state, batch)

    def jitted_step(self, state_shardings: TrainState) -> Any:
        """The step as a jitted function. State is donated, and returned with the same shardings."""
        return jax.jit(
            self.step,
            in_shardings=(state_shardings, self.plan.batch),
            out_shardings=(state_shardings, self.plan.replicated),
            donate_argnums=0,
            compiler_options=_APART if self.use.unrolled and self.plan.mesh.size > 1 else None,
        )

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update on one optimizer batch. An update with NaN or Inf is not applied; `skipped` is then 1.

        `overflow` is 1 if the loss scale handles it.
        """
        with jax.named_scope("gradient"):
            norms = self.objective.norms(batch)
            grads, metrics = self.accumulate(state, batch, norms)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics["loss"])
        new = Update(self.optimizer, self.plan, self.ema_decay, self.ema_warmup)(state, grads, finite)
        new = dataclasses.replace(new, step=state.step + 1, scale=self.next_scale(state, finite))
        return new, {
            **metrics,
            **self.scale_metrics(state, finite),
            **self.count_metrics(batch),
            "grad_norm": grad_norm,
            "param_norm": self.param_norm(new),
            "learning_rate": learning_rate(self.schedule, num_updates(state)),
            "skipped": 1.0 - finite,
        }

    def accumulate(self, state: TrainState, batch: Batch, norms: Norms) -> tuple[Params, Metrics]:
        """Gradient and metrics of the whole batch, micro-batch by micro-batch. Shares are summed, never averaged."""

        def share(params, micro, rest):
            step, norms, scale = rest
            model = merge_module(self.graphdef, params)
            use_params(model, self.use, state.frozen)
            loss, metrics = self.objective.loss(model, micro, norms, row_keys(self.seed, step, micro.row))
            return (loss if scale is None else loss * scale.value), metrics

        everything = {**state.frozen, **state.params}
        batch = self.objective.prepared(batch, self.devices.row_values(everything, self.grad_accum))
        rest = (state.step, norms, state.scale)
        grads, metrics = self.devices.gradient(share, state.params, state.frozen, batch, rest, self.grad_accum)
        return unscaled(grads, state), metrics

    @property
    def devices(self) -> Devices:
        """The computation over devices."""
        return Devices(self.plan, self.model.compute.dtype, self.graphdef, self.use.unrolled)

    def next_scale(self, state: TrainState, finite: Bool[Array, ""]) -> LossScale | None:
        """The loss scale after this step."""
        if state.scale is None or self.loss_scaling is None:
            return None
        return self.loss_scaling.after(state.scale, ~finite)

    def scale_metrics(self, state: TrainState, finite: Bool[Array, ""]) -> Metrics:
        """The scale that this step used, and whether it was too large; empty without a scale."""
        if state.scale is None or self.loss_scaling is None:
            return {}
        overflow = ~finite & self.loss_scaling.can_yield(state.scale)
        return {"loss_scale": state.scale.value, "overflow": overflow.astype(jnp.float32)}

    def count_metrics(self, batch: Batch) -> Metrics:
        """The number of tokens in the batch, if the model has tokens."""
        tokens = self.model.num_tokens_seen(batch, self.objective.draws_per_row)
        return {} if tokens is None else {"tokens": tokens.astype(jnp.float32)}

    def param_norm(self, state: TrainState) -> Float[Array, ""]:
        """The norm over all kernels, trainable or not (openpi's `param_norm`), float32."""
        # Behind a barrier, because XLA for GPUs else sums squares in a kernel that updates the average, and the other
        # arrays of a parameter in another: two passes over them in place of one.
        params = jax.lax.optimization_barrier(state.params)
        kernels = {
            path: leaf.astype(jnp.float32)
            for path, leaf in {**state.frozen, **params}.items()
            if leaf.ndim > 1 and not NOT_A_KERNEL.fullmatch(self.model.param_rules.public_name(path))
        }
        return optax.tree.norm(kernels)


def unscaled(grads: Params, state: TrainState) -> Params:
    """The gradient of the loss itself."""
    scale = state.scale
    return grads if scale is None else jax.tree.map(lambda grad: grad / scale.value, grads)


def num_updates(state: TrainState) -> Int[Array, ""]:
    """The number of applied updates: the step minus skipped ones. The schedule uses it."""
    counts = [count for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]
    return counts[0]
