"""Muon: optax's rule for matrices, and AdamW for other parameters. Read next: `optimizers.py`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, muon

from openpi_train.optim.optimizer_config import OptimizerConfig, check_regex
from openpi_train.optim.state_rules import is_stacked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(OptimizerConfig):
    """Muon (Jordan 2024): orthogonalised momentum for matrices; AdamW for other parameters.

    A matrix is the last two dims of a parameter; layers, heads, and the gate and up halves of an MLP are separate
    matrices. `consistent_rms` makes updates as large as AdamW's (Liu et al. 2025), so that one learning rate fits
    both kinds. optax's Muon gives its AdamW the Nesterov step too.
    """

    # Decay of the matrices' momentum.
    beta: float = 0.95
    # Newton-Schulz iterations of the orthogonalisation.
    ns_steps: int = 5
    # Nesterov momentum.
    nesterov: bool = True
    # Root mean square of an orthogonalised update; None: sqrt(max(1, outputs / inputs)) times an orthogonal matrix.
    consistent_rms: float | None = 0.2
    # Decoupled weight decay, times the learning rate.
    weight_decay: float = 0.0
    # Regex of paths for AdamW, in addition to vectors: biases, scales, tables, projections from and to robot units.
    adam_mask: str = r"(^|/)(bias|scale)$|embedding|action_in_proj|action_out_proj|state_proj"
    # AdamW's decay of the first moment.
    adam_b1: float = 0.9
    # AdamW's decay of the second moment.
    adam_b2: float = 0.95

    def decay_rates(self) -> dict[str, float]:
        return {"beta": self.beta, "adam_b1": self.adam_b1, "adam_b2": self.adam_b2}

    def check(self) -> list[str]:
        """Also whether `adam_mask` is a regular expression."""
        problems = super().check()
        if self.ns_steps < 1:
            problems.append(f"--optimizer.ns-steps {self.ns_steps} must be at least 1")
        return [*problems, *check_regex("adam_mask", self.adam_mask)]

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Update directions of both kinds, then one weight decay and one learning rate for all."""
        matrices: Any = self.matrices  # by path; optax's annotation asks for nested trees
        directions = muon(
            -1.0,  # optax's Muon ends with minus the rate; ours comes after the decay, so `decay_mask` applies to all
            beta=self.beta,
            ns_steps=self.ns_steps,
            nesterov=self.nesterov,
            consistent_rms=self.consistent_rms,
            adam_b1=self.adam_b1,
            adam_b2=self.adam_b2,
            muon_weight_dimension_numbers=matrices,
        )
        decay = optax.add_decayed_weights(self.weight_decay, self.decays)
        return optax.chain(directions, decay, optax.scale_by_learning_rate(schedule))

    def matrices(self, params: Mapping[str, Any]) -> dict[str, MuonDimensionNumbers | None]:
        """By path: which dims are a matrix's inputs and outputs; None for parameters of AdamW."""
        return {path: self._matrix(path, getattr(leaf, "ndim", 0)) for path, leaf in params.items()}

    def _matrix(self, path: str, num_dims: int) -> MuonDimensionNumbers | None:
        if num_dims - is_stacked(path) < 2 or re.search(self.adam_mask, path):
            return None
        # SigLIP's projections to heads have the heads between inputs and outputs (inputs, heads, width).
        heads_between = re.search(r"attention/(query|key|value)/kernel$", path)
        return MuonDimensionNumbers(reduction_axis=-3 if heads_between else -2, output_axis=-1)
