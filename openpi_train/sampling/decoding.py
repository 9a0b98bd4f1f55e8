"""Autoregressive decoding of a language model with a KV cache, in one compiled loop.

Read next: `models/pi0_fast/pi0_fast_network.py`, which makes the prompt.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.keys import for_purpose
from openpi_train.nn.gemma import Gemma
from openpi_train.parallel.shard import as_varied, on_all_devices
from openpi_train.types import pytree

# (scores of the next token, its index) -> the token, and the logarithm of the probability with which it was chosen.
Choose = Callable[[Float[Array, "b v"], Int[Array, ""]], tuple[Int[Array, " b"], Float[Array, " b"]]]
# The token after the last one of a row.
PADDING = 0


@pytree
class Prompt:
    """Embedded tokens of a prompt.

    `mask` is the attention mask between its tokens, `seen` marks those that decoded tokens attend to, `next_position`
    is the position of the first decoded token, and `last` the index of the prompt's last token.
    """

    tokens: Float[Array, "b p d"]
    positions: Int[Array, "b p"]
    mask: Bool[Array, "b p p"]
    seen: Bool[Array, "b p"]
    last: Int[Array, " b"]
    next_position: Int[Array, " b"]


def choose_likeliest(scores: Float[Array, "b v"], index: Int[Array, ""]) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """The token with the highest score, which is certain."""
    del index
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), jnp.zeros(len(scores))


def choose_at(temperature: float, keys: Key[Array, " b"]) -> Choose:
    """Draw from the softmax of scores / `temperature`, each row with its own key; 0 takes the likeliest.

    Raises ValueError if the temperature is below 0.
    """
    if temperature < 0:
        raise ValueError(f"temperature {temperature} must be at least 0; 0 takes the likeliest token")
    if temperature == 0:
        return choose_likeliest

    def choose(scores: Array, index: Array) -> tuple[Array, Array]:
        drawn = jax.vmap(jax.random.fold_in, (0, None))(for_purpose(keys, "token"), index)
        cooled = scores / temperature
        token = jax.vmap(jax.random.categorical)(drawn, cooled).astype(jnp.int32)
        log_probs = jax.nn.log_softmax(cooled.astype(jnp.float32))
        return token, jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]

    return choose


@jax.named_scope("decode")
def decode(
    transformer: Gemma, prompt: Prompt, *, max_tokens: int, end: int, choose: Choose
) -> tuple[Int[Array, "b n"], Float[Array, "b n"]]:
    """Decode `max_tokens` tokens after each prompt, with padding after the token `end`; with their log-probabilities.

    Stops as soon as all rows of all devices have ended. The transformer has one expert. Keys and values of the prompt
    are computed once, and those of each token when it is decoded.
    """
    (name,) = transformer.names
    outputs, known = transformer.with_keys_and_values({name: prompt.tokens}, prompt.positions, prompt.mask)
    b, p, _ = prompt.tokens.shape
    x = jnp.take_along_axis(outputs[name], prompt.last[:, None, None], axis=1)  # b 1 d
    cache = jax.tree.map(lambda kept: jnp.pad(kept, ((0, 0), (0, 0), (0, max_tokens), (0, 0), (0, 0))), known)
    chosen = as_varied(jnp.full((b, max_tokens), PADDING, jnp.int32), x)
    log_probs = as_varied(jnp.zeros((b, max_tokens)), x)
    ended = as_varied(jnp.zeros(b, bool), x)

    def goes_on(carry):
        index, *_, all_ended = carry
        return (index < max_tokens) & ~all_ended

    def step(carry):
        index, x, cache, chosen, log_probs, ended, _ = carry
        token, log_prob = choose(transformer.logits(x)[:, 0], index)
        token, log_prob = jnp.where(ended, PADDING, token), jnp.where(ended, 0.0, log_prob)
        chosen = jax.lax.dynamic_update_slice_in_dim(chosen, token[:, None], index, axis=1)
        log_probs = jax.lax.dynamic_update_slice_in_dim(log_probs, log_prob[:, None], index, axis=1)
        ended |= token == end
        # The prompt, the tokens so far, and itself.
        follows = jnp.broadcast_to(jnp.arange(max_tokens + 1) < index, (b, max_tokens + 1)).at[:, -1].set(True)
        seen = jnp.concatenate([prompt.seen, follows], axis=1)[:, None]  # b 1 p+n+1
        embedded = {name: transformer.embed(token[:, None])}
        positions = (prompt.next_position + index)[:, None]
        outputs, own = transformer.with_keys_and_values(embedded, positions, seen, cache)

        def put(kept, new):
            return jax.lax.dynamic_update_slice_in_dim(kept, new, p + index, axis=2)

        cache = jax.tree.map(put, cache, own)
        return index + 1, outputs[name], cache, chosen, log_probs, ended, on_all_devices(ended.all())

    carry = (jnp.int32(0), x, cache, chosen, log_probs, ended, jnp.array(False))
    *_, chosen, log_probs, _, _ = jax.lax.while_loop(goes_on, step, carry)
    return chosen, log_probs
