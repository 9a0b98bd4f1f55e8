"""Which token is taken: the likeliest, or one drawn from the softmax of scores / temperature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.sampling.decoding import choose_at

SCORES = np.array([1.0, 0.0, -1.0, 2.0])
ROWS = 20_000


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_from_the_softmax_and_every_place_draws_anew(temperature):
    keys = jax.random.split(jax.random.key(0), ROWS)
    choose = jax.jit(choose_at(temperature, keys))
    scores = jnp.broadcast_to(jnp.asarray(SCORES, jnp.float32), (ROWS, 4))
    (first, log_probs), (second, _) = (jax.device_get(choose(scores, jnp.int32(index))) for index in (0, 1))
    share = np.exp(SCORES / temperature) / np.exp(SCORES / temperature).sum()
    np.testing.assert_allclose(log_probs, np.log(share)[first], rtol=1e-5)
    found = np.zeros((4, 4))
    np.add.at(found, (first, second), 1 / ROWS)
    expected = np.outer(share, share)  # independent of each other
    # Five standard errors of a share.
    assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / ROWS)).all()


def test_at_temperature_0_the_likeliest_is_taken_and_below_it_nothing():
    keys = jax.random.split(jax.random.key(0), 2)
    tokens, log_probs = choose_at(0.0, keys)(jnp.asarray([SCORES, -SCORES]), jnp.int32(0))
    assert tokens.tolist() == [3, 2] and log_probs.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"temperature -1.0 must be at least 0; 0 takes the likeliest token"):
        choose_at(-1.0, keys)
