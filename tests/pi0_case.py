"""A tiny pi0 with random parameters and inputs, for tests of it and of the families that are made of its parts."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from openpi_train.interop.openpi import parameter_shapes
from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.types import Observation

SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
SIZES = {"depth": 2, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LORA = {"lora_attention_rank": 3, "lora_mlp_rank": 2, "lora_alpha": 7.0}
TINY = Pi0Config(
    paligemma_variant="dummy",
    action_expert_variant="dummy",
    language=GemmaOverrides(width=16, **SIZES),
    action_expert=GemmaOverrides(width=12, **SIZES),
    siglip=SiglipConfig(width=8, depth=2, mlp_dim=16, num_heads=2, patch_size=8),
    image_size=16,
    vocab_size=40,
    action_dim=5,
    action_horizon=4,
    max_token_len=6,
    dtype="float32",
    remat="none",
)


def graph_of(config):
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0]


def built(config, seed=0):
    """The graph and parameters, every one of them random: zero-initialised ones would hide what they multiply.

    Drawn by numpy, which compiles nothing.
    """
    generator = np.random.default_rng(seed)
    params = {
        path: jnp.asarray(0.3 * generator.normal(size=shape), jnp.float32)
        for path, shape in parameter_shapes(config).items()
    }
    return graph_of(config), params


def observation(config, seed=0, slots=SLOTS):
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (3, 2, config.image_size, config.image_size, 3), np.uint8)
    tokens = generator.integers(0, config.vocab_size, (2, config.rows.text_limit))
    return Observation(
        images={slot: jnp.asarray(image) for slot, image in zip(SLOTS, pixels, strict=True) if slot in slots},
        image_masks={slot: jnp.ones(2, bool) for slot in slots},
        state=jnp.asarray(generator.normal(size=(2, config.action_dim)), jnp.float32),
        prompt_tokens=jnp.asarray(tokens, jnp.int32),
        prompt_mask=jnp.arange(config.rows.text_limit)[None] < jnp.array([[4], [6]]),
    )


def draws(config, num_draws, seed=1):
    generator = np.random.default_rng(seed)
    noisy = generator.normal(size=(2, num_draws, config.action_horizon, config.action_dim))
    return jnp.asarray(noisy, jnp.float32), jnp.asarray(generator.uniform(0.01, 1, (2, num_draws)), jnp.float32)


def product_flops(jaxpr):
    """Two per multiply-add of every `dot_general`, those in loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * np.prod(equation.outvars[0].aval.shape, dtype=float) * np.prod([left[i] for i in contracted])
        times = equation.params.get("length", 1)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            total += times * product_flops(inner) if hasattr(inner, "eqns") else 0
    return total


def draw_shapes(config, num_draws=1):
    """Shapes of what `draws` gives, for one row."""
    noisy = jax.ShapeDtypeStruct((1, num_draws, config.action_horizon, config.action_dim), jnp.float32)
    return noisy, jax.ShapeDtypeStruct((1, num_draws), jnp.float32)
