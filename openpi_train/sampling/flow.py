"""Sampler of flow-matching policies: Euler steps from noise to actions, optionally guided: towards a given chunk
(`real_time_chunking.py`), or towards what is better than expected (`indicator.py`).

To add a solver, write a function beside `euler` and a choice in `FlowSampler`, made by objectives (`action_sampler`).
Time runs from 1 (noise) to 0 (actions), as in `objectives/flow_matching.py`.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.action_sampler import ActionSampler, Chain, FlowModel, walk
from openpi_train.sampling.indicator import check_guidance, conditioned_velocity
from openpi_train.sampling.real_time_chunking import Guide, Velocity, guided_velocity, held_velocity


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowSampler(ActionSampler):
    """Euler steps of the model's velocity, corrected towards the target of `guide` if there is one.

    `guidance` is that of a model with an indicator; None: the model has none. With `max_delay` above 0 the model was
    trained on clean prefixes of at most so many actions: where its weight is 1, the target is held, without guidance.
    """

    guide: Guide | None = None
    max_delay: int = 0
    guidance: float | None = None

    def chain(self, model, observation, noise, keys, num_steps, keep=True):
        del keys
        flow: FlowModel = model
        context = flow.context(self.seen(observation))

        def velocity(actions: Float[Array, "b h a"], time: Float[Array, "b *each"]) -> Float[Array, "b h a"]:
            return conditioned_velocity(flow, context, actions[:, None], time[:, None], self.guidance)[:, 0]

        if self.guide is None:
            return euler(velocity, noise, num_steps, keep)
        if not self.max_delay:
            return euler(functools.partial(guided_velocity, velocity, guide=self.guide), noise, num_steps, keep)
        held = (self.guide.weights > 0).any(axis=-1)  # b h
        start = jnp.where(held[..., None], self.guide.target, noise)
        return euler(functools.partial(held_velocity, velocity, held=held), start, num_steps, keep)


def euler(velocity: Velocity, noise: Float[Array, "b h a"], num_steps: int, keep: bool = False) -> Chain:
    """The chain from `noise` in equal Euler steps; without `keep` only its end."""
    step_size = -1.0 / num_steps

    def step(actions, index, time):
        return actions + step_size * velocity(actions, time)

    return walk(step, noise, flow_times(num_steps), keep)


def flow_times(num_steps: int) -> Float[np.ndarray, " steps"]:
    """The time before each Euler step: 1, 1 - 1 / `num_steps`, ..., summed up in float32 as in openpi's sampler."""
    return np.cumsum([1.0] + [-1.0 / num_steps] * (num_steps - 1), dtype=np.float32)


def with_guidance(sampler: ActionSampler, guidance: float) -> FlowSampler:
    """`sampler` with another guidance by the model's indicator. Raises UsageError if its model has none."""
    if not isinstance(sampler, FlowSampler) or sampler.guidance is None:
        raise UsageError(
            f"guidance {guidance:g} is for policies that are told how good a chunk was (objective IndicatorFlow or "
            "AdvantageConditionedFlow), and this one is not: leave --guidance out"
        )
    if problems := check_guidance("--guidance", guidance):
        raise UsageError(problems[0])
    return dataclasses.replace(sampler, guidance=guidance)


def as_flow(sampler: ActionSampler) -> FlowSampler:
    """Check that `sampler` is a flow, which can be guided; returns it. Raises UsageError if not."""
    if not isinstance(sampler, FlowSampler):
        raise UsageError(
            f"real-time chunking guides the velocity of a flow, but {type(sampler).__name__}, which this policy's "
            "objective needs, has none; in `eval` give --real-time-method none, or use --ensemble to join chunks"
        )
    return sampler
