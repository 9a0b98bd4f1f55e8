"""pi0 and pi0.5: a vision-language model whose action expert predicts the velocity of a flow over action chunks.

Follows openpi's `models/pi0.py` at 15a9616 number for number (Black et al. 2024; Physical Intelligence 2025 for
pi0.5). Where we differ: an absent camera has no tokens, and several flow draws may share one prefix.

Read next: `pi0.py`, which configures and builds this module, `nn/gemma.py`, `objectives/flow_matching.py`.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from openpi_train.models.prompted import causal_tokens, embed_prefix
from openpi_train.nn.attention import Attention, block_mask, order_mask
from openpi_train.nn.gemma import Cache, Gemma
from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.nn.return_head import ReturnHead
from openpi_train.nn.siglip import Siglip, SiglipConfig
from openpi_train.nn.sincos import sincos_encoding
from openpi_train.nn.value_head import ValueHead
from openpi_train.parallel.remat import Remat
from openpi_train.sampling.indicator import NUM_TOLD
from openpi_train.types import Observation, pytree

# Flow times lie in [0, 1]; the periods of their encoding (openpi `models/pi0.py`, `embed_suffix`).
_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0


@pytree
class Context:
    """The suffix's view of an observation: the prefix's keys and values, which of them are visible, and the state."""

    cache: Cache
    visible: Bool[Array, "b p"]
    state: Float[Array, "b s"]


class Pi0(nnx.Module):
    """The network. Tokens: images and prompt (prefix, visible to all), then [state and] noisy actions (suffix).

    Args:
        language, action: sizes of the two experts; the language expert reads the prefix, the action expert the rest.
        adaptive: pi0.5's form: the flow time modulates the action expert's norms and the state is part of the prompt.
        indicator: a velocity may be told whether its chunk is better than expected (`sampling/indicator.py`): a
            learned vector is added to every noisy action's token. The prefix, which is nearly all of the work, is so
            the same whatever is told, and no token changes its place, as it would with one more token. The vectors
            begin at 0, so weights that were trained without them give the same velocities.
        critic: there is a head for values, which reads the mean of the prefix's valid tokens, and the state.
        return_bins: a head of this many returns reads the same; 0: there is none.
        insulated: no gradient flows from the action expert into the language expert (`objectives/insulated_flow.py`).
        dtype: type of the activations; flow time, state and action projections are float32 always.
        remat, attention: how the backward pass and attention are computed; no result depends on it.
    """

    def __init__(
        self,
        *,
        language: GemmaConfig,
        action: GemmaConfig,
        siglip: SiglipConfig,
        image_size: int,
        vocab_size: int,
        action_dim: int,
        action_horizon: int,
        adaptive: bool,
        indicator: bool = False,
        critic: bool = False,
        return_bins: int = 0,
        insulated: bool = False,
        dtype: DTypeLike,
        remat: Remat,
        attention: Attention = "auto",
        rngs: nnx.Rngs,
    ):
        self.action_horizon = action_horizon
        self.adaptive = adaptive
        self.insulated = insulated
        self.fixed_prefix = False
        width = action.width
        compute: Any = {"dtype": dtype, "remat": remat, "attention": attention}
        self.image_encoder = Siglip(siglip, image_size, language.width, **compute, rngs=rngs)
        self.transformer = Gemma(
            {"language": language, "action": action},
            vocab_size,
            {"action": width} if adaptive else {},
            **compute,
            rngs=rngs,
        )

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, dtype=jnp.float32, rngs=rngs)

        self.action_in_proj = linear(action_dim, width)
        if adaptive:
            self.time_mlp_in = linear(width, width)
            self.time_mlp_out = linear(width, width)
        else:
            self.state_proj = linear(action_dim, width)
            self.action_time_mlp_in = linear(2 * width, width)
            self.action_time_mlp_out = linear(width, width)
        self.action_out_proj = linear(width, action_dim)
        if indicator:
            self.indicator = nnx.Param(jnp.zeros((NUM_TOLD, width)))
        if critic:
            self.value_head = ValueHead(language.width + action_dim, rngs)
        if return_bins:
            self.return_head = ReturnHead(language.width + action_dim, return_bins, rngs)

    def leave_fixed(self, groups: Collection[str]) -> None:
        """With a fixed backbone the prefix has no backward pass."""
        self.fixed_prefix = "backbone" in groups

    def context(self, observation: Observation) -> Context:
        """Run the prefix; returns the context that every velocity for this observation needs."""
        tokens, mask, positions, visible = self.prefix(observation)
        cache = self.transformer.keys_and_values({"language": tokens}, positions, mask)
        return self.context_of(cache, visible, observation)

    def context_of(self, cache: Cache, visible: Bool[Array, "b p"], observation: Observation) -> Context:
        """The context with these keys and values; insulated, no gradient goes back through them."""
        cache = jax.lax.stop_gradient(cache) if self.insulated else cache
        return Context(cache=cache, visible=visible, state=observation.state)

    def velocity(
        self,
        seen: Observation | Context,
        noisy_actions: Float[Array, "b r h a"],
        time: Float[Array, "b r *each"],
        told: Int[Array, "b r"] | None = None,
    ) -> Float[Array, "b r h a"]:
        """d x_t / d t at `noisy_actions` = x_t, in float32; the r draws of a row share its prefix, not each other's
        actions.

        `time` is 1 at noise and 0 at actions, of each draw or of each action of it, [b, r, h]. Given an observation
        instead of its context, prefix and suffix pass through the layers together, which is cheaper in training. `told`
        is what each draw is told, with `indicator`.
        """
        if isinstance(seen, Observation):
            if not (self.insulated or self.fixed_prefix):
                outputs = self.outputs(seen, noisy_actions, time, wanted=("action",), told=told)
                return self.read_out(outputs["action"], noisy_actions.shape)
            seen = self.context(seen)
        mask, positions = self.layout(seen.visible, time.shape[1])
        of_suffix = slice(seen.visible.shape[1], None)
        suffix, condition = self.embed_suffix(seen.state, noisy_actions, time, told)
        result = self.transformer(
            {"action": suffix}, positions[:, of_suffix], mask[:, of_suffix], condition, seen.cache
        )
        return self.read_out(result["action"], noisy_actions.shape)

    def value(self, observation: Observation) -> Float[Array, " b"]:
        """What the critic expects from here on, float32; with `critic` only."""
        return self.value_head(self._pooled(observation))

    def return_logits(self, observation: Observation) -> Float[Array, "b bins"]:
        """How likely each return is from here on, float32 logits; with `return_bins` only."""
        return self.return_head(self._pooled(observation))

    def _pooled(self, observation: Observation) -> Float[Array, "b d"]:
        """The mean of the language model's outputs on the prefix, as RLinf's `mean_token`, beside the state, which pi0
        reads behind the prefix only."""
        tokens, mask, positions, visible = self.prefix(observation)
        outputs, _ = self.transformer.with_keys_and_values({"language": tokens}, positions, mask)
        weights = visible / jnp.maximum(visible.sum(axis=1, keepdims=True), 1)  # b p
        mean = jnp.einsum("bp,bpd->bd", weights.astype(jnp.float32), outputs["language"].astype(jnp.float32))
        return jnp.concatenate([mean, observation.state], axis=-1)

    def velocity_and_log_probs(
        self, observation: Observation, noisy_actions: Float[Array, "b r h a"], time: Float[Array, "b r *each"]
    ) -> tuple[Float[Array, "b r h a"], Float[Array, "b n"], Bool[Array, "b n"]]:
        """`velocity`; and for every prompt token but the first its log-probability, and whether it is the most likely.

        The language expert runs first on its own tokens; the action expert then attends to its keys and values, with
        no gradient through them.
        """
        tokens, mask, positions, visible = self.prefix(observation)
        outputs, cache = self.transformer.with_keys_and_values({"language": tokens}, positions, mask)
        velocity = self.velocity(self.context_of(cache, visible, observation), noisy_actions, time)
        said = outputs["language"][:, -observation.prompt_tokens.shape[1] : -1]
        return velocity, *self.transformer.log_probs(said, observation.prompt_tokens[:, 1:])

    def outputs(
        self,
        observation: Observation,
        noisy_actions: Float[Array, "b r h a"],
        time: Float[Array, "b r *each"],
        wanted: Collection[str] = ("language", "action"),
        told: Int[Array, "b r"] | None = None,
    ) -> Mapping[str, Float[Array, "b _ _"]]:
        """The transformer's last activations, in `dtype`: `language` on the prefix, `action` on the suffix.

        The last layer does not compute outputs that are not `wanted`.
        """
        prefix, prefix_mask = self.embed_prefix(observation)
        suffix, condition = self.embed_suffix(observation.state, noisy_actions, time, told)
        mask, positions = self.layout(prefix_mask, num_draws=time.shape[1])
        tokens = {"language": prefix, "action": suffix}
        return self.transformer(tokens, positions, mask, condition, wanted=wanted)

    def prefix(
        self, observation: Observation
    ) -> tuple[Float[Array, "b p d"], Bool[Array, "b p p"], Int[Array, "b p"], Bool[Array, "b p"]]:
        """The prefix's tokens, their attention mask, their positions, and which of them the suffix attends to.

        Causal tokens are at the end of the prefix: each attends only to earlier tokens, and only later ones attend to
        it.
        """
        tokens, valid = self.embed_prefix(observation)
        causal = causal_tokens(observation, tokens.shape[1])
        causal = jnp.zeros_like(valid) if causal is None else causal
        return tokens, order_mask(valid, causal), _places(valid), valid & ~causal

    def embed_prefix(self, observation: Observation) -> tuple[Float[Array, "b p d"], Bool[Array, "b p"]]:
        """Tokens of the present images, in the order of their slots' names, then of the prompt; and which are valid."""
        return embed_prefix(self.image_encoder, self.transformer.embed, observation)

    @jax.named_scope("embed_suffix")
    def embed_suffix(
        self,
        state: Float[Array, "b s"],
        noisy_actions: Float[Array, "b r h a"],
        time: Float[Array, "b r *each"],
        told: Int[Array, "b r"] | None = None,
    ) -> tuple[Float[Array, "b t w"], Mapping[str, Float[Array, "b _ w"]]]:
        """The state's token (pi0 only), then the action tokens draw after draw, float32; and experts' conditions, one
        for each draw, or for each action if each has a time."""
        tokens = self.action_in_proj(noisy_actions)  # b r h w
        if told is not None:
            vectors = jnp.pad(self.indicator[...].astype(tokens.dtype), ((1, 0), (0, 0)))  # who is told nothing has 0
            tokens += vectors[told][:, :, None]
        time_encoding = sincos_encoding(time, tokens.shape[-1], _MIN_PERIOD, _MAX_PERIOD)  # b r (h) w
        flat = (tokens.shape[0], -1, tokens.shape[-1])
        if self.adaptive:
            hidden = nnx.swish(self.time_mlp_in(time_encoding))
            return tokens.reshape(flat), {"action": nnx.swish(self.time_mlp_out(hidden)).reshape(flat)}
        times = time_encoding if time.ndim == 3 else jnp.broadcast_to(time_encoding[:, :, None], tokens.shape)
        hidden = nnx.swish(self.action_time_mlp_in(jnp.concatenate([tokens, times], axis=-1)))
        tokens = self.action_time_mlp_out(hidden).reshape(flat)
        return jnp.concatenate([self.state_proj(state)[:, None], tokens], axis=1), {}

    def layout(self, prefix_mask: Bool[Array, "b p"], num_draws: int) -> tuple[Bool[Array, "b t t"], Int[Array, "b t"]]:
        """The attention mask and positions over prefix and suffix.

        The prefix attends to itself; the state also to the prefix; an action to both and to the actions of its own
        draw. Masked prefix tokens are invisible and take no position, and all draws have the same positions: neither
        an absent camera nor another draw can change a velocity.
        """
        b, num_prefix = prefix_mask.shape
        num_state = 0 if self.adaptive else 1
        counts = [num_prefix, num_state, num_draws * self.action_horizon]
        block = np.repeat([0, 1, 2], counts)
        draw = np.repeat(np.arange(1, num_draws + 1), self.action_horizon)
        branch = np.concatenate([np.zeros(num_prefix + num_state, np.int32), draw])
        offset = [
            *range(num_state),
            *(num_state + step for _ in range(num_draws) for step in range(self.action_horizon)),
        ]

        mask = block_mask(jnp.concatenate([prefix_mask, jnp.ones((b, len(offset)), bool)], axis=1), block, branch)
        start = prefix_mask.sum(axis=1, keepdims=True, dtype=jnp.int32)
        return mask, jnp.concatenate([_places(prefix_mask), start + jnp.asarray(offset, jnp.int32)], axis=1)

    @jax.named_scope("action_head")
    def read_out(self, suffix: Float[Array, "b t w"], shape: tuple[int, ...]) -> Float[Array, "b r h a"]:
        """Project the action expert's last activations to the velocity, in the given shape."""
        b, draws, horizon, _ = shape
        return self.action_out_proj(suffix[:, -draws * horizon :]).reshape(b, draws, horizon, -1)


def _places(valid: Bool[Array, "b p"]) -> Int[Array, "b p"]:
    return jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
