"""Muon: optax's rule for the matrices of hidden layers, and AdamW for other parameters.

Read next: `optimizers.py`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, muon

from openpi_train.optim.optimizer_config import OptimizerConfig, check_regex
from openpi_train.optim.state_rules import is_stacked, with_parts

# The weights of products. All else goes by another name: biases, scales, and tables of embeddings, positions and
# vocabularies.
_WEIGHT = re.compile(r"(^|/)(kernel|weight|lora_a|lora_b)$")
# First and last layers: of pixels, of robots' states and actions, of latents and of scores.
_END = re.compile(
    r"(^|/)(patch_embedding|stem|score|state_proj|action_(in|out)_proj|(vae_)?(state|action|latent)"
    r"|denoiser/(inputs|condition|outputs)|denoiser/down/0/0/(block_1/conv|shortcut))/(kernel|weight)$"
)
# Weights whose heads lie between inputs and outputs (inputs, heads, width).
_HEADS_BETWEEN = re.compile(r"(^|/)attention/((query|key|value)/kernel|(query|key_value)/(weight|lora_b))$")
# Convolutions: all their positions and channels are inputs of one matrix, as in Jordan's code.
_CONVOLUTION = re.compile(r"(^|/)(conv(_\d)?|shortcut|image|(shorten|lengthen)/\d+)/kernel$")
# Products whose outputs are several matrices' side by side: queries, keys and values; scale, shift and gate.
_PARTS = ((re.compile(r"(^|/)project/kernel$"), 3), (re.compile(r"(^|/)modulation/kernel$"), 3),
          (re.compile(r"(^|/)film/kernel$"), 2))  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(OptimizerConfig):
    """Muon (Jordan 2024): orthogonalised momentum for the matrices of hidden layers; AdamW for other parameters.

    Layers, heads, the gate and up halves of an MLP, and the queries, keys and values of one product are separate
    matrices; the heads of kernels that do not tell them apart (ACT's, the denoising transformer's) are one. A
    convolution is one matrix, as are each of the two factors of a low-rank addition. AdamW gets vectors, tables,
    vocabularies, and the first and last layers: those of pixels, of robots' states and actions, and of scores.
    `consistent_rms` makes updates as large as AdamW's (Liu et al. 2025), so that one learning rate fits
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
    # Regex of the paths of further parameters for AdamW; None: none.
    adam_mask: str | None = None
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
        return optax.chain(with_parts(num_parts, directions), decay, optax.scale_by_learning_rate(schedule))

    def matrices(self, params: Mapping[str, object]) -> dict[str, MuonDimensionNumbers | None]:
        """By path: which dims are a matrix's inputs and outputs; None for parameters of AdamW.

        Parameters of several parts (`num_parts`) have these on the dim before the last.
        """
        return {path: self._matrix(path, getattr(leaf, "ndim", 0)) for path, leaf in params.items()}

    def _matrix(self, path: str, num_dims: int) -> MuonDimensionNumbers | None:
        if num_dims - is_stacked(path) < 2 or not _WEIGHT.search(path) or _END.search(path):
            return None
        if self.adam_mask is not None and re.search(self.adam_mask, path):
            return None
        if _CONVOLUTION.search(path):
            return MuonDimensionNumbers(reduction_axis=tuple(range(num_dims - 1)), output_axis=-1)
        between = _HEADS_BETWEEN.search(path) or num_parts(path) > 1
        return MuonDimensionNumbers(reduction_axis=-3 if between else -2, output_axis=-1)


def num_parts(path: str) -> int:
    """How many matrices lie side by side in the last dim of the parameter."""
    return next((number for pattern, number in _PARTS if pattern.search(path)), 1)
