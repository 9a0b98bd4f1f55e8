"""PaliGemma (Beyer et al. 2024) as a backbone, and a flow-matching head that reads its activations.

In the backbone, SigLIP's tokens and the prompt's attend to each other in all of Gemma's layers, as in PaliGemma. The
head is a decoder of any size whose noisy actions attend to each other and, in each of its layers, to keys and
values projected from the backbone's last activations and the state. The backbone does not see the head's tokens:
if it is frozen it has no backward pass, and sampling runs it once.

Read next: `paligemma.py`, which configures and builds this, `nn/gemma.py`, `objectives/flow_matching.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from openpi_train.models.prompted import embed_prefix
from openpi_train.nn.attention import Attention, block_mask, rotary_angles, rotate
from openpi_train.nn.gemma import Cache, Gemma
from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.nn.lora import LoraWeight
from openpi_train.nn.norms import RMSNorm
from openpi_train.nn.siglip import Siglip, SiglipConfig
from openpi_train.nn.sincos import sincos_encoding
from openpi_train.parallel.layers import scan_layers, stack_layers
from openpi_train.parallel.remat import Remat
from openpi_train.parallel.shard import spread
from openpi_train.types import Observation

# Flow times lie in [0, 1]; the periods of their encoding (openpi `models/pi0.py`, `embed_suffix`).
_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0

# Keys and values of the head's layers, and which of these tokens count.
Context = tuple[Cache, Bool[Array, "b c"]]


class PaliGemma(nnx.Module):
    """Maps images and a prompt to the language model's last activations, in `dtype`."""

    def __init__(
        self,
        *,
        language: GemmaConfig,
        siglip: SiglipConfig,
        image_size: int,
        vocab_size: int,
        dtype: DTypeLike,
        remat: Remat,
        attention: Attention = "auto",
        rngs: nnx.Rngs,
    ):
        compute: Any = {"dtype": dtype, "remat": remat, "attention": attention}
        self.image_encoder = Siglip(siglip, image_size, language.width, **compute, rngs=rngs)
        self.transformer = Gemma({"language": language}, vocab_size, {}, **compute, rngs=rngs)

    def __call__(self, observation: Observation) -> tuple[Float[Array, "b p d"], Bool[Array, "b p"]]:
        """The activations of images and prompt, which all attend to each other; and which are valid."""
        tokens, valid = embed_prefix(self.image_encoder, self.transformer.embed, observation)
        positions = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        mask = valid[:, None, :] & valid[:, :, None]
        return self.transformer({"language": tokens}, positions, mask)["language"], valid


class ContextLayer(nnx.Module):
    """Keys and values of the context in one of the head's layers."""

    def __init__(self, config: GemmaConfig, context_width: int, *, rngs: nnx.Rngs):
        shape = (2, config.num_kv_heads, context_width, config.head_dim)
        lecun = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0, 1))
        self.key_value = LoraWeight(shape, lecun, rank=0, rngs=rngs)

    @jax.named_scope("context")
    def __call__(self, x: Float[Array, "b c d"]) -> tuple[Array, Array]:
        """Keys and values "b c k head_dim", without positions."""
        key, value = self.key_value(spread(x, self.key_value.weight[...]), "bcd,pkdh->pbckh")
        return key, value


class FlowHead(nnx.Module):
    """Maps noisy actions to the velocity of their flow, given a context of any width.

    The flow time modulates its norms, as in pi0.5's action expert. Time, state and action projections are float32.

    Args:
        config: sizes of its decoder.
        context_width: width of the activations that it reads.
        dtype: type of its layers' activations.
    """

    def __init__(
        self,
        config: GemmaConfig,
        *,
        context_width: int,
        action_dim: int,
        action_horizon: int,
        dtype: DTypeLike,
        remat: Remat,
        attention: Attention = "auto",
        rngs: nnx.Rngs,
    ):
        self.action_horizon = action_horizon
        self.head_dim, self.dtype = config.head_dim, dtype
        self.remat: Remat = remat
        width = config.width

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, dtype=jnp.float32, rngs=rngs)

        self.context_norm = RMSNorm(context_width, dtype=dtype, rngs=rngs)
        self.state_proj = linear(action_dim, context_width)
        self.context = nnx.Dict(
            layers=stack_layers(lambda rngs: ContextLayer(config, context_width, rngs=rngs), config.depth, rngs)
        )
        self.transformer = Gemma(
            {"action": config}, 0, {"action": width}, dtype=dtype, remat=remat, attention=attention, rngs=rngs
        )
        self.action_in_proj = linear(action_dim, width)
        self.time_mlp_in = linear(width, width)
        self.time_mlp_out = linear(width, width)
        self.action_out_proj = linear(width, action_dim)

    def read(
        self, activations: Float[Array, "b p d"], valid: Bool[Array, "b p"], state: Float[Array, "b s"]
    ) -> Context:
        """Keys and values of every layer for these activations, then for the state; and which are valid."""
        tokens = self.context_norm(activations, None)[0]
        tokens = jnp.concatenate([tokens, self.state_proj(state)[:, None].astype(self.dtype)], axis=1)  # b c d
        valid = jnp.concatenate([valid, jnp.ones((len(valid), 1), bool)], axis=1)
        angles = rotary_angles(_places(valid), self.head_dim)

        def body(layer: ContextLayer, carry: None, _: None):
            key, value = layer(tokens)
            return carry, (rotate(key, *angles), value)

        return scan_layers(self.context["layers"], body, None, remat=self.remat)[1], valid

    def __call__(
        self, noisy_actions: Float[Array, "b r h a"], time: Float[Array, "b r"], cache: Cache, valid: Bool[Array, "b c"]
    ) -> Float[Array, "b r h a"]:
        """The velocity, float32; the r draws of a row share the result of `read` and attend only to their own
        actions."""
        b, draws, horizon, _ = noisy_actions.shape
        tokens = self.action_in_proj(noisy_actions)  # b r h w
        encoding = sincos_encoding(time, tokens.shape[-1], _MIN_PERIOD, _MAX_PERIOD)  # b r w
        condition = nnx.swish(self.time_mlp_out(nnx.swish(self.time_mlp_in(encoding))))
        mask, positions = self.layout(valid, draws)
        flat = {"action": tokens.reshape(b, draws * horizon, -1)}
        result = self.transformer(flat, positions, mask, {"action": condition}, cache)["action"]
        return self.action_out_proj(result).reshape(b, draws, horizon, -1)

    def layout(self, valid: Bool[Array, "b c"], draws: int) -> tuple[Bool[Array, "b t s"], Int[Array, "b t"]]:
        """The attention mask of action tokens over context and actions, and their positions.

        As in pi0, masked tokens take no position, and all draws have the same positions: neither an absent camera
        nor another draw can change a velocity.
        """
        b, num_context = valid.shape
        steps = np.tile(np.arange(1, self.action_horizon + 1), draws)
        branch = np.repeat(np.arange(draws + 1), [num_context] + [self.action_horizon] * draws)
        every = jnp.concatenate([valid, jnp.ones((b, len(steps)), bool)], axis=1)
        mask = block_mask(every, np.zeros(len(branch), np.int32), branch)[:, num_context:]
        return mask, _places(valid)[:, -1:] + jnp.asarray(steps, jnp.int32)


def _places(valid: Bool[Array, "b c"]) -> Int[Array, "b c"]:
    return jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1


class PaliGemmaFlow(nnx.Module):
    """Backbone and flow head: a policy. `head` holds the head's arguments, the rest are the backbone's."""

    def __init__(self, language: GemmaConfig, head: GemmaConfig, *, action_dim: int, action_horizon: int, **sizes: Any):
        shared = {name: sizes[name] for name in ("dtype", "remat", "attention", "rngs")}
        self.action_horizon = action_horizon
        self.backbone = PaliGemma(language=language, **sizes)
        self.head = FlowHead(
            head, context_width=language.width, action_dim=action_dim, action_horizon=action_horizon, **shared
        )

    def context(self, observation: Observation) -> Context:
        """Run the backbone; returns what the head reads of images, prompt and state."""
        return self.head.read(*self.backbone(observation), observation.state)

    def velocity(
        self, seen: Observation | Context, noisy_actions: Float[Array, "b r h a"], time: Float[Array, "b r"]
    ) -> Float[Array, "b r h a"]:
        """d x_t / d t at `noisy_actions` = x_t, in float32, given an observation or its context.

        `time` is 1 at noise and 0 at actions.
        """
        return self.head(noisy_actions, time, *(self.context(seen) if isinstance(seen, Observation) else seen))
