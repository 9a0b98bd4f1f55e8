"""The published losses of preference optimization, as functions of one pair's log-probabilities.

All are variants of DPO (Rafailov et al. 2023): with a and b the log-ratios log(policy / reference) of the chosen and
the rejected completion, DPO's loss is -log sigmoid(beta (a - b)). `VARIANTS` lists them. Read next: `preference.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from openpi_train.types import pytree


@pytree
class PairLogProbs:
    """Log-probabilities of the completions of each pair, under the policy and under the reference (0 without one)."""

    chosen: Float[Array, " b"]
    rejected: Float[Array, " b"]
    reference_chosen: Float[Array, " b"]
    reference_rejected: Float[Array, " b"]

    @property
    def chosen_ratio(self) -> Float[Array, " b"]:
        """log(policy / reference) of the chosen completion."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Float[Array, " b"]:
        """log(policy / reference) of the rejected completion."""
        return self.rejected - self.reference_rejected

    @property
    def difference(self) -> Float[Array, " b"]:
        """The difference of the two ratios."""
        return self.chosen_ratio - self.rejected_ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The numbers of a loss: `beta`, the probability `smoothing` that a pair's labels are swapped, `target_margin`."""

    beta: float
    smoothing: float = 0.0
    target_margin: float = 0.0


PairLoss = Callable[[PairLogProbs, LossSettings], Float[Array, " b"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One published loss, and what it asks for.

    `averages`: log-probabilities are divided by the number of tokens. `has_reference`: there is a reference model.
    `smooths`: label smoothing is part of it. `nll_weight`: its own weight of the chosen completion's likelihood.
    """

    loss: PairLoss
    averages: bool = False
    has_reference: bool = True
    smooths: bool = False
    has_margin: bool = False
    nll_weight: float = 0.0


def _log_sigmoid(x: Array) -> Array:
    return jax.nn.log_sigmoid(x)


def log_sigmoid_loss(x: Float[Array, "*n"], smoothing: float) -> Float[Array, "*n"]:
    """-log sigmoid(x), where a share `smoothing` of the labels is taken as swapped."""
    return -(1 - smoothing) * _log_sigmoid(x) - smoothing * _log_sigmoid(-x)


def _sigmoid(pair: PairLogProbs, how: LossSettings) -> Array:
    """DPO; with label smoothing, conservative DPO (Mitchell 2023)."""
    return log_sigmoid_loss(how.beta * pair.difference, how.smoothing)


def _hinge(pair: PairLogProbs, how: LossSettings) -> Array:
    """SLiC (Zhao et al. 2023), with DPO's rewards as in RSO (Liu et al. 2023)."""
    return jax.nn.relu(1 - how.beta * pair.difference)


def _ipo(pair: PairLogProbs, how: LossSettings) -> Array:
    """IPO (Azar et al. 2023), with averaged log-probabilities."""
    return jnp.square(pair.difference - 1 / (2 * how.beta))


def _robust(pair: PairLogProbs, how: LossSettings) -> Array:
    """Robust DPO (Chowdhury et al. 2024): unbiased if a share `smoothing` of the labels is swapped."""
    x = how.beta * pair.difference
    return (-(1 - how.smoothing) * _log_sigmoid(x) + how.smoothing * _log_sigmoid(-x)) / (1 - 2 * how.smoothing)


def _exo_pair(pair: PairLogProbs, how: LossSettings) -> Array:
    """EXO (Ji et al. 2024): the reverse KL divergence from the smoothed labels."""
    x = how.beta * pair.difference
    chosen, rejected = _log_sigmoid(x), _log_sigmoid(-x)
    from_chosen = jnp.exp(chosen) * (chosen - jnp.log1p(-how.smoothing))
    return from_chosen + jnp.exp(rejected) * (rejected - jnp.log(how.smoothing))


def _nca_pair(pair: PairLogProbs, how: LossSettings) -> Array:
    """NCA (Chen et al. 2024), for two completions: it also holds up the chosen one's likelihood."""
    chosen, rejected = how.beta * pair.chosen_ratio, how.beta * pair.rejected_ratio
    return -_log_sigmoid(chosen) - 0.5 * _log_sigmoid(-chosen) - 0.5 * _log_sigmoid(-rejected)


def _sppo_hard(pair: PairLogProbs, how: LossSettings) -> Array:
    """SPPO (Wu et al. 2024), with win probabilities of 1 and 0."""
    half = 0.5 / how.beta
    return jnp.square(pair.chosen_ratio - half) + jnp.square(pair.rejected_ratio + half)


def _apo_zero(pair: PairLogProbs, how: LossSettings) -> Array:
    """APO-zero (D'Oosterlinck et al. 2024): for chosen completions that are better than the policy's."""
    return jax.nn.sigmoid(-how.beta * pair.chosen_ratio) + jax.nn.sigmoid(how.beta * pair.rejected_ratio)


def _apo_down(pair: PairLogProbs, how: LossSettings) -> Array:
    """APO-down (D'Oosterlinck et al. 2024): for chosen completions that are worse than the policy's."""
    return jax.nn.sigmoid(how.beta * pair.chosen_ratio) + jax.nn.sigmoid(-how.beta * pair.difference)


def _discopop(pair: PairLogProbs, how: LossSettings) -> Array:
    """DiscoPOP's log-ratio modulated loss (Lu et al. 2024), with its temperature of 0.05."""
    x = how.beta * pair.difference
    share = jax.nn.sigmoid(x / 0.05)
    return (share - 1) * _log_sigmoid(x) + share * jnp.exp(-x)


def _simpo(pair: PairLogProbs, how: LossSettings) -> Array:
    """SimPO (Meng et al. 2024): no reference, averaged log-probabilities, and a margin between the rewards."""
    return -_log_sigmoid(how.beta * pair.difference - how.target_margin)


def _orpo(pair: PairLogProbs, how: LossSettings) -> Array:
    """ORPO's odds ratio (Hong et al. 2024), weighted by `beta`; the likelihood is its other part."""

    def log_odds(log_prob: Array) -> Array:
        # Odds of a certain completion are infinite.
        return log_prob - jnp.log(-jnp.expm1(jnp.minimum(log_prob, -1e-6)))

    return -how.beta * _log_sigmoid(log_odds(pair.chosen) - log_odds(pair.rejected))


# `aot` and `aot_unpaired` (Melnyk et al. 2024) are DPO's formula on pairs of quantiles: `preference.py` forms these.
VARIANTS: Mapping[str, Variant] = {
    "sigmoid": Variant(loss=_sigmoid, smooths=True),
    "sigmoid_norm": Variant(loss=_sigmoid, smooths=True, averages=True),
    "hinge": Variant(loss=_hinge),
    "ipo": Variant(loss=_ipo, averages=True),
    "robust": Variant(loss=_robust, smooths=True),
    "exo_pair": Variant(loss=_exo_pair, smooths=True),
    "nca_pair": Variant(loss=_nca_pair),
    "sppo_hard": Variant(loss=_sppo_hard),
    "aot": Variant(loss=_sigmoid, smooths=True),
    "aot_unpaired": Variant(loss=_sigmoid, smooths=True),
    "apo_zero": Variant(loss=_apo_zero),
    "apo_down": Variant(loss=_apo_down),
    "discopop": Variant(loss=_discopop),
    "simpo": Variant(loss=_simpo, averages=True, has_reference=False, has_margin=True),
    "orpo": Variant(loss=_orpo, averages=True, has_reference=False, nll_weight=1.0),
}
