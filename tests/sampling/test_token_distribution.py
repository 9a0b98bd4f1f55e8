"""The distribution of tokens: what is drawn has the probability that it is scored with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sorted_limits import sorted_limits

from openpi_train.generation.token_choice import choose_tokens
from openpi_train.nn.token_limits import RowSettings
from openpi_train.nn.vocabulary import CHUNK_TOKENS
from openpi_train.sampling.token_distribution import TokenDistribution
from openpi_train.types import TextBatch, TokenTraces

LAWS = {
    "plain": TokenDistribution(),
    "cooled": TokenDistribution(temperature=0.5),
    "top-k": TokenDistribution(temperature=1.7, top_k=3),
    "top-p": TokenDistribution(top_p=0.7),
    "min-p": TokenDistribution(temperature=2.0, min_p=0.3),
    "all": TokenDistribution(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
}
# 99.9th percentiles of the chi-square distribution by degrees of freedom (scipy.stats.chi2.ppf).
MOST = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}


class Given(nnx.Module):
    """A model whose logits after each token are given."""

    def __init__(self, logits):
        self.given = nnx.Param(jnp.asarray(logits, jnp.float32))

    def __call__(self, tokens, positions, segments):
        return self.given[...]

    def logits(self, x):
        return x


def traces(tokens, num_tokens):
    tokens = jnp.asarray(tokens)
    ones = jnp.ones(tokens.shape, jnp.int32)
    texts = TextBatch(
        tokens=tokens, segments=ones, positions=ones, weights=ones.astype(jnp.float32), row=jnp.arange(len(tokens))
    )
    return TokenTraces(texts=texts, num_tokens=jnp.full(len(tokens), num_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_what_is_drawn_has_the_probability_that_it_is_scored_with(name):
    """P6: chi-square over 40,000 draws; with these seeds below the 99.9th percentile.

    The last two tokens are the most probable, and the tokenizer does not have them.
    """
    distribution, draws, known = LAWS[name], 40_000, 7
    logits = np.random.default_rng(1).normal(0, 1.5, known + 2)
    logits[known:] = 6.0
    settings = RowSettings(
        temperature=jnp.full(draws, distribution.temperature),
        top_k=jnp.full(draws, distribution.top_k),
        top_p=jnp.full(draws, distribution.top_p),
        min_p=jnp.full(draws, distribution.min_p),
    )
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(0), row))(jnp.arange(draws))
    given = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, known + 2))
    drawn, _ = jax.jit(choose_tokens)(given[:, :known], settings, keys)
    kinds = np.unique(drawn)
    rows = np.stack([np.zeros(len(kinds), int), kinds], axis=1)
    model = Given(np.broadcast_to(logits, (len(kinds), 2, known + 2)))
    log_probs = np.asarray(distribution.scores(model, traces(rows, known)).log_prob)[:, 0]
    expected = np.exp(log_probs) * draws
    # All that is drawn together has all the probability: what the limits exclude is never drawn.
    assert expected.sum() == pytest.approx(draws, rel=1e-5)
    counts = np.bincount(drawn, minlength=known)[kinds]
    assert ((counts - expected) ** 2 / expected).sum() < MOST[len(kinds) - 1]


@pytest.mark.parametrize("name", LAWS)
def test_entropy_is_that_of_what_may_be_drawn(name):
    distribution, length, known = LAWS[name], CHUNK_TOKENS + 9, 11
    random = np.random.default_rng(2)
    logits = random.normal(0, 1.5, (2, length, known + 1))
    tokens = np.argmax(logits[:, :, :known], axis=2)  # which the limits leave
    tokens = np.concatenate([np.zeros((2, 1), int), tokens[:, :-1]], axis=1)
    found = jax.jit(lambda model, given: distribution.scores(model, given))(Given(logits), traces(tokens, known))
    scaled = logits[:, :-1, :known] / distribution.temperature
    probs = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    probs = np.asarray(probs / probs.sum(axis=-1, keepdims=True), np.float32)
    kept = np.stack(
        [
            sorted_limits(row, distribution.top_k, distribution.top_p, distribution.min_p)
            for row in probs.reshape(-1, known)
        ]
    )
    kept = kept.reshape(probs.shape).astype(np.float64)
    kept /= kept.sum(axis=-1, keepdims=True)
    own = np.take_along_axis(kept, tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.log_prob, np.log(own), rtol=1e-4, atol=1e-5)
    said = np.log(np.where(kept > 0, kept, 1.0))
    np.testing.assert_allclose(found.entropy, -(kept * said).sum(axis=-1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_recorded_token_that_a_limit_now_excludes_keeps_a_probability_and_a_gradient():
    distribution, given = TokenDistribution(top_k=1), traces([[0, 2]], 3)

    def log_prob(logits):
        return distribution.scores(Given(logits), given).log_prob[0, 0]

    logits = jnp.asarray([[[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]]])
    value, gradient = jax.value_and_grad(log_prob)(logits)
    p = np.exp(0.5) / (np.exp(0.5) + np.exp(1.0))
    np.testing.assert_allclose(value, np.log(p), rtol=1e-6)
    np.testing.assert_allclose(gradient[0, 0], [p - 1, 0, 1 - p], atol=1e-6)
    assert np.isfinite(gradient).all()


def test_settings_without_chance_or_meaning_are_refused():
    problems = TokenDistribution(temperature=0.0, top_p=0.0, min_p=2.0).check()
    assert [problem.split()[0] for problem in problems] == ["temperature", "top_p", "min_p"]
    assert not TokenDistribution().check()
