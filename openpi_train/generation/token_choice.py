"""The choice of the next token of every row, each with its own temperature, limits and random key.

Read next: `token_rows.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from openpi_train.nn.token_limits import RowSettings, limited


@jax.named_scope("choose_token")
def choose_tokens(
    logits: Float[Array, "b v"],
    settings: RowSettings,
    keys: Key[Array, " b"],
    places: Int[Array, " b"] | None = None,
    *,
    after_limits: bool = False,
) -> tuple[Int[Array, " b"], Float[Array, "b v"]]:
    """A token for every row, and the log-probabilities of all tokens at its temperature.

    They are those before the limits, or with `after_limits` those with which the token is drawn. A temperature of 0
    takes the most probable token, and its log-probabilities are those at temperature 1.

    Args: `places` are folded into the keys, if given. Without random choices no key is computed.
    """
    is_greedy = settings.temperature == 0
    log_probs = jax.nn.log_softmax(logits / jnp.where(is_greedy, 1.0, settings.temperature)[:, None])
    likeliest = jnp.argmax(logits, axis=-1)

    def draw() -> Array:
        masses = limited(jnp.exp(log_probs), settings)
        # By the inverse of the distribution function: one random number per row. A token without mass is never taken,
        # because the sum does not rise there.
        sums = jnp.cumsum(masses, axis=-1)
        own = keys if places is None else jax.vmap(jax.random.fold_in)(keys, places)
        at = jax.vmap(lambda key: jax.random.uniform(key, ()))(own) * sums[:, -1]
        found = (sums <= at[:, None]).sum(axis=-1)
        return jnp.where(is_greedy | (found == masses.shape[1]), likeliest, found)

    token = jax.lax.cond(is_greedy.all(), lambda: likeliest, draw)
    if after_limits:
        is_left = limited(jnp.exp(log_probs), settings) > 0
        log_probs = jax.nn.log_softmax(jnp.where(is_left, log_probs, -jnp.inf))
    return token.astype(jnp.int32), log_probs
