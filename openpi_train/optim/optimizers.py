"""Optimizer configurations and their optax rules. Read next: `muon.py`, then `training/step.py`.

AdamW's defaults are openpi's (`training/optimizer.py` at 15a9616), the others' optax's. Weight decay is decoupled and
times the learning rate except in SGD. Each layer of a stack is treated as a separate parameter.
"""

import dataclasses
from collections.abc import Mapping

import optax

from openpi_train.optim.muon import Muon
from openpi_train.optim.optimizer_config import OptimizerConfig
from openpi_train.optim.state_rules import by_layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerConfig):
    """AdamW (Loshchilov & Hutter 2019) with openpi's defaults."""

    # Decay of the first moment.
    b1: float = 0.9
    # Decay of the second moment.
    b2: float = 0.95
    # Added to the root of the second moment.
    eps: float = 1e-8
    # Decoupled weight decay, times the learning rate.
    weight_decay: float = 1e-10

    def decay_rates(self) -> dict[str, float]:
        return {"b1": self.b1, "b2": self.b2}

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Decoupled weight decay, scaled by the learning rate."""
        return optax.adamw(
            schedule, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, mask=self.decays
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(OptimizerConfig):
    """Adafactor (Shazeer & Stern 2018): stores a row and a column of each matrix's second moment.

    optax's, except that weight decay is scaled by the learning rate. Its usual rates are far larger than AdamW's: they
    are relative to the size of the parameters (`multiply_by_parameter_scale`).
    """

    # Matrices whose smaller dim is less than this keep their whole second moment.
    min_dim_size_to_factor: int = 128
    # Exponent of the second moment's decay: at step t it keeps 1 - t ** -decay_rate.
    decay_rate: float = 0.8
    # The rate is relative to the root mean square of each parameter.
    multiply_by_parameter_scale: bool = True
    # Updates of a larger root mean square are scaled down to it, parameter by parameter.
    clipping_threshold: float = 1.0
    # Momentum: share of the last update that is kept; None keeps no first moment.
    momentum: float | None = None

    def decay_rates(self) -> dict[str, float]:
        return {} if self.momentum is None else {"momentum": self.momentum}

    def check(self) -> list[str]:
        """Also checks that the second moment, which changes less and less, is not stored in bfloat16."""
        problems = super().check()
        if self.moment_dtype != "float32":
            problems.append(
                f"--optimizer.moment-dtype {self.moment_dtype}: Adafactor's statistics are small already, and change "
                "by less per step than bfloat16 can hold; leave it at float32"
            )
        if self.clipping_threshold < 1:
            problems.append(f"--optimizer.clipping-threshold {self.clipping_threshold} must be at least 1")
        return problems

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Layer by layer: optax would take the two largest dims and one mean of a whole stack."""
        decay = self.weight_decay
        return by_layer(
            optax.adafactor(
                schedule,
                min_dim_size_to_factor=self.min_dim_size_to_factor,
                decay_rate=self.decay_rate,
                multiply_by_parameter_scale=self.multiply_by_parameter_scale,
                clipping_threshold=self.clipping_threshold,
                momentum=self.momentum,
                weight_decay_rate=(lambda count: decay * schedule(count)) if decay else None,
                weight_decay_mask=self.decays,
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(OptimizerConfig):
    """Lion (Chen et al. 2023): the sign of a moving average; one moment. Rates are 3 to 10 times below AdamW's."""

    # How the gradient and the moment are mixed for the update.
    b1: float = 0.9
    # Decay of the moment.
    b2: float = 0.99
    # Decoupled weight decay, times the learning rate.
    weight_decay: float = 1e-3

    def decay_rates(self) -> dict[str, float]:
        return {"b1": self.b1, "b2": self.b2}

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Decoupled weight decay, scaled by the learning rate."""
        return optax.lion(schedule, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay, mask=self.decays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(OptimizerConfig):
    """Stochastic gradient descent with optional momentum."""

    # Added to the gradient, times the parameter.
    weight_decay: float = 0.0
    # Share of the last update that is kept; 0 keeps no state.
    momentum: float = 0.9
    # Look ahead along the momentum.
    nesterov: bool = False

    def decay_rates(self) -> dict[str, float]:
        return {"momentum": self.momentum}

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Plain momentum; `momentum=0` keeps no state."""
        rule = optax.sgd(schedule, self.momentum or None, self.nesterov)
        decay = optax.add_decayed_weights(self.weight_decay, self.decays)
        return optax.chain(decay, rule) if self.weight_decay else rule


OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {
    "adamw": AdamW,
    "adafactor": Adafactor,
    "lion": Lion,
    "muon": Muon,
    "sgd": SGD,
}


def named_optimizer(name: str, like: OptimizerConfig) -> OptimizerConfig:
    """The optimizer of this name: `like` itself if it has that name, else a new one with `like`'s common fields.

    Raises ValueError with the known names.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; allowed: {', '.join(OPTIMIZERS)}")
    if type(like) is OPTIMIZERS[name]:
        return like
    shared = ("clip_gradient_norm", "decay_mask", "rate_mask", "rate_factor", "moment_dtype")
    return OPTIMIZERS[name](**{field: getattr(like, field) for field in shared})
