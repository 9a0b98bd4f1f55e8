"""The network of ACT (Zhao et al. 2023): one forward pass from images, state and a latent to a chunk of actions.

In training a variational encoder draws the latent from the chunk itself; when the policy acts, the latent is zero.
Equal to LeRobot's (`policies/act/modeling_act.py` of lerobot 0.6.1) with ResNet-18, ReLU, and norms after the skip
connections (`pre_norm` False). Read next: `act.py`, which configures and builds it, and
`objectives/conditional_vae.py`, which trains it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from openpi_train.nn.dropout import RowKeys, dropped, numbered
from openpi_train.nn.resnet import TORCH_INIT, ResNet18
from openpi_train.nn.siglip import float_images, normalize_images
from openpi_train.nn.wide_norms import WideLayerNorm
from openpi_train.parallel.layers import scan_layers, stack_layers
from openpi_train.parallel.remat import keep
from openpi_train.parallel.shard import as_varied
from openpi_train.types import Observation

if TYPE_CHECKING:
    from openpi_train.models.act.act import ActConfig

_XAVIER = nnx.initializers.xavier_uniform()
# Tables of positions and the token of the whole chunk: torch's initial embeddings.
_NORMAL = nnx.initializers.normal(1.0)
_MASKED = -1e30
_LONGEST_PERIOD = 10_000.0


class PackedAttention(nnx.Module):
    """Multi-head attention with one projection for queries, keys and values, as in torch's `MultiheadAttention`."""

    def __init__(self, config: "ActConfig", init: Callable[..., Array], *, rngs: nnx.Rngs):
        self.num_heads, self.dropout = config.n_heads, config.dropout
        width, dtype = config.dim_model, config.compute.dtype
        self.project = nnx.Linear(width, 3 * width, kernel_init=_XAVIER, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(width, width, kernel_init=init, dtype=dtype, rngs=rngs)

    @jax.named_scope("attention")
    def __call__(
        self,
        query: Float[Array, "b t d"],
        key: Float[Array, "b s d"],
        value: Float[Array, "b s d"],
        valid: Bool[Array, "b s"],
        keys: RowKeys,
    ) -> Float[Array, "b t d"]:
        """Every query attends to all `valid` keys. The softmax is in float32."""
        q, k, v = (keep(self._heads(x, part)) for part, x in enumerate((query, key, value)))  # b t n c
        logits = jnp.einsum("btnc,bsnc->bnts", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(valid[:, None, None], logits, _MASKED), axis=-1).astype(q.dtype)
        averaged = keep(jnp.einsum("bnts,bsnc->btnc", dropped(weights, keys, self.dropout), v))
        return self.output(averaged.reshape(query.shape))

    def _heads(self, x: Float[Array, "b t d"], part: int) -> Float[Array, "b t n c"]:
        """The queries (part 0), keys (1) or values (2) of `x`."""
        width = x.shape[-1]
        own = slice(part * width, (part + 1) * width)
        kernel, bias = self.project.kernel[..., own], self.project.bias[own]  # pyright: ignore[reportOptionalSubscript]
        x, kernel, bias = self.project.promote_dtype((x, kernel, bias), dtype=self.project.dtype)
        return (x @ kernel + bias).reshape(*x.shape[:2], self.num_heads, -1)


class FeedForward(nnx.Module):
    """Two dense layers around a ReLU."""

    def __init__(self, config: "ActConfig", init: nnx.Initializer, *, rngs: nnx.Rngs):
        self.dropout, dtype = config.dropout, config.compute.dtype
        self.up = nnx.Linear(config.dim_model, config.dim_feedforward, kernel_init=init, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(config.dim_feedforward, config.dim_model, kernel_init=init, dtype=dtype, rngs=rngs)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "b t d"], keys: RowKeys) -> Float[Array, "b t d"]:
        return self.down(dropped(nnx.relu(self.up(x)), keys, self.dropout))


class TorchLayerNorm(nnx.Module):
    """Layer norm with torch's epsilon, computed in float32 and returned in the type of its input."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = WideLayerNorm(width, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return self.norm(x)


class ActEncoderLayer(nnx.Module):
    """Attention among the tokens, then an MLP; a norm after each skip connection."""

    def __init__(self, config: "ActConfig", init: Callable[..., Array] = _XAVIER, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention = PackedAttention(config, init, rngs=rngs)
        self.mlp = FeedForward(config, init, rngs=rngs)
        self.norm_1, self.norm_2 = (TorchLayerNorm(config.dim_model, rngs=rngs) for _ in range(2))

    def __call__(
        self, x: Float[Array, "b t d"], positions: Float[Array, "t d"], valid: Bool[Array, "b t"], keys: RowKeys
    ) -> Float[Array, "b t d"]:
        """Positions are added to queries and keys, not to values."""
        placed = x + positions
        found = self.attention(placed, placed, x, valid, numbered(keys, 0))
        x = self.norm_1(x + dropped(found, numbered(keys, 1), self.dropout))
        found = self.mlp(x, numbered(keys, 2))
        return self.norm_2(x + dropped(found, numbered(keys, 3), self.dropout))


class ActDecoderLayer(nnx.Module):
    """Attention among the actions, then to what was seen, then an MLP; a norm after each skip connection."""

    def __init__(self, config: "ActConfig", *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.among = PackedAttention(config, _XAVIER, rngs=rngs)
        self.across = PackedAttention(config, _XAVIER, rngs=rngs)
        self.mlp = FeedForward(config, _XAVIER, rngs=rngs)
        self.norm_1, self.norm_2, self.norm_3 = (TorchLayerNorm(config.dim_model, rngs=rngs) for _ in range(3))

    def __call__(
        self,
        x: Float[Array, "b h d"],
        positions: Float[Array, "h d"],
        seen: tuple[Float[Array, "b t d"], Float[Array, "b t d"], Bool[Array, "b t"]],
        keys: RowKeys,
    ) -> Float[Array, "b h d"]:
        """`seen` holds keys and values of what was seen, and which of them count."""
        placed = x + positions
        found = self.among(placed, placed, x, jnp.ones(x.shape[:2], bool), numbered(keys, 0))
        x = self.norm_1(x + dropped(found, numbered(keys, 1), self.dropout))
        found = self.across(x + positions, *seen, numbered(keys, 2))
        x = self.norm_2(x + dropped(found, numbered(keys, 3), self.dropout))
        found = self.mlp(x, numbered(keys, 4))
        return self.norm_3(x + dropped(found, numbered(keys, 5), self.dropout))


class Act(nnx.Module):
    """The policy. With `keys`, one per row, its transformers drop values, as they do in training."""

    def __init__(self, config: "ActConfig", *, rngs: nnx.Rngs):
        self.config = config
        width, dtype = config.dim_model, config.compute.dtype

        def linear(inputs: int, outputs: int, dtype: DTypeLike = dtype) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, kernel_init=TORCH_INIT, dtype=dtype, rngs=rngs)

        def table(rows: int) -> nnx.Param:
            return nnx.Param(_NORMAL(rngs.params(), (rows, width), jnp.float32))

        if config.use_vae:
            self.vae_layers = stack_layers(
                lambda rngs: ActEncoderLayer(config, TORCH_INIT, rngs=rngs), config.n_vae_encoder_layers, rngs
            )
            self.vae_token = table(1)
            self.vae_state = linear(config.used_state_dim, width)
            self.vae_action = linear(config.action_dim, width)
            self.vae_latent = linear(width, 2 * config.latent_dim, jnp.float32)
        if config.cameras:
            self.backbone = ResNet18(widths=config.backbone_widths, norm="frozen_batch", dtype=dtype, rngs=rngs)
            self.image = nnx.Conv(
                config.backbone_widths[-1], width, (1, 1), kernel_init=TORCH_INIT, dtype=dtype, rngs=rngs
            )
        self.state = linear(config.used_state_dim, width)
        self.latent = linear(config.latent_dim, width)
        self.token_positions = table(2)
        self.encoder = stack_layers(lambda rngs: ActEncoderLayer(config, rngs=rngs), config.n_encoder_layers, rngs)
        self.action_positions = table(config.action_horizon)
        self.decoder = stack_layers(lambda rngs: ActDecoderLayer(config, rngs=rngs), config.n_decoder_layers, rngs)
        self.decoder_norm = TorchLayerNorm(width, rngs=rngs)
        self.action = linear(width, config.action_dim, jnp.float32)

    @jax.named_scope("vae_encoder")
    def posterior(
        self,
        observation: Observation,
        actions: Float[Array, "b h a"],
        action_mask: Bool[Array, "b h"],
        keys: RowKeys = None,
    ) -> tuple[Float[Array, "b z"], Float[Array, "b z"]]:
        """Mean and log variance of a chunk's latent, float32; masked steps do not count."""
        token = jnp.broadcast_to(self.vae_token[...], (len(actions), *self.vae_token.shape))
        parts = (token, self.vae_state(observation.state)[:, None], self.vae_action(actions))
        x = jnp.concatenate([part.astype(self.config.compute.dtype) for part in parts], axis=1)  # b 2+h d
        valid = jnp.pad(action_mask, ((0, 0), (2, 0)), constant_values=True)
        x = self._encoded(self.vae_layers, x, jnp.asarray(sine_table(x.shape[1], x.shape[2])), valid, keys)
        mean, log_variance = jnp.split(self.vae_latent(x[:, 0]), 2, axis=-1)
        return mean, log_variance

    def predict(
        self, observation: Observation, latent: Float[Array, "b z"], keys: RowKeys = None
    ) -> Float[Array, "b h a"]:
        """The chunk for a latent, float32."""
        x, positions, valid = self._tokens(observation, latent)
        with jax.named_scope("encoder"):
            x = self._encoded(self.encoder, x, positions, valid, numbered(keys, 0))
        with jax.named_scope("decoder"):
            seen = (x + positions.astype(x.dtype), x, valid)
            queries = self.action_positions[...].astype(x.dtype)
            start = as_varied(jnp.zeros((len(x), *queries.shape), x.dtype), x)

            def layer(module: ActDecoderLayer, x: Array, number: Array) -> tuple[Array, None]:
                return module(x, queries, seen, numbered(numbered(keys, 1), number)), None

            depth = jnp.arange(self.config.n_decoder_layers)
            x, _ = scan_layers(self.decoder, layer, start, depth, remat=self.config.compute.remat)
            return self.action(self.decoder_norm(x))

    def reconstruct(
        self,
        observation: Observation,
        actions: Float[Array, "b h a"],
        action_mask: Bool[Array, "b h"],
        noise: Float[Array, "b z"],
        keys: RowKeys = None,
    ) -> tuple[Float[Array, "b h a"], tuple[Float[Array, "b z"], Float[Array, "b z"]] | None]:
        """The chunk for a latent that is drawn, with `noise`, from the posterior of `actions`; and that posterior.

        Without a variational encoder the latent is zero, and there is no posterior.
        """
        if not self.config.use_vae:
            return self.predict(observation, jnp.zeros_like(noise), keys), None
        mean, log_variance = self.posterior(observation, actions, action_mask, numbered(keys, 2))
        return self.predict(observation, mean + jnp.exp(log_variance / 2) * noise, keys), (mean, log_variance)

    def sample_actions(
        self, observation: Observation, noise: Float[Array, "b h a"], num_steps: int
    ) -> Float[Array, "b h a"]:
        """The chunk for the latent zero: nothing is drawn, and there are no denoising steps."""
        del num_steps
        return self.predict(observation, jnp.zeros((len(noise), self.config.latent_dim)))

    def _encoded(
        self,
        layers: ActEncoderLayer,
        x: Array,
        positions: Float[Array, "t d"],
        valid: Bool[Array, "b t"],
        keys: RowKeys,
    ) -> Float[Array, "b t d"]:
        """The tokens `x` after a stack of layers."""
        positions = positions.astype(x.dtype)

        def layer(module: ActEncoderLayer, x: Array, number: Array) -> tuple[Array, None]:
            return module(x, positions, valid, numbered(keys, number)), None

        depth = len(jax.tree.leaves(nnx.state(layers))[0])
        return scan_layers(layers, layer, x, jnp.arange(depth), remat=self.config.compute.remat)[0]

    def _tokens(
        self, observation: Observation, latent: Float[Array, "b z"]
    ) -> tuple[Float[Array, "b t d"], Float[Array, "t d"], Bool[Array, "b t"]]:
        """The encoder's tokens, their positions, and which count: latent, state, then the cameras, sorted by slot.

        Tokens of an absent camera do not count.
        """
        dtype, slots = self.config.compute.dtype, sorted(observation.images)
        tokens = [self.latent(latent)[:, None].astype(dtype), self.state(observation.state)[:, None].astype(dtype)]
        positions, valid = [self.token_positions[...]], [jnp.ones((len(latent), 2), bool)]
        if slots:
            images = jnp.stack([float_images(observation.images[slot]) for slot in slots], axis=1)
            maps = self.backbone.feature_map(self._normalized(images.reshape(-1, *images.shape[2:])))
            height, width = maps.shape[1:3]
            tokens.append(self.image(maps).reshape(len(latent), -1, self.config.dim_model))
            positions += [jnp.asarray(sine_grid(height, width, self.config.dim_model))] * len(slots)
            valid += [jnp.repeat(observation.image_masks[slot][:, None], height * width, axis=1) for slot in slots]
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(positions), jnp.concatenate(valid, axis=1)

    def _normalized(self, images: Float[Array, "n height width 3"]) -> Float[Array, "n height width 3"]:
        """Images in [-1, 1] as the backbone's published weights expect them."""
        return normalize_images(images, self.config.image_mean, self.config.image_std)


def sine_table(length: int, width: int) -> Float[np.ndarray, "t d"]:
    """Positions 0, 1, ... as sines (even dims) and cosines (odd dims), float32 (Vaswani et al. 2017, section 3.5)."""
    angles = np.arange(length)[:, None] / _periods(width)
    return _interleaved(angles).astype(np.float32)


def sine_grid(height: int, width: int, dims: int) -> Float[np.ndarray, "t d"]:
    """Positions of the cells of an image, row by row, float32: half of the dims for the row, half for the column.

    Rows and columns count from 1 and are scaled so that the last is at 2 pi, as in DETR (Carion et al. 2020).
    """
    rows, columns = (np.arange(1, count + 1) / (count + 1e-6) * 2 * np.pi for count in (height, width))
    halves = [_interleaved(part[:, None] / _periods(dims // 2)) for part in (rows, columns)]
    grid = [np.repeat(halves[0], width, axis=0), np.tile(halves[1], (height, 1))]
    return np.concatenate(grid, axis=1).astype(np.float32)


def _periods(dims: int) -> Float[np.ndarray, " d"]:
    return _LONGEST_PERIOD ** (2 * (np.arange(dims) // 2) / dims)


def _interleaved(angles: Float[np.ndarray, "t d"]) -> Float[np.ndarray, "t d"]:
    """Sines of even dims, cosines of odd dims."""
    return np.where(np.arange(angles.shape[-1]) % 2, np.cos(angles), np.sin(angles))
