"""Interface of action samplers, which draw normalised chunks from a trained model, their loop, and the model protocols.

An objective provides the sampler that fits its training (`Objective.action_sampler`).
Read next: `flow.py`, `denoising.py`; `decoding.py` for tokens.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from openpi_train.keys import draw_noise, for_purpose, row_keys
from openpi_train.nn.augment import Augmentation, NoAugmentation
from openpi_train.runtime.exits import UsageError
from openpi_train.types import Network, Observation, Tree, pytree

Actions = Float[Array, "b h a"]
Draws = Float[Array, "b r h a"]
Keys = Key[Array, " b"] | None
# (actions, number of the denoising step, its time [b]) -> actions after the step.
Step = Callable[[Actions, Int[Array, ""], Float[Array, " b"]], Actions]


class ContextModel(Protocol):
    """A module that can be called several times for one observation."""

    def context(self, observation: Observation, /) -> Any:
        """Features of the observation, computed once for all denoising steps; rows on the first axes."""
        ...


class FlowModel(ContextModel, Protocol):
    """A module that provides `velocity`."""

    def velocity(self, seen: Tree, noisy_actions: Draws, time: Float[Array, "b r *each"], /) -> Draws:
        """d x_t / d t at `noisy_actions` = x_t; `time` is 1 at noise and 0 at actions; r draws of each row. A model
        that provides `action_times` also takes the time of each action, [b, r, h].

        `seen` is a context; or, in training, which calls it once, an observation, so both can be one forward pass. A
        model with an indicator also takes what each draw is told (`indicator.py`), [b, r].
        """
        ...


class DenoisingModel(ContextModel, Protocol):
    """A module that provides `denoise`."""

    def denoise(self, context: Tree, noisy_actions: Draws, step: Float[Array, "b r"], /) -> Draws:
        """The network's prediction for `noisy_actions` at a diffusion step; r draws of each row."""
        ...


@pytree
class Chain:
    """A sampling trajectory: `noisy` actions from the noise to the result, and the `time` of all but the last.

    Time is flow time, or the diffusion step. All steps can be evaluated again in one pass, with gradients:
    `model.velocity(observation, chain.noisy[:, :-1], chain.time)`. `log_probs` are those of every value after a step,
    where steps are drawn by a distribution.
    """

    time: Float[Array, "b steps"]
    noisy: Float[Array, "b steps+1 h a"]
    log_probs: Float[Array, "b steps h a"] | None = None

    @property
    def actions(self) -> Actions:
        """The end."""
        return self.noisy[:, -1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionSampler(abc.ABC):
    """A method to draw actions. `augmentation` is that of training; sampling uses its deterministic form."""

    augmentation: Augmentation = dataclasses.field(default_factory=NoAugmentation)

    @abc.abstractmethod
    def chain(
        self, model: Network, observation: Observation, noise: Actions, keys: Keys, num_steps: int, keep: bool = True
    ) -> Chain:
        """The chain from `noise` in `num_steps` denoising steps; without `keep` only its end, as a chain of no steps.

        `keys`, one per row, are for samplers that draw more noise at each step.
        """

    def sample(self, model: Network, observation: Observation, noise: Actions, keys: Keys, num_steps: int) -> Actions:
        """Normalised actions: the end of the chain."""
        return self.chain(model, observation, noise, keys, num_steps, keep=False).actions

    def chunks(
        self, model: Network, observation: Observation, keys: Key[Array, " b"], num_steps: int, chunk: tuple[int, ...]
    ) -> Actions:
        """As `sample`, for chunks of shape (h, a), with each row's noise drawn from its key."""
        return self.sample(model, observation, draw_noise(keys, *chunk), keys, num_steps)

    def seen(self, observation: Observation) -> Observation:
        """The observation with the augmentation's deterministic form."""
        return self.augmentation(observation, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSampler(ActionSampler):
    """The model's own `sample_actions(observation, noise, num_steps)`, such as pi0-FAST's, which decodes tokens."""

    def chain(self, model, observation, noise, keys, num_steps, keep=True):
        del keys
        if keep:
            raise UsageError(f"{type(model).__name__} samples its actions itself: it has no chain of denoising steps")
        return _end(model.sample_actions(self.seen(observation), noise, num_steps))


def walk(step: Step, noise: Actions, times: Float[np.ndarray, " steps"], keep: bool) -> Chain:
    """The chain with one step for each of `times`, float32; without `keep` only its end."""
    start, asked = noise.astype(jnp.float32), jnp.asarray(times, jnp.float32)

    def at_time(actions, place):
        index, time = place
        return step(actions, index, jnp.broadcast_to(time, len(actions))), actions if keep else None

    end, before = jax.lax.scan(at_time, start, (jnp.arange(len(times)), asked))
    if before is None:
        return _end(end)
    noisy = jnp.concatenate([jnp.moveaxis(before, 0, 1), end[:, None]], axis=1)
    return Chain(time=jnp.broadcast_to(asked, (len(start), len(times))), noisy=noisy)


def _end(actions: Actions) -> Chain:
    return Chain(time=jnp.zeros((len(actions), 0)), noisy=actions[:, None])


def sample_keys(seed: int, draws: Int[Array, " b"]) -> Key[Array, " b"]:
    """A key for each draw number; open-loop evaluation and inference use the same ones."""
    return for_purpose(row_keys(seed, 0, draws), "validation/sample")
