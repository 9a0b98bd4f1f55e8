"""The first state of a run: born sharded, nothing materialised twice. Read next: `step.py`, `checkpoints/store.py`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from openpi_train.models.base import ModelConfig
from openpi_train.nn.params import Params, module_params
from openpi_train.optim import LossScaling
from openpi_train.sharding.strategy import Plan
from openpi_train.training.state import TrainState
from openpi_train.types import tree_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The state's shapes and shardings, known before anything is allocated."""

    graphdef: nnx.GraphDef
    shapes: TrainState
    shardings: TrainState
    loss_scaling: LossScaling | None = None

    def under(self, plan: Plan) -> "StateLayout":
        """The same state, cut as `plan` says."""
        cut = {
            field: plan.between_steps(field, getattr(self.shapes, field))
            for field in ("params", "frozen", "ema", "opt_state")
        }
        scale = jax.tree.map(lambda _: plan.replicated, self.shapes.scale)
        shardings = tree_of(TrainState, step=plan.replicated, scale=scale, **cut)
        return dataclasses.replace(self, shardings=shardings)

    def abstract(self) -> TrainState:
        """Shapes that carry their shardings, as a checkpoint restore wants them."""
        return jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            self.shapes,
            self.shardings,
        )


def initial_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    is_frozen: Any,
    ema: bool,
    seed: Any,
    loss_scaling: LossScaling | None = None,
) -> TrainState:
    """A fresh state (traceable). `is_frozen(path)` picks the leaves that training leaves alone."""
    leaves = module_params(model.build(nnx.Rngs(seed)))
    # As openpi keeps them: nothing ever updates a frozen leaf, so it needs no float32 master copy.
    frozen = {path: leaf.astype(jnp.bfloat16) for path, leaf in leaves.items() if is_frozen(path)}
    params = {path: leaf for path, leaf in leaves.items() if path not in frozen}
    return TrainState(
        step=jnp.int32(0),
        params=params,
        frozen=frozen,
        ema=jax.tree.map(jnp.copy, params) if ema else None,
        opt_state=optimizer.init(params),
        scale=loss_scaling.first() if loss_scaling else None,
    )


def lay_out(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    is_frozen: Any,
    ema: bool,
    plan: Plan,
    loss_scaling: LossScaling | None = None,
) -> StateLayout:
    """Shapes and shardings of the state by abstract evaluation: no array is made. `loss_scaling` None has no scale."""
    shapes = jax.eval_shape(lambda: initial_state(model, optimizer, is_frozen, ema, 0, loss_scaling))
    graphdef = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0]
    layout = StateLayout(graphdef=graphdef, shapes=shapes, shardings=shapes, loss_scaling=loss_scaling)
    return layout.under(plan)


def create_state(
    layout: StateLayout,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    is_frozen: Any,
    ema: bool,
    seed: int,
    weights: Mapping[str, np.ndarray] | None = None,
) -> TrainState:
    """The state on the devices, each shard made where it lives. `weights` replace the initial values by path.

    Every process must call it. Raises ValueError where `weights` name an unknown leaf or have another shape.
    """
    # Runs once, so compile it quickly: LLVM's optimizations take eight times as long on the random number code.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    make = functools.partial(initial_state, model, optimizer, is_frozen, ema, seed, layout.loss_scaling)
    state = jax.jit(make, out_shardings=layout.shardings, compiler_options=options)()
    if not weights:
        return state
    known = {**layout.shapes.params, **layout.shapes.frozen}
    for path, value in weights.items():
        if path not in known or known[path].shape != value.shape:
            there = f"shape {known[path].shape}" if path in known else "no such parameter"
            raise ValueError(f"start weights: {path} has shape {value.shape}; the model has {there}")

    def put(tree: Params, shardings: Params) -> Params:
        return {
            path: _place(weights[path], leaf.dtype, shardings[path]) if path in weights else leaf
            for path, leaf in tree.items()
        }

    params = put(state.params, layout.shardings.params)
    return dataclasses.replace(
        state,
        params=params,
        frozen=put(state.frozen, layout.shardings.frozen),
        ema=put(state.ema, layout.shardings.ema) if state.ema and layout.shardings.ema else None,
    )


def _place(value: np.ndarray, dtype: Any, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.asarray(value[index], dtype))
