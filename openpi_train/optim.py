"""Schedules and optimizers as values, and the optax chain they make. Read next: `training/step.py`.

Defaults and formulas are openpi's (`training/optimizer.py` at 15a9616), whose flag names are kept; `tests/golden` holds
the numbers. Here every schedule is one dataclass with a `kind`, since a schedule differs by three numbers, not by code.
"""

import abc
import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import optax

ScheduleKind = Literal["constant", "linear", "cosine", "rsqrt"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """Linear warm-up from `peak_lr / (warmup_steps + 1)` to `peak_lr`, then one of four decays.

    constant: stays at the peak. linear, cosine: reach `decay_lr` at step `decay_steps` (which counts the warm-up) and
    stay there. rsqrt: `peak_lr / sqrt(1 + t / decay_steps)`, t counted from the end of the warm-up (openpi's
    `RsqrtDecaySchedule`, where `decay_steps` is called `timescale`).
    """

    # What follows the warm-up.
    kind: ScheduleKind = "cosine"
    # Steps of the linear warm-up.
    warmup_steps: int = 1_000
    # The rate at its end.
    peak_lr: float = 2.5e-5
    # Step at which decay_lr is reached, warm-up included (rsqrt: the time scale).
    decay_steps: int = 30_000
    # The rate from there on.
    decay_lr: float = 2.5e-6

    def check(self) -> list[str]:
        """What is wrong with these values, each with the flag to change."""
        problems = []
        if self.kind in ("linear", "cosine") and self.decay_steps <= self.warmup_steps:
            problems.append(
                f"lr_schedule.decay_steps {self.decay_steps} counts the warm-up and must be greater than lr_schedule."
                f"warmup_steps {self.warmup_steps}; set --lr-schedule.decay-steps or --lr-schedule.kind constant"
            )
        if self.kind in ("linear", "cosine") and self.decay_lr > self.peak_lr:
            problems.append(
                f"lr_schedule.decay_lr {self.decay_lr} is above lr_schedule.peak_lr {self.peak_lr}: the decay would "
                "raise the rate; lower --lr-schedule.decay-lr"
            )
        if self.warmup_steps < 0:
            problems.append(f"--lr-schedule.warmup-steps {self.warmup_steps} must be at least 0")
        if self.kind == "rsqrt" and self.decay_steps < 1:
            problems.append("lr_schedule.decay_steps must be at least 1 for rsqrt; set --lr-schedule.decay-steps")
        return problems

    def create(self) -> optax.Schedule:
        """The schedule as optax understands it: optimizer step -> learning rate."""
        start = self.peak_lr / (self.warmup_steps + 1)
        after = self.decay_steps - self.warmup_steps
        decay: optax.Schedule
        match self.kind:
            case "cosine":
                alpha = self.decay_lr / self.peak_lr if self.peak_lr else 0.0
                decay = optax.cosine_decay_schedule(self.peak_lr, max(after, 1), alpha)
            case "linear":
                decay = optax.linear_schedule(self.peak_lr, self.decay_lr, max(after, 1))
            case "constant":
                decay = optax.constant_schedule(self.peak_lr)
            case "rsqrt":
                decay = functools.partial(_inverse_square_root, self.peak_lr, self.decay_steps)

        warmup = optax.linear_schedule(start, self.peak_lr, max(self.warmup_steps, 1))
        return optax.join_schedules([warmup, decay], [self.warmup_steps]) if self.warmup_steps else decay


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(abc.ABC):
    """An optimizer without its learning rate."""

    # Gradients of a larger global norm are scaled down to it.
    clip_gradient_norm: float = 1.0

    @abc.abstractmethod
    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """The optax rule that follows the clipping."""

    def check(self) -> list[str]:
        """What is wrong with these values, each with the flag to change."""
        if self.clip_gradient_norm > 0:
            return []
        return [f"--optimizer.clip-gradient-norm {self.clip_gradient_norm} must be above 0 (large: no clipping)"]

    def create(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Clip by the global norm, then the update rule."""
        return optax.chain(optax.clip_by_global_norm(self.clip_gradient_norm), self.update_rule(schedule))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerConfig):
    """AdamW with openpi's defaults. `decay_mask`: a regex of the parameter paths that decay; None decays all."""

    # Decay of the first moment.
    b1: float = 0.9
    # Decay of the second moment.
    b2: float = 0.95
    # Added to the root of the second moment.
    eps: float = 1e-8
    # Decoupled weight decay, times the learning rate.
    weight_decay: float = 1e-10
    # Regex of the parameter paths that decay; None decays all.
    decay_mask: str | None = None

    def check(self) -> list[str]:
        """Also whether `decay_mask` is a regular expression."""
        try:
            re.compile(self.decay_mask or "")
        except re.error as error:
            return [*super().check(), f"--optimizer.decay-mask {self.decay_mask!r} is no regular expression: {error}"]
        return super().check()

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Decoupled weight decay, scaled by the learning rate."""
        return optax.adamw(
            schedule, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, mask=self._decays
        )

    def _decays(self, params: Mapping[str, Any]) -> dict[str, bool]:
        return {path: self.decay_mask is None or bool(re.search(self.decay_mask, path)) for path in params}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(OptimizerConfig):
    """Stochastic gradient descent with optional momentum."""

    # Share of the last update that is kept; 0 keeps no state.
    momentum: float = 0.9
    # Look ahead along the momentum.
    nesterov: bool = False

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Plain momentum; `momentum=0` keeps no state."""
        return optax.sgd(schedule, self.momentum or None, self.nesterov)


def _inverse_square_root(peak: float, timescale: float, count: Any) -> Any:
    return peak / jnp.sqrt(1 + count / timescale)


def learning_rate(schedule: optax.Schedule, step) -> jnp.ndarray:
    """The rate that the update at `step` uses, float32."""
    return jnp.asarray(schedule(step), jnp.float32)
