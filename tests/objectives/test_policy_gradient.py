"""Policy gradients against torch with TRL's formulas, and against closed forms (ALGORITHMS, P1 to P5).

`policy_losses/make.py` recorded what torch gives.
"""

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.rl.advantages import group_relative, leave_one_out
from openpi_train.sampling.distribution import Distribution, UnitScores
from openpi_train.sampling.token_distribution import TokenDistribution
from openpi_train.types import RolloutBatch, TextBatch, TokenTraces, tree_of

with np.load(Path(__file__).parent / "policy_losses" / "torch.npz") as file:
    TORCH = dict(file)
ROWS, LENGTH, VOCABULARY = TORCH["logits"].shape
MASK = TORCH["mask"]


class Given(nnx.Module):
    """A model whose logits after each token are given, and whose critic's values are."""

    def __init__(self, logits, values=None):
        self.given, self.said = nnx.Param(jnp.asarray(logits)), values

    def __call__(self, tokens, positions, segments):
        return self.given[...]

    def logits(self, x):
        return x

    def values(self, tokens, positions, segments):
        return self.said


PLAIN = TokenDistribution()


def traces():
    shape = (ROWS, LENGTH)
    texts = TextBatch(
        tokens=jnp.asarray(TORCH["tokens"]),
        segments=jnp.ones(shape, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(LENGTH), shape),
        weights=jnp.asarray(np.pad(MASK, ((0, 0), (1, 0))), jnp.float32),
        row=jnp.arange(ROWS),
    )
    return TokenTraces(texts=texts, num_tokens=jnp.full(ROWS, VOCABULARY))


def scored(logits, distribution=PLAIN):
    return distribution.scores(Given(logits), traces()).log_prob


def batch(distribution=PLAIN, advantages=None, is_fresh=False, mask=MASK):
    acting, sampling, reference = (
        scored(TORCH[f"{name}_logits"], distribution) for name in ("acting", "sampling", "reference")
    )
    one = np.broadcast_to(TORCH["advantages"][:, None], MASK.shape) if advantages is None else advantages
    return RolloutBatch(
        traces=traces(),
        mask=jnp.asarray(mask),
        is_rollout=jnp.ones(ROWS, bool),
        advantages=jnp.asarray(one * mask, jnp.float32),
        log_probs=acting,
        sampling_log_probs=sampling,
        reference_log_probs=reference,
        values=jnp.asarray(TORCH["acting_values"]),
        returns=jnp.asarray(TORCH["returns"]),
        is_fresh=jnp.full(ROWS, is_fresh),
    )


def loss_of(objective, given, logits, values=None):
    return objective.loss(Given(logits, values), given, objective.norms(given), None)


CASES = {
    "grpo/grpo-token": PolicyGradient(average="rollouts"),
    "grpo/dapo-token": PolicyGradient(),
    "grpo/dr_grpo-token": PolicyGradient(average="constant", max_units=6),
    "grpo/grpo-sequence": PolicyGradient(ratio="mean", average="rollouts"),
    "grpo/dapo-sequence": PolicyGradient(ratio="mean"),
    "grpo/dr_grpo-sequence": PolicyGradient(ratio="mean", average="constant", max_units=6),
    "grpo/higher": PolicyGradient(clip_high=0.5),
    "grpo/lower": PolicyGradient(average="rollouts", clip_low=0.05),
    "grpo/two-sided": PolicyGradient(average="rollouts", clip_most=1.3),
    "grpo/reference": PolicyGradient(average="rollouts", kl_weight=0.3),
    "grpo/reference-dapo": PolicyGradient(kl_weight=0.3),
    "grpo/cooled": PolicyGradient(distribution=TokenDistribution(temperature=0.6), kl_weight=0.1),
    "grpo/dual": PolicyGradient(clip_most=1.3),
    "grpo/sampled": PolicyGradient(average="rollouts", sampling_clip=1.1, kl_weight=0.3),
    "grpo/sampled-freely": PolicyGradient(sampling_clip=1e9),
    "grpo/cut-grpo": PolicyGradient(average="rollouts"),
    "grpo/cut-dapo": PolicyGradient(),
    "grpo/cut-dr_grpo": PolicyGradient(average="constant", max_units=6),
    "grpo/entropy-grpo": PolicyGradient(average="rollouts", entropy_weight=0.3),
    "grpo/entropy-dapo": PolicyGradient(entropy_weight=0.3),
    "grpo/entropy-dr_grpo": PolicyGradient(average="constant", max_units=6, entropy_weight=0.3),
    "rloo/product": PolicyGradient(ratio="product", average="rollouts"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(case):
    """Sums of a few float32 terms of size 1, by other formulas."""
    objective = CASES[case]
    given = batch(objective.distribution, mask=TORCH["mask_cut"] if "/cut" in case else MASK)
    loss, gradient = jax.value_and_grad(lambda logits: loss_of(objective, given, logits)[0])(TORCH["logits"])
    np.testing.assert_allclose(loss, TORCH[f"{case}/loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, TORCH[f"{case}/gradient/logits"], rtol=1e-4, atol=1e-6)


def test_every_recorded_case_is_compared():
    assert {name.rpartition("/")[0] for name in TORCH if name.endswith("/loss")} == {*CASES, "ppo/critic"}


@pytest.mark.slow
def test_loss_and_gradients_with_a_critic_are_those_of_trl():
    objective = PolicyGradient(value_weight=0.1)
    given = batch(advantages=TORCH["unit_advantages"])
    loss, gradients = jax.value_and_grad(lambda *leaves: loss_of(objective, given, *leaves)[0], (0, 1))(
        TORCH["logits"], TORCH["values"]
    )
    np.testing.assert_allclose(loss, TORCH["ppo/critic/loss"], rtol=1e-5, atol=1e-6)
    for name, gradient in zip(("logits", "values"), gradients, strict=True):
        np.testing.assert_allclose(gradient, TORCH[f"ppo/critic/gradient/{name}"], rtol=1e-4, atol=1e-6)


def test_the_cases_clip_on_both_sides():
    """Or equal losses would say nothing of clipping."""
    _, metrics = loss_of(PolicyGradient(), batch(), TORCH["logits"])
    assert metrics["clip_fraction_low"] > 0 < metrics["clip_fraction_high"]
    assert metrics["clip_fraction"] == metrics["clip_fraction_low"] + metrics["clip_fraction_high"] < 0.9


@pytest.mark.parametrize("settings", [{}, {"average": "rollouts"}, {"average": "constant", "max_units": 6}])
def test_the_loss_is_lower_by_the_weight_times_the_mean_entropy_of_all_units(settings):
    """TRL's bonus, whatever the average; the entropy is torch's, as the metric."""
    given, plain = batch(), PolicyGradient(**settings)
    loss, metrics = loss_of(plain, given, TORCH["logits"])
    with_bonus, _ = loss_of(dataclasses.replace(plain, entropy_weight=0.3), given, TORCH["logits"])
    expected = TORCH["entropy"][MASK].mean()
    np.testing.assert_allclose(metrics["entropy"], expected, rtol=1e-6)
    np.testing.assert_allclose(loss - with_bonus, 0.3 * expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_loss_is_higher_by_the_weight_times_the_divergence(kind):
    """Estimates by hand: with d = log(reference / policy) -d, d^2 / 2 and e^d - d - 1; mean of all units."""
    given = batch()
    loss, _ = loss_of(PolicyGradient(), given, TORCH["logits"])
    higher, metrics = loss_of(PolicyGradient(kl_weight=0.3, kl_kind=kind), given, TORCH["logits"])
    d = np.asarray(scored(TORCH["reference_logits"]) - scored(TORCH["logits"]), np.float64)[MASK]
    expected = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[kind].mean()
    np.testing.assert_allclose(metrics["kl"], expected, rtol=1e-5)
    np.testing.assert_allclose(higher - loss, 0.3 * expected, rtol=1e-4)


def test_ratio_and_distance_from_the_acting_policy_are_the_means_by_hand():
    _, metrics = loss_of(PolicyGradient(), batch(), TORCH["logits"])
    gap = np.asarray(scored(TORCH["logits"]) - scored(TORCH["acting_logits"]), np.float64)[MASK]
    np.testing.assert_allclose(metrics["ratio"], np.exp(gap).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl"], (gap**2).mean() / 2, rtol=1e-5)


def test_a_unit_that_the_dual_clip_stops_is_told_as_clipped():
    for ratio, clipped in ((2.9, 0), (3.1, 1)):
        objective, given = PolicyGradient(distribution=OneUnit(), clip_most=3.0), one_unit(-1.0)
        _, metrics = objective.loss(Line(jnp.log(ratio)), given, objective.norms(given), None)
        assert metrics["clip_fraction"] == clipped


def test_what_the_sampler_says_otherwise_is_told_as_trl_tells_it():
    """Mean absolute difference of log-probabilities, mean ratio, and the share of ratios above 2 or below 1/2."""
    _, metrics = loss_of(PolicyGradient(), batch(), TORCH["logits"])
    for name in ("difference", "ratio", "far"):
        np.testing.assert_allclose(metrics[f"sampling_{name}"], TORCH[f"sampling/{name}"], rtol=1e-5)
    assert 0 < metrics["sampling_far"] < 1
    # Of fresh rollouts the policy that acted is the one that learns.
    _, metrics = loss_of(PolicyGradient(), batch(is_fresh=True), TORCH["acting_logits"])
    np.testing.assert_allclose(metrics["sampling_difference"], TORCH["sampling/difference"], rtol=1e-5)


def test_a_batch_without_any_unit_to_learn_from_has_a_loss_and_a_gradient_of_zero():
    objective = PolicyGradient(average="rollouts", entropy_weight=0.1, kl_weight=0.1, sampling_clip=2.0, clip_most=3.0)
    given = batch(mask=np.zeros_like(MASK))
    loss, gradient = jax.value_and_grad(lambda logits: loss_of(objective, given, logits)[0])(TORCH["logits"])
    assert loss == 0 and not gradient.any()


def test_rows_that_fill_a_batch_do_not_thin_it_out_and_cut_rollouts_do():
    """TRL counts cut ones, and so does verl, by its global batch size."""
    objective, mask = PolicyGradient(average="rollouts"), MASK & (np.arange(ROWS) < 2)[:, None]
    given = batch(mask=mask)
    filled = dataclasses.replace(given, is_rollout=jnp.arange(ROWS) < 2)
    loss, of_two = (float(loss_of(objective, one, TORCH["logits"])[0]) for one in (given, filled))
    assert loss == pytest.approx(of_two / 2, rel=1e-6) and loss != 0


@pytest.mark.parametrize("ratio", ["unit", "mean", "product"])
def test_fresh_rollouts_give_the_plain_policy_gradient(ratio):
    """P1: the value is the mean of -A, the gradient that of -A log p; a zero loss is no mistake."""
    objective, given = PolicyGradient(ratio=ratio, average="rollouts"), batch(is_fresh=True)
    (loss, metrics), gradient = jax.value_and_grad(lambda x: loss_of(objective, given, x), has_aux=True)(
        TORCH["logits"]
    )
    lengths = MASK.sum(axis=1, keepdims=True)
    # All units of a rollout have one ratio: its gradient is that of their mean, or of their sum.
    scale = lengths if ratio == "product" else 1

    def plain(logits):
        return -(jnp.asarray(TORCH["advantages"])[:, None] * MASK / lengths * scale * scored(logits)).sum() / ROWS

    np.testing.assert_allclose(loss, -TORCH["advantages"].mean(), atol=1e-7)
    np.testing.assert_allclose(gradient, jax.grad(plain)(TORCH["logits"]), atol=1e-6)
    assert metrics["ratio"] == 1 and metrics["clip_fraction"] == metrics["approx_kl"] == 0


class Line(nnx.Module):
    """A model whose log-probability is given."""

    def __init__(self, log_prob):
        self.log_prob = log_prob


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneUnit(Distribution):
    """Of a `Line`."""

    needs: ClassVar[frozenset[str]] = frozenset({"line"})

    def scores(self, model, traces):
        return UnitScores(log_prob=jnp.reshape(model.log_prob, (1, 1)), entropy=jnp.zeros((1, 1)))

    def values(self, model, traces):
        raise NotImplementedError


def one_unit(advantage, **fields):
    zeros = jnp.zeros((1, 1))
    parts = {"advantages": zeros + advantage, "mask": jnp.ones((1, 1), bool), "is_fresh": jnp.zeros(1, bool)}
    parts |= dict.fromkeys(("log_probs", "sampling_log_probs", "reference_log_probs", "values", "returns"), zeros)
    parts |= {"traces": None, "is_rollout": jnp.ones(1, bool)}
    return tree_of(RolloutBatch, **(parts | fields))


def gradient_at(ratio, advantage, **settings):
    objective, given = PolicyGradient(distribution=OneUnit(), **settings), one_unit(advantage)

    def loss(log_prob):
        return objective.loss(Line(log_prob), given, objective.norms(given), None)[0]

    return float(jax.grad(loss)(jnp.log(ratio)))


@pytest.mark.slow
def test_clipping_stops_only_what_would_go_further():
    """P2."""
    assert gradient_at(1.3, 1.0) == 0 and gradient_at(1.3, -1.0) == pytest.approx(1.3)
    assert gradient_at(0.7, -1.0) == 0 and gradient_at(0.7, 1.0) == pytest.approx(-0.7)
    assert gradient_at(1.3, 1.0, clip_high=0.4) == pytest.approx(-1.3)
    assert gradient_at(0.7, -1.0, clip_low=0.4) == pytest.approx(0.7)
    assert gradient_at(3.0, -1.0, clip_most=2.0) == 0 and gradient_at(1.5, -1.0, clip_most=2.0) == pytest.approx(1.5)


@pytest.mark.parametrize("logarithm", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_an_extreme_ratio_has_a_finite_loss_and_gradient(logarithm, advantage):
    objective = PolicyGradient(distribution=OneUnit(), kl_weight=0.1)
    given = one_unit(advantage)

    def loss(log_prob):
        return objective.loss(Line(log_prob), given, objective.norms(given), None)[0]

    assert np.isfinite(jax.value_and_grad(loss)(jnp.float32(logarithm))).all()


def test_averages_have_the_published_numbers():
    """P3: losses [1, 1] and six times 0, of at most 8 units."""
    mask = jnp.asarray(np.arange(8) < np.array([[2], [6]]))
    unknown = {field.name: None for field in dataclasses.fields(RolloutBatch)}
    given = tree_of(RolloutBatch, **unknown | {"mask": mask, "is_rollout": jnp.ones(2, bool)})
    losses = jnp.asarray([[1.0], [0.0]]) * mask
    for average, expected in (("rollouts", 0.5), ("units", 0.25), ("constant", 0.125)):
        objective = PolicyGradient(average=average, max_units=8 if average == "constant" else None)
        weights = objective._weights(mask.astype(jnp.float32), mask.sum(axis=1, keepdims=True), objective.norms(given))
        assert float((weights * losses).sum()) == pytest.approx(expected)


@pytest.mark.slow
def test_divergences_have_the_published_numbers():
    """P4."""
    k3 = PolicyGradient(kl_kind="k3").divergence
    at = jnp.full((1, 1), 0.0)
    assert float(k3(at + 0.5, at)[0, 0]) == pytest.approx(0.1065307, abs=1e-7)
    assert float(PolicyGradient(kl_kind="k2").divergence(at + 0.5, at)[0, 0]) == pytest.approx(0.125)
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = (policy * np.log(policy / reference)).sum()
    for kind in ("k1", "k3"):
        estimates = PolicyGradient(kl_kind=kind).divergence(
            jnp.log(jnp.asarray([policy])), jnp.log(jnp.asarray([reference]))
        )
        assert float((policy * estimates).sum()) == pytest.approx(exact, rel=1e-5)
        assert kind == "k1" or (np.asarray(estimates) >= 0).all()
    assert float(jax.grad(lambda x: k3(x, at).sum())(at)[0, 0]) == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arms(Distribution):
    """Which of two arms was taken; the model has their logits, and a value."""

    needs: ClassVar[frozenset[str]] = frozenset({"arms"})

    def scores(self, model, traces):
        said = jax.nn.log_softmax(model.arms[...])
        return UnitScores(log_prob=said[traces][:, None], entropy=jnp.zeros((len(traces), 1)))

    def values(self, model, traces):
        return jnp.broadcast_to(model.value[...], (len(traces), 1))


class Bandit(nnx.Module):
    def __init__(self):
        self.arms, self.value = nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_bandits_better_arm_is_learnt(kind):
    """P5: 200 updates on the outcomes of 16 pulls each, of which the better arm wins 80 % and the other 20 %."""
    objective = PolicyGradient(distribution=Arms(), value_weight=0.5 if kind == "ppo" else 0.0, value_clip=None)
    graphdef, params = nnx.split(Bandit())
    random, groups = np.random.default_rng(0), np.zeros(16, int)

    @jax.jit
    def update(params, given):
        def loss(params):
            return objective.loss(nnx.merge(graphdef, params), given, objective.norms(given), None)[0]

        return jax.tree.map(lambda x, g: x - 0.2 * g, params, jax.grad(loss)(params))

    for _ in range(200):
        probs = np.asarray(jax.nn.softmax(params["arms"][...]), np.float64)
        arms = random.choice(2, 16, p=probs / probs.sum())
        rewards = (random.random(16) < np.where(arms == 1, 0.8, 0.2)).astype(float)
        value = float(params["value"][...])
        if kind == "ppo":
            advantages = rewards - value
        else:
            advantages = (group_relative if kind == "grpo" else leave_one_out)(rewards, groups)
        column = np.zeros((16, 1), np.float32)
        given = one_unit(
            jnp.asarray(advantages[:, None], jnp.float32),
            traces=jnp.asarray(arms),
            mask=jnp.ones((16, 1), bool),
            log_probs=jnp.asarray(np.log(probs)[arms][:, None], jnp.float32),
            returns=jnp.asarray(rewards[:, None], jnp.float32),
            values=jnp.asarray(column + value),
            is_fresh=jnp.zeros(16, bool),
        )
        params = update(params, given)
    assert float(jax.nn.softmax(params["arms"][...])[1]) > 0.95


def test_settings_without_meaning_are_refused():
    assert "--objective.max-units None" in PolicyGradient(average="constant").check()[0]
    assert "must be above 1 + clip_high" in PolicyGradient(clip_most=1.1).check()[0]
    assert "--objective.sampling-clip 0 must be above 0" in PolicyGradient(sampling_clip=0).check()[0]
    assert "temperature 0.0" in PolicyGradient(distribution=TokenDistribution(temperature=0.0)).check()[0]
    assert not PolicyGradient().check()


def test_what_a_setting_needs_of_the_model():
    assert PolicyGradient().needed == {"token_scores"}
    assert PolicyGradient(kl_weight=0.1, value_weight=0.1).needed == {"token_scores", "reference", "value"}


def test_many_clipped_units_are_warned_of():
    objective = PolicyGradient()
    assert not objective.warnings({"clip_fraction": 0.2}) and not objective.warnings({})
    assert "Lower --lr-schedule.peak-lr" in objective.warnings({"clip_fraction": 0.3})[0]


def test_a_policy_that_goes_far_is_warned_of_though_few_of_its_units_are_clipped():
    """What a diffusion policy showed whose first step of Adam had the full learning rate."""
    said = PolicyGradient().warnings({"clip_fraction": 0.09, "approx_kl": 2.1})
    assert len(said) == 1 and "approx_kl" in said[0] and "--lr-schedule.warmup-steps" in said[0]
    assert not PolicyGradient().warnings({"clip_fraction": 0.09, "approx_kl": 1.0})
    assert len(PolicyGradient().warnings({"clip_fraction": 0.3, "approx_kl": 2.1})) == 2
