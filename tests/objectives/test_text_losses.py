"""Losses of language models against torch: value, and gradient of the logits, on rows of other lengths.

`text_losses/make.py` recorded what torch gives.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.nn.vocabulary import token_scores
from openpi_train.objectives.judged_completions import JudgedBatch, JudgedCompletions, mismatched
from openpi_train.objectives.preference_losses import VARIANTS
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.types import PreferenceBatch, TextBatch

with np.load(Path(__file__).parent / "text_losses" / "torch.npz") as file:
    TORCH = dict(file)
ROWS, LENGTH = TORCH["tokens"].shape
TEXTS = TextBatch(
    **{name: jnp.asarray(TORCH[name]) for name in ("tokens", "segments", "positions", "weights")}, row=jnp.arange(ROWS)
)
PAIRS = PreferenceBatch(texts=TEXTS, margin=jnp.asarray(TORCH["margin"]))


class Given(nnx.Module):
    """A model whose scores of the tokens after each token are given: a table that is the identity shows them."""

    def __init__(self, logits, reference=None):
        self.given = nnx.Param(jnp.asarray(logits))
        self.reference = None if reference is None else Given(reference)

    def __call__(self, tokens, positions, segments):
        return self.given[...]

    def scores(self, x, tokens, **how):
        return token_scores(x, jnp.eye(x.shape[-1]), tokens, **how)

    def rewards(self, tokens, positions, segments):
        return self.given[...]


def whole_pass(objective, model, batch):
    """Loss and metrics of a batch in one piece."""
    ready = objective.prepared(batch, lambda function, rows: jax.lax.stop_gradient(function(model, rows)))
    return objective.loss(model, ready, objective.norms(batch), None)


def agrees(case, objective, batch, inputs="logits", reference=TORCH["reference_logits"]):
    """Loss and gradient are torch's: both are sums of a few float32 terms of size 1, by other formulas."""

    def loss(logits):
        return whole_pass(objective, Given(logits, reference), batch)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(TORCH[inputs]))
    scale = max(1.0, float(TORCH[f"{case}/loss"]))
    np.testing.assert_allclose(value, TORCH[f"{case}/loss"], atol=2e-6 * scale)
    np.testing.assert_allclose(gradient, TORCH[f"{case}/gradient"], atol=2e-6 * scale)
    assert metrics["loss"] == value
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize("over", ["tokens", "sequences"])
@pytest.mark.parametrize("case", ["plain", "smooth", "z"])
def test_supervised_loss_is_torchs(over, case):
    how = {"plain": {}, "smooth": {"label_smoothing": 0.1}, "z": {"z_loss": 0.05}}[case]
    objective = SupervisedText(mean_over=over, report_entropy=True, **how)
    metrics = agrees(f"supervised/{over}_{case}", objective, TEXTS)
    assert metrics.keys() == {"loss", "log_prob", "token_accuracy", "entropy"}
    if case == "plain":
        np.testing.assert_allclose(metrics["log_prob"], -metrics["loss"])


CASES = [name.split("/")[1] for name in TORCH if name.startswith("pairs/") and name.endswith("/loss")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_preference_loss_is_torchs(case):
    name = case.removesuffix("_smooth").removesuffix("_nll")
    objective = PreferencePairs(
        variant=name,
        beta=0.3,
        label_smoothing=0.2 if case.endswith("_smooth") else 0.0,
        target_margin=0.4 if name == "simpo" else 0.0,
        nll_weight=0.7 if case.endswith("_nll") else None,
    )
    metrics = agrees(f"pairs/{case}", objective, PAIRS)
    assert ("chosen_fell" in metrics) == VARIANTS[name].has_reference
    assert ("nll" in metrics) == (name == "orpo" or case.endswith("_nll"))


def test_every_variant_is_compared_with_torch():
    assert {case.removesuffix("_smooth").removesuffix("_nll") for case in CASES} == set(VARIANTS)


@pytest.mark.parametrize("baseline", [0.0, 0.8])
def test_loss_of_judged_completions_is_torchs(baseline, monkeypatch):
    def prepared(objective, batch, values_of):
        return JudgedBatch(judged=batch, baseline=jnp.full(ROWS, baseline))

    monkeypatch.setattr(JudgedCompletions, "prepared", prepared)
    objective = JudgedCompletions(beta=0.3, undesirable_weight=1.5)
    metrics = agrees("judged/baseline" if baseline else "judged/zero", objective, PAIRS)
    np.testing.assert_allclose(metrics["kl"], baseline)


@pytest.mark.parametrize("centering", [0.0, 0.1])
def test_loss_of_reward_models_is_torchs(centering):
    case = "reward/centered" if centering else "reward/plain"
    metrics = agrees(case, RewardPairs(centering=centering), PAIRS, "rewards", None)
    chosen, rejected = TORCH["rewards"][:3].T
    np.testing.assert_allclose(metrics["pair_accuracy"], (chosen > rejected).mean())
    np.testing.assert_allclose(metrics["reward_margin"], (chosen - rejected).mean(), rtol=1e-6)


# At equality of policy and reference, beta 0.1: ALGORITHMS of the papers, by hand.
AT_FIRST = {
    "sigmoid": 0.693147, "sigmoid_norm": 0.693147, "hinge": 1.0, "ipo": 25.0, "robust": 0.693147, "exo_pair": 0.510826,
    "nca_pair": 1.386294, "sppo_hard": 50.0, "aot": 0.693147, "aot_unpaired": None, "apo_zero": 1.0, "apo_down": 1.0,
    "discopop": 0.846574,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, value in AT_FIRST.items() if value])
def test_first_loss_is_the_variants_own(name):
    objective = PreferencePairs(variant=name, label_smoothing=0.1 if name == "exo_pair" else 0.0)
    logits = jnp.asarray(TORCH["logits"])
    loss, metrics = whole_pass(objective, Given(logits, logits), PAIRS)
    np.testing.assert_allclose(loss, AT_FIRST[name], rtol=1e-6)
    # A tie is no success, and no fall.
    assert metrics["pair_accuracy"] == metrics["chosen_fell"] == metrics["reward_margin"] == 0


def test_precomputed_reference_gives_what_the_model_would():
    model = Given(jnp.asarray(TORCH["logits"]), TORCH["reference_logits"])
    expected, metrics = whole_pass(PreferencePairs(), model, PAIRS)
    sums = whole_pass(PreferencePairs(variant="simpo"), Given(TORCH["reference_logits"]), PAIRS)[1]
    assert sums["chosen_log_prob"] != metrics["chosen_log_prob"]
    per_token = jax.nn.log_softmax(TORCH["reference_logits"][:, :-1])
    log_probs = np.take_along_axis(per_token, TORCH["tokens"][:, 1:, None], axis=2)[..., 0] * TORCH["weights"][:, 1:]
    given = np.stack([(log_probs * (TORCH["segments"][:, 1:] == number)).sum(axis=1) for number in (1, 2)], axis=1)
    batch = dataclasses.replace(PAIRS, reference_log_probs=jnp.asarray(given))
    objective = PreferencePairs(reference="precomputed")
    np.testing.assert_allclose(whole_pass(objective, Given(model.given[...]), batch)[0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="have no reference_log_probs"):
        whole_pass(objective, model, PAIRS)
    assert objective.needed == {"token_scores"} and PreferencePairs().needed == {"token_scores", "reference"}


def test_falling_likelihood_of_chosen_completions_is_reported():
    """Both completions become less likely, and the loss falls all the same."""
    logits = np.array(TORCH["reference_logits"])
    for row, token in zip(*np.nonzero(TORCH["weights"]), strict=True):
        fall = 1.0 if TORCH["segments"][row, token] == 1 else 4.0
        logits[row, token - 1, TORCH["tokens"][row, token]] -= fall
    loss, metrics = whole_pass(PreferencePairs(), Given(jnp.asarray(logits), TORCH["reference_logits"]), PAIRS)
    assert loss < np.log(2) and metrics["pair_accuracy"] == 1.0
    assert metrics["chosen_fell"] == 1.0 and metrics["chosen_reward"] < 0
    for objective in (PreferencePairs(), JudgedCompletions()):
        (warning,) = objective.warnings({"chosen_fell": 0.6, "loss": None})
        assert warning.startswith("most chosen completions are less likely than under the reference")
        assert not objective.warnings({"chosen_fell": 0.5}) and not objective.warnings({"loss": 1.0})


def texts(tokens, segments, positions, weights):
    given = {"tokens": tokens, "segments": segments, "positions": positions, "weights": weights}
    return TextBatch(**{name: jnp.asarray(array) for name, array in given.items()}, row=jnp.arange(len(tokens)))


@pytest.mark.slow
def test_each_prompt_meets_the_next_completion():
    tokens = np.array([[11, 12, 13, 14, 15, 0, 0], [1, 2, 3, 4, 5, 6, 7], [21, 22, 23, 0, 0, 0, 0]])
    # Row 0: prompt 11 12, completion 13 14 15. Row 1 only fills. Row 2: undesirable, prompt 21, completion 22 23.
    segments = np.array([[1] * 5 + [0] * 2, [0] * 7, [2] * 3 + [0] * 4])
    weights = np.array([[0, 0, 1, 1, 1, 0, 0], [0] * 7, [0, 1, 1, 0, 0, 0, 0]], np.float32)
    positions = np.broadcast_to(np.arange(7), (3, 7))
    found = jax.jit(mismatched)(texts(tokens, segments, positions, weights), jnp.array([True, False, True]))
    assert found.segments.tolist() == [[1, 1, 1, 1, 0, 0, 0], [0] * 7, [1, 1, 1, 1, 0, 0, 0]]
    assert found.tokens[0, :4].tolist() == [11, 12, 22, 23] and found.tokens[2, :4].tolist() == [21, 13, 14, 15]
    assert found.weights.tolist() == [[0, 0, 1, 1, 0, 0, 0], [0] * 7, [0, 1, 1, 1, 0, 0, 0]]
    assert found.positions.tolist() == positions.tolist()


@pytest.mark.slow
def test_mismatched_completion_is_cut_at_the_end_of_the_row_and_a_rows_second_text_is_left_out():
    segments = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0]])
    weights = np.array([[0, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0]], np.float32)
    tokens = np.array([[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 0]])
    found = jax.jit(mismatched)(texts(tokens, segments, tokens, weights), jnp.array([True, True]))
    assert found.tokens.tolist()[0] == [1, 2, 12, 13, 14, 15] and found.tokens[1, :2].tolist() == [11, 3]
    assert found.segments.tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    # Longer than the row: two prompt tokens and five of the completion would be seven.
    tokens[1, 5], segments[1, 5], weights[1, 5] = 16, 1, 1
    found = jax.jit(mismatched)(texts(tokens, segments, tokens, weights), jnp.array([True, True]))
    assert found.tokens[0].tolist() == [1, 2, 12, 13, 14, 15] and found.weights[0].tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.slow
def test_drift_is_the_mean_over_mismatched_texts_and_never_negative():
    objective = JudgedCompletions(beta=0.3)
    values = jnp.array([[0.5, 7.0], [1.5, 7.0], [-0.2, 7.0], [99.0, 7.0]])  # row 3 only fills
    found = objective.prepared(PAIRS, lambda function, rows: values)
    np.testing.assert_allclose(found.baseline, np.full(4, 0.6), rtol=1e-6)
    found = objective.prepared(PAIRS, lambda function, rows: -values)
    assert found.baseline.tolist() == [0.0] * 4


WRONG = {
    "beta 0": (PreferencePairs, {"beta": 0}),
    "label_smoothing is for sigmoid, .*; ipo has none": (PreferencePairs, {"variant": "ipo", "label_smoothing": 0.1}),
    r"label_smoothing 0.5 must be in \[0, 0.5\)": (PreferencePairs, {"variant": "robust", "label_smoothing": 0.5}),
    "exo_pair is infinite": (PreferencePairs, {"variant": "exo_pair"}),
    "target_margin is for simpo": (PreferencePairs, {"target_margin": 0.5}),
    "nll_weight -1": (PreferencePairs, {"nll_weight": -1}),
    "beta -1 must be above 0; desirable_weight -1": (JudgedCompletions, {"beta": -1, "desirable_weight": -1}),
    "no log-probabilities of mismatched texts": (JudgedCompletions, {"reference": "precomputed"}),
    "centering -1": (RewardPairs, {"centering": -1}),
    "label_smoothing 1": (SupervisedText, {"label_smoothing": 1}),
}


@pytest.mark.parametrize("message", WRONG)
def test_settings_that_cannot_be_are_named(message):
    objective, fields = WRONG[message]
    with pytest.raises(ValueError, match=message):
        objective(**fields)
