"""pi0-FAST: a vision-language model that predicts action chunks as tokens (Pertsch et al. 2025).

Follows openpi's `models/pi0_fast.py` at 15a9616. Where we differ: an absent camera has no tokens (and keeps its
positions, over which training counts), and decoding by default continues at the positions of training.

Read next: `pi0_fast.py`, which configures and builds this, `sampling/decoding.py`, `objectives/next_token.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.models.prompted import causal_tokens, embed_prefix
from openpi_train.nn.attention import Attention, order_mask
from openpi_train.nn.gemma import Gemma
from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.nn.siglip import Siglip, SiglipConfig
from openpi_train.nn.vocabulary import Head, TokenScores, remat_of, token_scores
from openpi_train.parallel.remat import Remat
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.action_token_distribution import with_chunk
from openpi_train.sampling.decoding import Prompt, choose_at, choose_likeliest, decode
from openpi_train.types import Observation

# The token that ends a chunk: PaliGemma's end of text.
END = 1

Decoding = Literal["as_trained", "as_openpi"]
# Maps decoded tokens, padded, to normalised actions.
ReadActions = Callable[[Int[Array, "b n"]], Float[Array, "b h a"]]


class Pi0Fast(nnx.Module):
    """The network. Images and the first part of the prompt attend to each other; the rest is causal.

    Args:
        language: sizes of the language model.
        slots: every camera slot of the model; positions are counted as if all were there.
        black_slots: those that are black pictures where an observation lacks them.
        dtype: type of the activations.
        decoding: positions and attention of decoded tokens, see `Pi0FastConfig.decoding`.
        max_decoded_tokens: maximum number of tokens of an action chunk.
        read_actions: converts decoded tokens to actions.
        remat, attention: how the backward pass and attention are computed; no result depends on it.
    """

    def __init__(
        self,
        *,
        language: GemmaConfig,
        siglip: SiglipConfig,
        image_size: int,
        vocab_size: int,
        slots: Sequence[str],
        black_slots: Sequence[str] = (),
        dtype: DTypeLike,
        decoding: Decoding,
        max_decoded_tokens: int,
        read_actions: ReadActions,
        remat: Remat,
        attention: Attention = "auto",
        rngs: nnx.Rngs,
    ):
        self.slots, self.black_slots = tuple(sorted(slots)), tuple(black_slots)
        self.image_size = image_size
        self.tokens_per_image = siglip.num_tokens(image_size)
        self.decoding: Decoding = decoding
        self.max_decoded_tokens = max_decoded_tokens
        self.read_actions = read_actions
        compute: Any = {"dtype": dtype, "remat": remat, "attention": attention}
        self.image_encoder = Siglip(siglip, image_size, language.width, **compute, rngs=rngs)
        self.transformer = Gemma({"language": language}, vocab_size, {}, **compute, rngs=rngs)

    def token_log_probs(self, observation: Observation) -> tuple[Float[Array, "b n"], Bool[Array, "b n"]]:
        """For every prompt token but the first: its log-probability given those before it, and whether it is the most
        likely.

        float32; n is one less than the prompt's tokens.
        """
        return self.transformer.log_probs(self.activations(observation), observation.prompt_tokens[:, 1:])

    def logits(self, observation: Observation) -> Float[Array, "b n v"]:
        """Logits for every prompt token but the first, given those before it, float32; large: for tests and few
        rows."""
        return self.transformer.logits(self.activations(observation))

    def activations(self, observation: Observation) -> Float[Array, "b n d"]:
        """The last activations at every prompt token but the last, each of which predicts the next."""
        observation = self.filled(observation)
        tokens, valid = embed_prefix(self.image_encoder, self.transformer.embed, observation)
        causal = causal_tokens(observation, valid.shape[1])
        positions = jnp.broadcast_to(self.positions(observation), valid.shape)
        mask = order_mask(valid, jnp.zeros_like(valid) if causal is None else causal)
        outputs = self.transformer({"language": tokens[:, :-1]}, positions[:, :-1], mask[:, :-1, :-1])["language"]
        return outputs[:, 1 - observation.prompt_tokens.shape[1] :]

    def sample_tokens(
        self,
        observation: Observation,
        keys: Key[Array, " b"] | None = None,
        temperature: float = 0.0,
        max_tokens: int | None = None,
    ) -> Int[Array, "b n"]:
        """Decode the tokens that follow the first part of each prompt, up to the end of the chunk, then padding.

        Arguments are those of `sample_scored_tokens`.
        """
        return self.sample_scored_tokens(observation, keys, temperature, max_tokens)[0]

    def sample_scored_tokens(
        self,
        observation: Observation,
        keys: Key[Array, " b"] | None = None,
        temperature: float = 0.0,
        max_tokens: int | None = None,
    ) -> tuple[Int[Array, "b n"], Float[Array, "b n"]]:
        """As `sample_tokens`, with the logarithm of the probability with which each was chosen.

        The causal part of `observation` is ignored. `keys`, one per row, are for temperatures above 0. `max_tokens` is
        the model's own by default.
        """
        choose = choose_likeliest if keys is None else choose_at(temperature, keys)
        if keys is None and temperature:
            raise ValueError(f"temperature {temperature} draws tokens: give one key per row, or temperature 0")
        limit = self.max_decoded_tokens if max_tokens is None else max_tokens
        return decode(self.transformer, self.prompt(observation), max_tokens=limit, end=END, choose=choose)

    def sample_chunk(
        self, observation: Observation, keys: Key[Array, " b"], temperature: float, max_tokens: int
    ) -> tuple[Int[Array, "b n"], Float[Array, "b n"], Int[Array, " b"], Float[Array, "b h a"]]:
        """Tokens after each prompt, their log-probabilities at the temperature, how many of them were drawn, and the
        normalised chunk that they say.
        """
        tokens, log_probs = self.sample_scored_tokens(observation, keys, temperature, max_tokens)
        before_end = jnp.cumprod(tokens != END, axis=1).sum(axis=1, dtype=jnp.int32)
        return tokens, log_probs, jnp.minimum(before_end + 1, max_tokens), self.read_actions(tokens)

    def chunk_scores(self, observation: Observation, tokens: Int[Array, "b n"], temperature: float) -> TokenScores:
        """The scores of these tokens after each prompt, with their entropy, in one pass.

        Raises UsageError if the model decodes at other positions than those of training.
        """
        if self.decoding != "as_trained":
            raise UsageError(
                f"--model.decoding {self.decoding}: chunks are decoded at other positions than they are scored at; "
                "give as_trained"
            )
        seen, first = with_chunk(observation, tokens)
        before = (first - 1)[:, None] + jnp.arange(tokens.shape[1])
        x = jnp.take_along_axis(self.activations(seen), before[..., None], axis=1)
        table, head = self.transformer.token_embedding, Head(temperature=temperature)
        remat = remat_of(table, self.transformer.remat)
        return token_scores(x, table.get_value(), tokens, head, remat=remat, with_entropy=True)

    def sample_actions(
        self, observation: Observation, noise: Float[Array, "b h a"], num_steps: int = 10
    ) -> Float[Array, "b h a"]:
        """Decode an action chunk greedily. Noise and steps are for flow models and ignored here."""
        del noise, num_steps
        return self.read_actions(self.sample_tokens(observation))

    def prompt(self, observation: Observation) -> Prompt:
        """The part of the observation that decoding starts from."""
        observation = self.filled(observation)
        tokens, valid = embed_prefix(self.image_encoder, self.transformer.embed, observation)
        causal = causal_tokens(observation, valid.shape[1])
        valid = valid if causal is None else valid & ~causal
        last = jnp.max(jnp.where(valid, jnp.arange(valid.shape[1]), 0), axis=1)
        if self.decoding == "as_openpi":
            # It counts valid tokens, skips one position, and attends to that many of the last tokens, valid or not.
            count = valid.sum(axis=1, dtype=jnp.int32)
            positions = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
            index = jnp.arange(valid.shape[1])
            seen = (index > (last - count)[:, None]) & (index <= last[:, None])
            next_position = count + 1
        else:
            positions = jnp.broadcast_to(self.positions(observation), valid.shape)
            seen = valid
            next_position = jnp.take_along_axis(positions, last[:, None], axis=1)[:, 0] + 1
        mask = order_mask(valid, jnp.zeros_like(valid))
        return Prompt(tokens=tokens, positions=positions, mask=mask, seen=seen, last=last, next_position=next_position)

    def filled(self, observation: Observation) -> Observation:
        """The observation with a black picture in each of the black slots that it lacks."""
        absent = [slot for slot in self.black_slots if slot not in observation.images]
        rows = observation.prompt_tokens.shape[0]
        black, there = jnp.zeros((rows, self.image_size, self.image_size, 3), jnp.uint8), jnp.ones(rows, bool)
        return dataclasses.replace(
            observation,
            images={**observation.images, **dict.fromkeys(absent, black)},
            image_masks={**observation.image_masks, **dict.fromkeys(absent, there)},
        )

    def positions(self, observation: Observation) -> Int[np.ndarray, " p"]:
        """Positions of all tokens: over all slots, including those of absent cameras, then over the prompt."""
        place = np.arange(self.tokens_per_image)
        images = [self.slots.index(slot) * self.tokens_per_image + place for slot in sorted(observation.images)]
        start = len(self.slots) * self.tokens_per_image
        return np.concatenate([*images, start + np.arange(observation.prompt_tokens.shape[1])]).astype(np.int32)
