"""Dynamic loss scaling for float16: config, state and its updates. Read next: `training/step.py`.

float16 ranges from 6e-8 to 65504: the loss is multiplied by a scale before the backward pass, so that small gradients
do not underflow, and gradients are divided by it afterwards. Semantics are DeepSpeed's (`runtime/fp16/loss_scaler.py`).
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openpi_train.types import pytree


@pytree
class LossScale:
    """The scale, the good steps since it last changed or overflowed, and the overflows left before it shrinks."""

    value: Float[Array, ""]
    good_steps: Int[Array, ""]
    patience: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the scale changes; used if the model computes in float16, without effect otherwise.

    An update that overflows (a gradient is not finite) is not applied, and is no error while the scale can shrink.
    """

    # The scale at the first step; powers of two cost no rounding.
    initial: float = 2.0**16
    # Good steps in a row after which it grows; 0 never (a fixed scale: minimum as initial).
    growth_interval: int = 1_000
    # Factor of growth.
    growth: float = 2.0
    # Factor of shrinking on overflow.
    backoff: float = 0.5
    # Minimum of the scale; an overflow there is a NaN or Inf update (--on-nan).
    minimum: float = 1.0
    # Overflows before the first one that shrinks it, counting that one; restored when it grows.
    hysteresis: int = 2

    def check(self) -> list[str]:
        """What is wrong with these values, each with the flag to change."""
        problems = []
        if not 0 < self.minimum <= self.initial:
            problems.append(
                f"--loss-scaling.minimum {self.minimum} must be above 0 and at most --loss-scaling.initial "
                f"{self.initial}"
            )
        if not self.backoff < 1 < self.growth or self.backoff <= 0:
            problems.append(
                f"--loss-scaling.backoff {self.backoff} must lie between 0 and 1, --loss-scaling.growth {self.growth} "
                "above 1"
            )
        if self.hysteresis < 1 or self.growth_interval < 0:
            problems.append(
                f"--loss-scaling.hysteresis {self.hysteresis} must be at least 1, --loss-scaling.growth-interval "
                f"{self.growth_interval} at least 0"
            )
        return problems

    def first(self) -> LossScale:
        """The state before the first step."""
        return LossScale(value=jnp.float32(self.initial), good_steps=jnp.int32(0), patience=jnp.int32(self.hysteresis))

    def can_yield(self, scale: LossScale) -> Bool[Array, ""]:
        """Whether an overflow now can be handled: by hysteresis, or by a smaller scale."""
        return (scale.patience > 1) | (scale.value > self.minimum)

    def after(self, scale: LossScale, overflow: Bool[Array, ""]) -> LossScale:
        """The state after a step that did or did not overflow."""
        shrunk = jnp.maximum(scale.value * self.backoff, self.minimum)
        impatient = scale.patience <= 1
        good_steps = scale.good_steps + 1
        grows = (good_steps >= self.growth_interval) & (self.growth_interval > 0)
        return LossScale(
            value=jnp.where(
                overflow,
                jnp.where(impatient, shrunk, scale.value),
                jnp.where(grows, scale.value * self.growth, scale.value),
            ),
            good_steps=jnp.where(overflow | grows, 0, good_steps),
            patience=jnp.where(
                overflow,
                jnp.maximum(scale.patience - 1, 1),
                jnp.where(grows, self.hysteresis, scale.patience),
            ),
        )
