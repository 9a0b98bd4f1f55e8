"""The distribution of action tokens: what is drawn has the probability that it is scored with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pi0_case import built
from scipy.stats import chisquare, entropy
from test_pi0_fast import FAST, seen_by

from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.action_sampler import OwnSampler
from openpi_train.sampling.action_token_distribution import ActionTokenDistribution
from openpi_train.types import TokenChunkTraces, tree_of

TOKENS = jnp.array([[7, 3, 1], [12, 12, 30]])


def asked(config):
    """The prompts of `seen_by`, of 3 and 5 tokens, without what is said."""
    seen = seen_by(config)
    place, none = jnp.arange(8)[None], jnp.zeros((2, 8), bool)
    mask = place < jnp.array([[3], [5]])
    return dataclasses.replace(seen, prompt_mask=mask, token_ar_mask=none, token_loss_mask=none)


def said(config):
    """The same with `TOKENS` behind them, as in training."""
    seen = seen_by(config)
    tokens = np.array(seen.prompt_tokens)
    tokens[0, 3:6], tokens[1, 5:8] = TOKENS
    return dataclasses.replace(seen, prompt_tokens=jnp.asarray(tokens))


@pytest.fixture(scope="module")
def model():
    return merge_module(*built(FAST))


@pytest.mark.slow
def test_tokens_have_the_log_probabilities_of_training_rows(model):
    expected, _ = model.token_log_probs(said(FAST))
    found = model.chunk_scores(asked(FAST), TOKENS, 1.0)
    np.testing.assert_allclose(found.log_prob, [expected[0, 2:5], expected[1, 4:7]], rtol=1e-5, atol=1e-6)
    logits = model.logits(said(FAST))[0, 2:5] / 0.7
    cooled = model.chunk_scores(asked(FAST), TOKENS, 0.7)
    np.testing.assert_allclose(
        cooled.log_prob[0], jax.nn.log_softmax(logits)[jnp.arange(3), TOKENS[0]], rtol=1e-5, atol=1e-6
    )
    probs = np.asarray(jax.nn.softmax(logits), np.float64)
    np.testing.assert_allclose(cooled.entropy[0], entropy(probs, axis=1), rtol=1e-5)


@pytest.mark.slow
def test_queries_of_an_rollout_are_scored_one_by_one(model):
    distribution = ActionTokenDistribution(temperature=0.7, max_tokens=3)
    observation = jax.tree.map(lambda leaf: leaf[None], asked(FAST))
    traces = tree_of(TokenChunkTraces, observation=observation, tokens=TOKENS[None], row=jnp.arange(1))
    expected = model.chunk_scores(asked(FAST), TOKENS, 0.7)
    found = distribution.scores(model, traces)
    np.testing.assert_allclose(found.log_prob[0], expected.log_prob.ravel(), rtol=1e-6)
    np.testing.assert_allclose(found.entropy[0], expected.entropy.ravel(), rtol=1e-6)


@pytest.mark.slow
def test_what_is_drawn_has_the_probability_that_it_is_scored_with(model):
    """The second token after a first one, at a temperature; and every chunk ends with its end token or the limit."""
    count, distribution = 4000, ActionTokenDistribution(temperature=0.5, max_tokens=2)
    observation = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], (count, *leaf.shape[1:])), asked(FAST))
    keys = jax.random.split(jax.random.key(0), count)
    model.read_actions = lambda tokens: jnp.zeros((len(tokens), 4, 5))
    kept = jax.device_get(distribution.drawn(model, observation, keys, (4, 5))[1])
    tokens, lengths = np.asarray(kept["tokens"]), distribution.lengths(kept)
    np.testing.assert_array_equal(lengths, np.where(tokens[:, 0] == 1, 1, 2))
    # The sampler says with which probability it drew each token.
    said, few = distribution.sampling_log_probs(kept, None), jax.tree.map(lambda leaf: leaf[:40], observation)
    scored = model.chunk_scores(few, jnp.asarray(tokens[:40]), 0.5).log_prob
    drawn = np.arange(2) < lengths[:40, None]
    np.testing.assert_allclose(said[:40][drawn], np.asarray(scored)[drawn], rtol=1e-4, atol=1e-5)
    one = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], (40, *leaf.shape[1:])), asked(FAST))
    first = np.bincount(tokens[:, 0]).argmax()
    pairs = jnp.stack([jnp.full(40, first), jnp.arange(40)], axis=1)
    second = np.exp(np.asarray(model.chunk_scores(one, pairs, 0.5).log_prob[:, 1], np.float64))
    starts = jnp.stack([jnp.arange(40), jnp.zeros(40, int)], axis=1)
    start = np.exp(np.asarray(model.chunk_scores(one, starts, 0.5).log_prob[:, 0], np.float64))
    for probs, drawn in ((start, tokens[:, 0]), (second, tokens[tokens[:, 0] == first, 1])):
        seen = np.bincount(drawn, minlength=40)
        assert chisquare(seen, probs / probs.sum() * seen.sum()).pvalue > 1e-3


def test_what_cannot_be_scored_is_refused():
    assert "temperature 0.0 must be above 0" in ActionTokenDistribution(temperature=0.0).check()[0]
    assert ActionTokenDistribution().action_sampler == OwnSampler()
    other = merge_module(*built(dataclasses.replace(FAST, decoding="as_openpi")))
    with pytest.raises(UsageError, match="give as_trained"):
        other.chunk_scores(asked(FAST), TOKENS, 1.0)
