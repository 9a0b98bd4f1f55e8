"""Choice of tokens: limits beside sorting in numpy, draws beside their probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sorted_limits import sorted_limits

from openpi_train.generation.token_choice import choose_tokens
from openpi_train.nn.token_limits import RowSettings, limited

ROWS, VOCABULARY = 12, 37


def settings_of(rows=ROWS, **given):
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    dtypes = {"top_k": jnp.int32}
    return RowSettings(
        **{
            name: jnp.broadcast_to(jnp.asarray(value, dtypes.get(name, jnp.float32)), rows)
            for name, value in values.items()
        }
    )


@pytest.mark.parametrize("top_k", [0, 1, 5, 36, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_limits_are_those_of_sorting(top_k, top_p, min_p):
    random = np.random.default_rng(top_k)
    probs = np.asarray(jax.nn.softmax(random.normal(0, 2, (ROWS, VOCABULARY)).astype(np.float32)))
    found = np.asarray(limited(jnp.asarray(probs), settings_of(top_k=top_k, top_p=top_p, min_p=min_p)))
    expected = np.stack([sorted_limits(row.astype(np.float64), top_k, top_p, min_p) for row in probs])
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_array_equal(found[found > 0], probs[found > 0])


def test_every_row_has_its_own_limits():
    probs = jnp.broadcast_to(jnp.asarray([0.4, 0.3, 0.2, 0.1]), (4, 4))
    found = limited(probs, settings_of(4, top_k=[0, 2, 0, 0], top_p=[1, 1, 0.65, 1], min_p=[0, 0, 0, 0.6]))
    np.testing.assert_array_equal(np.asarray(found) > 0, [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])


def test_a_tiny_top_p_keeps_the_most_probable_token():
    probs = jnp.broadcast_to(jnp.asarray([0.2, 0.5, 0.3]), (3, 3))
    found = limited(probs, settings_of(3, top_p=np.asarray([1e-20, 1e-40, 0.0], np.float32)))  # 1e-46 is 0 in float32
    np.testing.assert_array_equal(np.asarray(found) > 0, [[0, 1, 0]] * 3)


def test_equally_probable_tokens_are_kept_together():
    found = limited(jnp.full((1, 8), 0.125), settings_of(1, top_k=3, top_p=0.5))
    np.testing.assert_array_equal(found, np.full((1, 8), 0.125))


@pytest.mark.parametrize(
    "limits", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"temperature": 2.0, "top_k": 4}]
)
def test_draws_have_their_probabilities(limits):
    """Chi-square over 40,000 draws, against float64: with these seeds, below the 99.9th percentile."""
    draws, logits = 40_000, np.random.default_rng(1).normal(0, 1.5, 8)
    settings = settings_of(draws, **limits)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(0), row))(jnp.arange(draws))
    tokens, log_probs = jax.jit(choose_tokens)(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, 8)), settings, keys
    )
    exact = np.exp(logits / limits.get("temperature", 1.0))
    exact /= exact.sum()
    np.testing.assert_allclose(log_probs[0], np.log(exact), rtol=1e-5)
    expected = sorted_limits(exact, limits.get("top_k", 0), limits.get("top_p", 1.0), limits.get("min_p", 0.0))
    expected = expected / expected.sum() * draws
    counts = np.bincount(tokens, minlength=8)
    assert (counts[expected == 0] == 0).all()
    some = expected > 0
    chi_square = ((counts - expected)[some] ** 2 / expected[some]).sum()
    # 99.9th percentiles of the chi-square distribution by degrees of freedom (scipy.stats.chi2.ppf).
    most = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}[int(some.sum()) - 1]
    assert chi_square < most, (chi_square, counts, expected)


@pytest.mark.slow
def test_temperature_zero_takes_the_most_probable_beside_rows_that_draw():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, VOCABULARY)), jnp.float32)
    keys = jax.vmap(jax.random.key)(jnp.arange(ROWS))
    temperature = jnp.where(jnp.arange(ROWS) % 2 == 0, 0.0, 50.0)
    tokens, log_probs = choose_tokens(logits, settings_of(temperature=temperature), keys)
    best = np.argmax(logits, axis=1)
    np.testing.assert_array_equal(tokens[::2], best[::2])
    assert (np.asarray(tokens[1::2]) != best[1::2]).any()
    np.testing.assert_allclose(log_probs[::2], jax.nn.log_softmax(logits)[::2], rtol=1e-6)
    alone, _ = choose_tokens(logits, settings_of(temperature=0.0), keys)
    np.testing.assert_array_equal(alone, best)


def test_a_token_without_mass_is_never_drawn_and_a_sure_one_always():
    logits = jnp.full((1000, 5), -jnp.inf).at[:, 3].set(0.0)
    keys = jax.vmap(jax.random.key)(jnp.arange(1000))
    tokens, _ = choose_tokens(logits, settings_of(1000), keys)
    assert (np.asarray(tokens) == 3).all()
