"""Update parameters, moments and average from gradients: all at once, or one large parameter after the other.

The latter is used if moments or the average are in host memory between steps (`--sharding.offload`). The arrays of a
parameter are then fetched, updated and written back. A fetch starts when those of the last but one parameter have been
written back: copies in both directions overlap with the update between them, and a device never holds the moments of
more than two large parameters. Read next: `strategy.py: Plan.between_steps`, which decides the placement.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array, Bool

from openpi_train.optim import EmaWarmup
from openpi_train.parallel.params import Params
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import DEVICE_MEMORY, HOST_MEMORY, Plan
from openpi_train.types import Tree

_FIELDS = ("params", "opt_state", "ema")  # of the state: what an update changes


@dataclasses.dataclass(frozen=True)
class Update:
    """Computes the next state from a state and gradients."""

    optimizer: optax.GradientTransformation
    plan: Plan
    ema_decay: float | None
    ema_warmup: EmaWarmup = dataclasses.field(default_factory=EmaWarmup)

    def __call__(self, state: TrainState, grads: Params, finite: Bool[Array, ""]) -> TrainState:
        """`state` with the next parameters, moments and average; unchanged if not `finite`."""
        update = self._at_once if self.plan.offload == "none" else self._in_turn
        fields = {name: getattr(state, name) for name in _FIELDS}
        return dataclasses.replace(state, **update(fields, grads, finite, state.step))

    def _at_once(self, fields: dict[str, Tree], grads: Params, finite: Bool[Array, ""], step: Array) -> dict[str, Any]:
        with jax.named_scope("optimizer"):
            updates, opt_state = self.optimizer.update(grads, fields["opt_state"], fields["params"])
            params = optax.apply_updates(fields["params"], updates)
        ema = fields["ema"]
        if ema is not None:
            with jax.named_scope("ema"):
                decay = self.ema_warmup.decay(self.ema_decay or 0.0, step)
                ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        new = {"params": params, "opt_state": opt_state, "ema": ema}
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, fields)

    def _in_turn(self, fields: dict[str, Tree], grads: Params, finite: Bool[Array, ""], step: Array) -> dict[str, Any]:
        """`_at_once`, traced as a whole and evaluated parameter by parameter, so both compute the same bits."""
        inputs = fields, grads, finite, step
        on_devices = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
        values = jax.tree.leaves(inputs)
        traced = jax.make_jaxpr(self._at_once)(*on_devices)
        program = _OnDemand(traced.jaxpr, traced.consts, values.__getitem__)
        homes = jax.tree.leaves({name: self.plan.between_steps(name, tree) for name, tree in fields.items()})
        working = jax.tree.leaves(self.plan.tree("state", fields))

        def move(leaf: Array, number: int, sharding: jax.sharding.Sharding) -> Tree:
            return jax.device_put(leaf, sharding) if homes[number].memory_kind == HOST_MEMORY else leaf

        # The first two groups wait for the gradients, since before there is no space on the device.
        done: list[Any] = [finite, finite]
        for index, numbers in enumerate(_groups(fields, homes)):
            old = {number: values[number] for number in numbers}
            old, done[index] = jax.lax.optimization_barrier((old, done[index]))
            for number, leaf in old.items():
                values[number] = move(leaf, number, working[number].with_memory_kind(DEVICE_MEMORY))
            done.append({number: move(program.output(number), number, homes[number]) for number in numbers})
        moved = {number: leaf for group in done[2:] for number, leaf in group.items()}
        leaves = [moved[number] if number in moved else program.output(number) for number in range(len(homes))]
        return jax.tree.unflatten(jax.tree.structure(fields), leaves)


def _groups(fields: dict[str, Tree], homes: Sequence[jax.sharding.Sharding]) -> list[list[int]]:
    """The leaf numbers of each parameter that has leaves in host memory."""
    groups: dict[Any, list[int]] = {path: [] for path in fields["params"]}
    for number, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(fields)[0]):
        groups.get(getattr(path[-1], "key", None), []).append(number)
    return [group for group in groups.values() if any(homes[n].memory_kind == HOST_MEMORY for n in group)]


class _OnDemand:
    """A traced function whose outputs are computed lazily, and nothing twice."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], value_of_input: Callable[[int], Array]):
        """`value_of_input` returns an argument's leaf by number; it is called when the leaf is first used."""
        self._jaxpr = jaxpr
        self._input = value_of_input
        self._numbers = {var: number for number, var in enumerate(self._jaxpr.invars)}
        self._known: dict[Any, Any] = dict(zip(self._jaxpr.constvars, consts, strict=True))
        self._equations = {var: equation for equation in self._jaxpr.eqns for var in equation.outvars}
        self._called: dict[int, _OnDemand] = {}

    def output(self, number: int) -> Tree:
        """The output leaf of this number."""
        return self._value(self._jaxpr.outvars[number])

    def _value(self, atom: Var | Literal) -> Tree:
        if isinstance(atom, Literal):
            return atom.val
        if atom in self._numbers:
            return self._input(self._numbers[atom])
        if atom not in self._known:
            self._compute(atom, self._equations[atom])
        return self._known[atom]

    def _compute(self, atom: Var, equation: JaxprEqn) -> None:
        if equation.primitive.name == "jit":  # optax has some over all parameters: only what is asked for of these, too
            outer, inner = equation.invars, equation.params["jaxpr"]
            called = self._called.setdefault(
                id(equation), _OnDemand(inner.jaxpr, inner.consts, lambda number: self._value(outer[number]))
            )
            self._known[atom] = called.output(equation.outvars.index(atom))
            return
        values = map(self._value, equation.invars)
        found = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
        several = equation.primitive.multiple_results
        self._known.update(zip(equation.outvars, found if several else [found], strict=True))
