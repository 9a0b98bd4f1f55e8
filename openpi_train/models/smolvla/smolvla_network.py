"""The network of SmolVLA (Shukor et al. 2025): an action expert beside the first layers of a vision-language model.

The language model reads images, prompt and state; its last layers are left out. The expert is narrower and as deep: in
some of its layers every action attends to the language model's keys and values of that layer and to the actions up to
itself, in the others to those keys and values alone, projected once more. Equal to LeRobot's (`policies/smolvla` of
lerobot 0.6.1). Where we differ: several flow draws may share one prefix.

Read next: `smolvla.py`, which configures and builds it, `nn/decoder.py`, `objectives/flow_matching.py`.
"""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from openpi_train.models.prompted import embed_prefix
from openpi_train.nn.attention import rotary_angles
from openpi_train.nn.decoder import Angles, Decoder, LanguageLayer
from openpi_train.nn.lora import AdapterConfig
from openpi_train.nn.norms import RMSNorm
from openpi_train.nn.siglip import Siglip
from openpi_train.parallel.layers import scan_all_but_last, scan_layers, stack_layers
from openpi_train.types import Observation, pytree

if TYPE_CHECKING:
    from openpi_train.models.smolvla.smolvla import SmolVlaConfig

# The periods of the encoding of flow times, which lie in [0, 1].
_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0
# The first 12 of a float32's 24 significant bits: products of two such numbers are exact.
_FIRST_BITS = np.uint32(0xFFFFF000)
# Keys and values of every layer of the language model.
KeysAndValues = tuple[Float[Array, "layers b p k c"], Float[Array, "layers b p k c"]]


@pytree
class SmolVlaContext:
    """The expert's view of an observation: keys and values of its tokens in every layer, and which of them count."""

    keys: Float[Array, "layers b p k c"]
    values: Float[Array, "layers b p k c"]
    visible: Bool[Array, "b p"]


class ExpertLayers(nnx.Module):
    """Consecutive layers of the expert: in the first actions attend to each other too, in the others they do not."""

    def __init__(self, config: "SmolVlaConfig", *, rngs: nnx.Rngs):
        def layer(seen_width: int | None) -> LanguageLayer:
            compute: Any = {"dtype": config.compute.dtype, "attention": config.attention}
            return LanguageLayer(config.expert, AdapterConfig(), **compute, rngs=rngs, seen_width=seen_width)

        self.among = layer(None)
        heads = config.num_kv_heads * config.head_dim
        self.across = nnx.List([layer(heads) for _ in range(config.self_attn_every_n_layers - 1)])

    def __call__(
        self,
        x: Float[Array, "b t w"],
        seen: tuple[Float[Array, "n b p k c"], Float[Array, "n b p k c"]],
        angles: tuple[Angles, Angles],
        mask: Bool[Array, "b t s"],
    ) -> Float[Array, "b t w"]:
        """The actions' tokens after these n layers.

        Args:
            seen: keys and values of the language model's layers.
            angles: of the tokens' positions after the prefix, and of those counted from 0, for layers across.
            mask: which tokens of the prefix, and then which actions, each action attends to.
        """
        query, *own = self.among.heads(x, angles[0])
        key, value = (jnp.concatenate([of_prefix[0], new], axis=1) for of_prefix, new in zip(seen, own, strict=True))
        x = self.among.after(x, query, key, value, mask)
        for number, layer in enumerate(self.across, start=1):
            keys, values = (one[number].reshape(*one.shape[1:3], -1) for one in seen)  # b p kc
            query, key, value = layer.heads_across(x, (keys, values), angles[1])
            x = layer.after(x, query, key, value, mask[:, :, : keys.shape[1]])
        return x


class SmolVla(nnx.Module):
    """The policy. Flow time, state and action projections are float32, all else is in the config's type."""

    def __init__(self, config: "SmolVlaConfig", *, rngs: nnx.Rngs):
        self.config = config
        self.fixed_backbone = False
        language, expert = config.language, config.expert
        dtype = config.compute.dtype
        compute: Any = {"dtype": dtype, "remat": config.compute.remat, "attention": config.attention}
        self.image_encoder = Siglip(config.siglip, config.image_size, None, **compute, rngs=rngs)
        square = config.siglip.width * config.pixel_shuffle**2
        self.connector = nnx.Linear(square, language.width, use_bias=False, dtype=dtype, rngs=rngs)
        self.language = Decoder(language, AdapterConfig(), **compute, rngs=rngs)
        self.expert = stack_layers(
            lambda rngs: ExpertLayers(config, rngs=rngs),
            config.num_vlm_layers // config.self_attn_every_n_layers,
            rngs,
        )
        self.expert_norm = RMSNorm(expert.width, dtype=dtype, rngs=rngs, offset=0.0, eps=expert.norm_eps)

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, dtype=jnp.float32, rngs=rngs)

        self.state_proj = linear(config.action_dim, language.width)
        self.action_in_proj = linear(config.action_dim, expert.width)
        self.action_time_mlp_in = linear(2 * expert.width, expert.width)
        self.action_time_mlp_out = linear(expert.width, expert.width)
        self.action_out_proj = linear(expert.width, config.action_dim)

    def leave_fixed(self, groups: Collection[str]) -> None:
        """With image tower, connector and language model fixed only the state has a backward pass through them."""
        self.fixed_backbone = "backbone" in groups

    def context(self, observation: Observation) -> SmolVlaContext:
        """Run the prefix; returns the context that every velocity for this observation needs. Not for training."""
        return self._context(observation, trains=False)

    def velocity(
        self,
        seen: Observation | SmolVlaContext,
        noisy_actions: Float[Array, "b r h a"],
        time: Float[Array, "b r *each"],
    ) -> Float[Array, "b r h a"]:
        """d x_t / d t at `noisy_actions` = x_t, in float32; the r draws of a row share its prefix, not each other's
        actions. `time` is 1 at noise and 0 at actions, of each draw or of each action of it, [b, r, h].
        """
        if isinstance(seen, Observation):
            seen = self._context(seen, trains=not self.fixed_backbone)
        config, (b, draws, horizon, _) = self.config, noisy_actions.shape
        x = self._embed_actions(noisy_actions, time).reshape(b, draws * horizon, -1)

        place = jnp.tile(jnp.arange(horizon), draws)
        from_zero = jnp.broadcast_to(place, (b, len(place)))
        after_prefix = seen.visible.sum(axis=1, keepdims=True, dtype=jnp.int32) + place
        angles = rotary_angles(after_prefix, config.head_dim), rotary_angles(from_zero, config.head_dim)
        # An action attends to the actions of its own draw up to itself.
        earlier = np.kron(np.eye(draws, dtype=bool), np.tril(np.ones((horizon, horizon), bool)))
        of_prefix = jnp.broadcast_to(seen.visible[:, None], (b, len(place), seen.visible.shape[1]))
        mask = jnp.concatenate([of_prefix, jnp.broadcast_to(earlier, (b, *earlier.shape))], axis=2)

        def layers(module: ExpertLayers, x: Array, seen: tuple[Array, Array]) -> tuple[Array, None]:
            return module(x, seen, angles, mask), None

        every = config.self_attn_every_n_layers
        grouped = tuple(one.reshape(-1, every, *one.shape[1:]) for one in (seen.keys, seen.values))
        with jax.named_scope("expert"):
            x, _ = scan_layers(self.expert, layers, x.astype(config.compute.dtype), grouped, remat=config.compute.remat)
        with jax.named_scope("action_head"):
            return self.action_out_proj(self.expert_norm(x)[0]).reshape(noisy_actions.shape)

    @jax.named_scope("connector")
    def embed_images(self, images: Float[Array, "n height width 3"]) -> Float[Array, "n t d"]:
        """Tokens of images, each of a square of patches, row by row; scaled as the words are."""
        x, side = self.image_encoder(images), self.config.pixel_shuffle
        rows = math.isqrt(x.shape[1]) // side
        squares = x.reshape(len(x), rows, side, rows, side, -1).swapaxes(2, 3)  # n rows columns side side d
        x = self.connector(squares.reshape(len(x), rows * rows, -1))
        return x * jnp.asarray(math.sqrt(x.shape[-1]), x.dtype)

    def _context(self, observation: Observation, *, trains: bool) -> SmolVlaContext:
        """The context; with `trains` its backward pass reaches all of the language model, else only the state.

        Images and prompt attend to each other and not to the state, which comes after them: their keys and values do
        not depend on it.
        """
        tokens, valid = embed_prefix(self.embed_images, self.language.embed, observation)
        positions = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        known = self._keys_and_values(tokens, positions, valid[:, None] & valid[:, :, None], trains=trains)

        state = self.state_proj(observation.state)[:, None].astype(tokens.dtype)  # b 1 d
        visible = jnp.pad(valid, ((0, 0), (0, 1)), constant_values=True)
        angles = rotary_angles(positions[:, -1:] + 1, self.config.head_dim)

        def layer(module: LanguageLayer, x: Array, known: tuple[Array, Array]) -> tuple[Array, tuple[Array, ...]]:
            query, *own = module.heads(x, angles)
            key, value = (jnp.concatenate(both, axis=1) for both in zip(known, own, strict=True))
            return module.after(x, query, key, value, visible[:, None]), (key, value)

        with jax.named_scope("state"):
            _, (keys, values) = scan_layers(self.language.layers, layer, state, known, remat=self.language.remat)
        return SmolVlaContext(keys=keys, values=values, visible=visible)

    @jax.named_scope("language")
    def _keys_and_values(
        self, tokens: Float[Array, "b p d"], positions: Array, mask: Bool[Array, "b p p"], *, trains: bool
    ) -> KeysAndValues:
        """Keys and values of images and prompt in every layer; without `trains` not for a backward pass."""
        angles = rotary_angles(positions, self.config.head_dim)

        def layer(module: LanguageLayer, x: Array, _: None = None) -> tuple[Array, tuple[Array, Array]]:
            query, key, value = module.heads(x, angles)
            return module.after(x, query, key, value, mask), (key, value)

        if trains:
            return scan_layers(self.language.layers, layer, tokens, remat=self.language.remat)[1]
        x, kept, last = scan_all_but_last(self.language.layers, layer, tokens)
        own = last.heads(x, angles)[1:]
        keys, values = (jnp.concatenate([some, one[None]]) for some, one in zip(kept, own, strict=True))
        return jax.lax.stop_gradient((keys, values))

    @jax.named_scope("embed_suffix")
    def _embed_actions(self, noisy_actions: Float[Array, "b r h a"], time: Float[Array, "b r *each"]) -> Array:
        """The tokens of noisy actions, which include the flow time, float32: "b r h w"."""
        x = self.action_in_proj(noisy_actions)
        encoded = encoded_time(time, x.shape[-1])  # b r (h) w
        encoded = encoded if time.ndim == 3 else encoded[:, :, None]
        x = jnp.concatenate([x, jnp.broadcast_to(encoded, x.shape)], axis=-1)
        return self.action_time_mlp_out(nnx.swish(self.action_time_mlp_in(x)))


def encoded_time(time: Float[Array, "*n"], width: int) -> Float[Array, "*n width"]:
    """Sines, then cosines, of flow times at `width / 2` periods, evenly spaced in logarithm, right to the last bits.

    LeRobot computes them in float64 and openpi (`sincos.py`) in float32, where angles, of up to 250
    turns, are off by 1e-4. Here the product of time and frequency is split, so that whole turns are dropped exactly.
    """
    frequency = 1 / (_MIN_PERIOD * (_MAX_PERIOD / _MIN_PERIOD) ** np.linspace(0.0, 1.0, width // 2))
    coarse = (frequency.astype(np.float32).view(np.uint32) & _FIRST_BITS).view(np.float32)
    fine = (frequency - coarse).astype(np.float32)
    time = time.astype(jnp.float32)[..., None]
    first = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(time, jnp.uint32) & _FIRST_BITS, jnp.float32)
    turns = jnp.mod(first * coarse, 1.0) + ((time - first) * coarse + time * fine)
    angle = 2 * jnp.pi * turns
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
