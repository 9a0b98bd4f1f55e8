"""The first state of a run: created sharded, nothing materialised twice.

Read next: `step.py`, `checkpoints/checkpoint_store.py`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from openpi_train.interop.parameter_matching import account
from openpi_train.interop.stored_leaves import Leaves, place
from openpi_train.models.model_config import KnowsFixed, ModelConfig
from openpi_train.optim import LossScaling
from openpi_train.parallel.params import Params, module_params
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import Plan
from openpi_train.types import Tree, tree_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The state's shapes and shardings, known before anything is allocated; `graphdef` is that of `model`'s module."""

    model: ModelConfig
    graphdef: nnx.GraphDef
    shapes: TrainState
    shardings: TrainState
    loss_scaling: LossScaling | None = None

    def under(self, plan: Plan) -> "StateLayout":
        """The same state, sharded by `plan`."""
        cut = {
            field: plan.between_steps(field, getattr(self.shapes, field))
            for field in ("params", "frozen", "ema", "opt_state")
        }
        scale = jax.tree.map(lambda _: plan.replicated, self.shapes.scale)
        shardings = tree_of(TrainState, step=plan.replicated, scale=scale, **cut)
        return dataclasses.replace(self, shardings=shardings)

    def of(self, model: ModelConfig) -> "StateLayout":
        """The same state, of a model that differs from this one in `remat` and `attention` alone."""
        if model == self.model:
            return self
        return dataclasses.replace(self, model=model, graphdef=trained_graph(model, frozenset(self.shapes.params)))

    def abstract(self) -> TrainState:
        """Shapes with their shardings, for restoring a checkpoint."""
        return jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            self.shapes,
            self.shardings,
        )


def initial_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    is_frozen: Callable[[str], bool],
    ema: bool,
    seed: int | jax.Array,
    loss_scaling: LossScaling | None = None,
) -> TrainState:
    """A newly initialised state (traceable). `is_frozen(path)` selects the frozen leaves."""
    leaves = module_params(model.build(nnx.Rngs(seed)))
    return _state_of(leaves, model, optimizer, is_frozen, ema, loss_scaling)


def _state_of(
    leaves: Params,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    is_frozen: Callable[[str], bool],
    ema: bool,
    loss_scaling: LossScaling | None,
) -> TrainState:
    dtype_of = model.param_rules.frozen_dtype
    frozen = {path: leaf.astype(dtype_of(path)) for path, leaf in leaves.items() if is_frozen(path)}
    params = {path: leaf for path, leaf in leaves.items() if path not in frozen}
    rest = rest_of_state(optimizer, ema, loss_scaling, params)
    return dataclasses.replace(rest, params=params, frozen=frozen)


def rest_of_state(
    optimizer: optax.GradientTransformation, ema: bool, loss_scaling: LossScaling | None, params: Params
) -> TrainState:
    """The state at step 0 without the parameters (traceable)."""
    return TrainState(
        step=jnp.int32(0),
        params={},
        frozen={},
        ema=jax.tree.map(jnp.copy, params) if ema else None,
        opt_state=optimizer.init(params),
        scale=loss_scaling.first() if loss_scaling else None,
    )


def lay_out(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    is_frozen: Callable[[str], bool],
    ema: bool,
    plan: Plan,
    loss_scaling: LossScaling | None = None,
) -> StateLayout:
    """Shapes and shardings of the state by abstract evaluation: no array is made. `loss_scaling` None has no scale."""
    module = _abstract(model)
    shapes = jax.eval_shape(
        lambda leaves: _state_of(leaves, model, optimizer, is_frozen, ema, loss_scaling), module_params(module)
    )
    graphdef = _graph(model, module, shapes.params)
    layout = StateLayout(model=model, graphdef=graphdef, shapes=shapes, shardings=shapes, loss_scaling=loss_scaling)
    return layout.under(plan)


@functools.lru_cache(maxsize=8)
def trained_graph(model: ModelConfig, trained: frozenset[str]) -> nnx.GraphDef:
    """The module's graph for a run in which the parameters of these paths train and no others."""
    return _graph(model, _abstract(model), trained)


def _abstract(model: ModelConfig) -> Any:
    """The module with shapes in place of parameters."""
    return nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))


def _graph(model: ModelConfig, module: nnx.Module, trained: Collection[str]) -> nnx.GraphDef:
    groups = model.param_rules.groups.items()
    fixed = {name for name, pattern in groups if not any(re.fullmatch(pattern, path) for path in trained)}
    if isinstance(module, KnowsFixed):
        module.leave_fixed(fixed)
    return nnx.split(module)[0]


def create_state(
    layout: StateLayout,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    is_frozen: Callable[[str], bool],
    ema: bool,
    seed: int,
    weights: Leaves | None = None,
) -> TrainState:
    """The state on the devices, each shard made or read on its own device. `weights`, by path, are read instead of
    drawn.

    Every process must call it. Raises ValueError if `weights` have an unknown leaf or another shape.
    """
    make = functools.partial(initial_state, model, optimizer, is_frozen, ema, seed, layout.loss_scaling)
    if not weights:
        return _run_once(make, layout.shardings)
    shapes: dict[str, Any] = {**layout.shapes.params, **layout.shapes.frozen}
    shardings: dict[str, Any] = {**layout.shardings.params, **layout.shardings.frozen}
    for path, leaf in weights.items():
        if path not in shapes or shapes[path].shape != leaf.shape:
            there = f"shape {shapes[path].shape}" if path in shapes else "no such parameter"
            raise ValueError(f"start weights: {path} has shape {leaf.shape}; the model has {there}")
    missing = {path: sharding for path, sharding in shardings.items() if path not in weights}

    def drawn() -> Params:  # of all else nothing is computed: it is no output
        state = make()
        return {path: leaf for path, leaf in {**state.params, **state.frozen}.items() if path in missing}

    leaves = _run_once(drawn, missing) if missing else {}
    for path, leaf in weights.items():  # one after the other: the host holds no more than one
        leaves[path] = place(leaf, shapes[path].dtype, shardings[path])
    params = {path: leaves[path] for path in layout.shapes.params}
    rest = functools.partial(rest_of_state, optimizer, ema, layout.loss_scaling)
    cut = {field.name: getattr(layout.shardings, field.name) for field in dataclasses.fields(TrainState)}
    around = _run_once(rest, tree_of(TrainState, **{**cut, "params": {}, "frozen": {}}), params)
    return dataclasses.replace(around, params=params, frozen={path: leaves[path] for path in layout.shapes.frozen})


def read_state(layout: StateLayout, leaves: Leaves, where: str) -> TrainState:
    """The whole state from `leaves` (`openpi.state_leaves`), each shard read by its own device's process.

    Every process must call it. Raises CheckpointError if they are not the leaves of this run's state.
    """
    shapes, shardings = _by_name(layout.shapes), _by_name(layout.shardings)
    account(leaves, shapes, where=f"the training state of {where}", explain=lambda *_: [_SAME_TRAINING])
    placed = [place(leaves[name], shape.dtype, shardings[name]) for name, shape in shapes.items()]
    return jax.tree.unflatten(jax.tree.structure(layout.shapes), placed)


_SAME_TRAINING = (
    "to go on with it, model, optimizer, --freeze, and whether there is an average (--ema-decay) must be those that it "
    "was saved with; to start from its parameters alone, leave out --weight-loader.continue-training"
)


def _by_name(state: TrainState) -> dict[str, Any]:
    """The state's leaves by field and path; frozen parameters are among `params/`."""
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat)
    return {re.sub("^frozen/", "params/", name): leaf for name, (_, leaf) in zip(names, flat, strict=True)}


def _run_once(make: Callable[..., Any], shardings: Tree, *arguments: Tree) -> Tree:
    # Runs once, so compile quickly: LLVM's optimizations take eight times as long on the random number code.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(make, out_shardings=shardings, compiler_options=options)(*arguments)
