"""The learning rate by optimizer step: a warm-up, then one of five schedules. Read next: `optimizer_config.py`.

Defaults and formulas are openpi's (`training/optimizer.py` at 15a9616), whose flag names are kept; `tests/golden` holds
the numbers. All schedules are one dataclass with a `kind`, since they differ in numbers, not in code.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from openpi_train.fields import setting

ScheduleKind = Literal["constant", "linear", "cosine", "rsqrt", "wsd"]
Tail = Literal["linear", "cosine", "1-sqrt"]
_FALLING = ("linear", "cosine", "wsd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """A warm-up from `warmup_lr` to `peak_lr`, then one of five schedules.

    constant: stays at the peak (DeepSpeed's WarmupLR). linear, cosine: reach `decay_lr` at step `decay_steps` (which
    counts the warm-up) and stay there. rsqrt: `peak_lr / sqrt(1 + t / decay_steps)`, t counted from the end of the
    warm-up (openpi's `RsqrtDecaySchedule`, where `decay_steps` is called `timescale`). wsd: stays at the peak until the
    last `tail_ratio` of `decay_steps`, in which it falls to `decay_lr` (Hu et al. 2024; the tail `1-sqrt` is that of
    Hägele et al. 2024).
    """

    # Schedule after the warm-up.
    kind: ScheduleKind = "cosine"
    # Steps of the warm-up.
    warmup_steps: int = 1_000
    # The warm-up as a fraction of num_train_steps, instead of warmup_steps.
    warmup_ratio: float | None = None
    # Shorten a warm-up that fills a run whose decay ends with it to a tenth of its steps, with a warning, instead of
    # refusing it. A named experiment does, unless --lr-schedule.warmup-steps is given.
    shorten_warmup: bool = setting(False, on_resume="accept")
    # linear, or DeepSpeed's log: the share log(step + 1) / log(warmup_steps) of the way.
    warmup_shape: Literal["linear", "log"] = "linear"
    # The rate at step 0; None: peak_lr / (warmup_steps + 1).
    warmup_lr: float | None = None
    # The rate at the end of the warm-up.
    peak_lr: float = 2.5e-5
    # Step at which decay_lr is reached, warm-up included (rsqrt: the time scale); None: num_train_steps.
    decay_steps: int | None = 30_000
    # The rate from there on.
    decay_lr: float = 2.5e-6
    # wsd: the share of decay_steps in which the rate falls.
    tail_ratio: float = 0.1
    # wsd: how it falls.
    tail: Tail = "1-sqrt"

    def over(self, num_train_steps: int) -> "LRSchedule":
        """The schedule for a run of this length, with fractions of the length converted to steps."""
        changes: dict[str, Any] = {}
        if self.warmup_ratio is not None:
            # The ceiling, as in transformers' `TrainingArguments.get_warmup_steps`; but a run of one step has none.
            steps = math.ceil(self.warmup_ratio * num_train_steps) if num_train_steps > 1 else 0
            changes |= {"warmup_steps": steps, "warmup_ratio": None}
        if self.decay_steps is None:
            changes |= {"decay_steps": num_train_steps}
            fills = self.kind in _FALLING and self.warmup_steps >= num_train_steps
            if fills and self.shorten_warmup and self.warmup_ratio is None:
                changes |= {"warmup_steps": num_train_steps // 10}
        return dataclasses.replace(self, **changes)

    @property
    def follows_length(self) -> bool:
        """Whether the rates depend on the run's length."""
        return self.warmup_ratio is not None or (self.decay_steps is None and self.kind != "constant")

    def misfit(self, num_train_steps: int) -> str:
        """How the rate's fall does not end with a run of this length, with the flag to change; empty if it does.

        A fall to the peak itself is none.
        """
        own = self.over(num_train_steps)
        end = own.decay_steps or num_train_steps
        if own.kind not in _FALLING or own.decay_lr == own.peak_lr or end == num_train_steps:
            return ""
        if end < num_train_steps:
            what = f"the last {num_train_steps - end} of this run's {num_train_steps} steps stay there"
        else:
            last = float(learning_rate(own.create(), num_train_steps - 1))
            what = f"this run ends at step {num_train_steps}, at {last:.3g}"
        return f"{what} (--lr-schedule.decay-steps None ends the fall with the run)"

    def lengthened(self, before: int, after: int) -> str:
        """What another length changes at a step that both runs have, and the flag that keeps it; empty if nothing."""
        step = min(before, after)
        old, new = (float(learning_rate(self.over(length).create(), step)) for length in (before, after))
        if old == new:
            return ""
        keeps = ""
        if self.warmup_ratio is None:
            last = float(learning_rate(dataclasses.replace(self, decay_steps=before).create(), after - 1))
            keeps = f"; --lr-schedule.decay-steps {before} leaves it as it was, {last:.3g} in the last step"
        return (
            f"the learning rate is spread over the run's length: at step {step} it is {new:.3g}, and was {old:.3g} in "
            f"a run of {before} steps{keeps}"
        )

    def in_words(self, num_train_steps: int) -> str:
        """What the rate does in a run of this length: `from 0 to 5e-05 in 10 steps, then linearly to 0 at step 100`."""
        own = self.over(num_train_steps)
        start, end = own.peak_lr / (own.warmup_steps + 1) if own.warmup_lr is None else own.warmup_lr, own.decay_steps
        if own.warmup_steps:
            log = ", by the logarithm," if own.warmup_shape == "log" else ""
            risen = f"from {start:g} to {own.peak_lr:g}{log} in {own.warmup_steps} steps"
        else:
            risen = f"{own.peak_lr:g}"
        match own.kind:
            case "constant":
                return f"{risen}, and constant"
            case "rsqrt":
                return f"{risen}, then by the inverse square root of time, in units of {end} steps"
            case "wsd":
                since = (end or 0) - max(round(own.tail_ratio * (end or 0)), 1)
                return (
                    f"{risen}, then constant, and from step {since} on to {own.decay_lr:g} at step {end} ({own.tail})"
                )
        how = {"linear": "linearly", "cosine": "by a cosine"}[own.kind]
        return f"{risen}, then {how} to {own.decay_lr:g} at step {end}"

    def check(self, num_train_steps: int) -> list[str]:
        """What is wrong with these values in a run of this length, each with the flag to change."""
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio < 1:
            return [f"--lr-schedule.warmup-ratio {self.warmup_ratio} must lie in [0, 1); None goes by warmup-steps"]
        problems = self.over(num_train_steps)._check_decay()
        if self.warmup_steps < 0:
            problems.append(f"--lr-schedule.warmup-steps {self.warmup_steps} must be at least 0")
        if self.warmup_lr is not None and not 0 <= self.warmup_lr <= self.peak_lr:
            problems.append(f"--lr-schedule.warmup-lr {self.warmup_lr} must lie between 0 and peak_lr {self.peak_lr}")
        return problems

    def _check_decay(self) -> list[str]:
        problems = []
        falls = self.kind in _FALLING
        steps = self.decay_steps or 0
        if falls and steps <= self.warmup_steps:
            problems.append(
                f"lr_schedule.decay_steps {steps} counts the warm-up and must be greater than lr_schedule."
                f"warmup_steps {self.warmup_steps}; set --lr-schedule.decay-steps, "
                "--lr-schedule.warmup-steps or --lr-schedule.kind constant"
            )
        elif self.kind == "wsd" and not 0 < self.tail_ratio * steps <= steps - self.warmup_steps:
            problems.append(
                f"--lr-schedule.tail-ratio {self.tail_ratio} of {steps} decay_steps must be above 0 and leave room for "
                f"the warm-up's {self.warmup_steps}; at most {1 - self.warmup_steps / steps:.3g}"
            )
        if falls and self.decay_lr > self.peak_lr:
            problems.append(
                f"lr_schedule.decay_lr {self.decay_lr} is above lr_schedule.peak_lr {self.peak_lr}: the decay would "
                "raise the rate; lower --lr-schedule.decay-lr"
            )
        if self.kind == "rsqrt" and steps < 1:
            problems.append("lr_schedule.decay_steps must be at least 1 for rsqrt; set --lr-schedule.decay-steps")
        return problems

    def create(self) -> optax.Schedule:
        """The optax schedule: optimizer step -> learning rate.

        Raises ValueError if it depends on the run's length, which `over` fills in.
        """
        if self.warmup_ratio is not None or self.decay_steps is None:
            raise ValueError("this schedule depends on the run's length: create it by over(num_train_steps).create()")
        decay = self._after_warmup(self.decay_steps)
        if not self.warmup_steps:
            return decay
        start = self.peak_lr / (self.warmup_steps + 1) if self.warmup_lr is None else self.warmup_lr
        if self.warmup_shape == "linear":
            warmup = optax.linear_schedule(start, self.peak_lr, self.warmup_steps)
        else:
            warmup = functools.partial(_logarithmic, start, self.peak_lr, self.warmup_steps)
        return optax.join_schedules([warmup, decay], [self.warmup_steps])

    def _after_warmup(self, decay_steps: int) -> optax.Schedule:
        """The rate by steps since the end of the warm-up."""
        after = max(decay_steps - self.warmup_steps, 1)
        match self.kind:
            case "linear" | "cosine":
                return _falling(self.kind, self.peak_lr, self.decay_lr, after)
            case "constant":
                return optax.constant_schedule(self.peak_lr)
            case "rsqrt":
                return functools.partial(_inverse_square_root, self.peak_lr, decay_steps)
            case "wsd":
                tail_steps = max(round(self.tail_ratio * decay_steps), 1)
                tail = _falling(self.tail, self.peak_lr, self.decay_lr, tail_steps)
                return optax.join_schedules([optax.constant_schedule(self.peak_lr), tail], [after - tail_steps])


def _falling(shape: Tail, peak: float, end: float, steps: int) -> optax.Schedule:
    match shape:
        case "cosine":
            return optax.cosine_decay_schedule(peak, steps, end / peak if peak else 0.0)
        case "linear":
            return optax.linear_schedule(peak, end, steps)
        case "1-sqrt":
            return lambda count: peak - (peak - end) * jnp.sqrt(jnp.clip(count / steps, 0.0, 1.0))


def _inverse_square_root(peak: float, timescale: float, count: Any) -> jax.Array:
    return peak / jnp.sqrt(1 + count / timescale)


def _logarithmic(start: float, peak: float, steps: int, count: Any) -> jax.Array:
    # At least 2, as in DeepSpeed: log(1) is no divisor.
    return start + (peak - start) * jnp.log1p(count) / math.log(max(steps, 2))


def learning_rate(schedule: optax.Schedule, step) -> jnp.ndarray:
    """The rate that the update at `step` uses, float32."""
    return jnp.asarray(schedule(step), jnp.float32)
