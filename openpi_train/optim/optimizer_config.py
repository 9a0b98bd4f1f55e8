"""The interface of optimizers: an optax rule after gradient clipping, checked fields. Read next: `optimizers.py`."""

import abc
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import optax

from openpi_train.optim.state_rules import moments_stored_as
from openpi_train.types import Tree

# A bfloat16 has 8 significant bits: a value that changes by less than this share per step may never change.
_FINEST_BFLOAT16_STEP = 2.0**-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(abc.ABC):
    """An optimizer without its learning rate."""

    # Gradients with a larger global norm are scaled down to this norm.
    clip_gradient_norm: float = 1.0
    # Weight decay, times the learning rate.
    weight_decay: float = 0.0
    # Regex of the parameter paths that decay; None decays all.
    decay_mask: str | None = None
    # Regex of the parameter paths that learn at another rate, such as critic/; None: none.
    rate_mask: str | None = None
    # Their rate, relative to the schedule's.
    rate_factor: float = 1.0
    # Storage dtype of the moments between steps; they are computed in float32.
    moment_dtype: Literal["float32", "bfloat16"] = "float32"

    @abc.abstractmethod
    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """The optax rule that follows the clipping."""

    @abc.abstractmethod
    def decay_rates(self) -> dict[str, float]:
        """Decay rates by field: how much of each moment is kept per step, from 0 to below 1."""

    def check(self) -> list[str]:
        """What is wrong with these values, each with the flag to change."""
        problems = []
        if not self.clip_gradient_norm > 0:
            problems.append(
                f"--optimizer.clip-gradient-norm {self.clip_gradient_norm} must be above 0 (large: no clipping)"
            )
        if self.weight_decay < 0:
            problems.append(f"--optimizer.weight-decay {self.weight_decay} must be at least 0")
        for name, rate in self.decay_rates().items():
            flag = f"--optimizer.{name.replace('_', '-')} {rate}"
            if not 0 <= rate < 1:
                problems.append(f"{flag} must lie in [0, 1)")
            elif self.moment_dtype == "bfloat16" and 1 - rate < _FINEST_BFLOAT16_STEP:
                problems.append(
                    f"{flag}: a moment in bfloat16 that changes by {1 - rate:.2g} of itself per step would be rounded "
                    f"back to what it was; at most {1 - _FINEST_BFLOAT16_STEP:.3g}, or --optimizer.moment-dtype float32"
                )
        if not 0 < self.rate_factor < float("inf"):
            problems.append(f"--optimizer.rate-factor {self.rate_factor} must be above 0 and finite")
        if (self.rate_mask is None) != (self.rate_factor == 1):
            problems.append(
                f"--optimizer.rate-mask {self.rate_mask} with --optimizer.rate-factor {self.rate_factor}: give both, "
                "the parameters and the factor of their learning rate, or neither"
            )
        masks = {"decay_mask": self.decay_mask, "rate_mask": self.rate_mask}
        return problems + [problem for name, mask in masks.items() for problem in check_regex(name, mask)]

    def create(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Clip by the global norm, then the update rule."""
        rule = self.update_rule(schedule)
        if self.moment_dtype != "float32":
            rule = moments_stored_as(jnp.dtype(self.moment_dtype), rule)
        if self.rate_mask is not None:
            rule = optax.chain(rule, optax.stateless(lambda updates, _: self._at_own_rates(updates)))
        return optax.chain(optax.clip_by_global_norm(self.clip_gradient_norm), rule)

    def _at_own_rates(self, updates: Tree) -> dict[str, Any]:
        """The updates, times `rate_factor` where `rate_mask` matches."""
        matches = re.compile(self.rate_mask or "").search
        return {path: self.rate_factor * leaf if matches(path) else leaf for path, leaf in updates.items()}

    def decays(self, params: Mapping[str, object]) -> dict[str, bool]:
        """By path: whether weight decay acts on the parameter."""
        return {path: self.decay_mask is None or bool(re.search(self.decay_mask, path)) for path in params}


def check_regex(field: str, pattern: str | None) -> list[str]:
    """What is wrong with a field that holds a regular expression, or None."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        return [f"--optimizer.{field.replace('_', '-')} {pattern!r} is no regular expression: {error}"]
    return []
