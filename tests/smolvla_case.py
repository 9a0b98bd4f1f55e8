"""SmolVLA as LeRobot recorded it (`interop/recorded/lerobot_smolvla`): our config of the same sizes, and its inputs."""

import jax.numpy as jnp
import numpy as np
from lerobot_recorded import Recorded

from openpi_train.models.smolvla import SmolVlaConfig
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.types import ActionBatch, Observation

RECORDED = Recorded("lerobot_smolvla")


def config(**changes) -> SmolVlaConfig:
    """The model of the recorded sizes."""
    sizes = RECORDED.facts["sizes"]
    text, vision = sizes["text"], sizes["vision"]
    fields = {
        "dtype": "float32",
        "remat": "none",
        "image_size": sizes["image"],
        "siglip": SiglipConfig(
            width=vision["hidden_size"],
            depth=vision["num_hidden_layers"],
            mlp_dim=vision["intermediate_size"],
            num_heads=vision["num_attention_heads"],
            patch_size=vision["patch_size"],
        ),
        "pixel_shuffle": sizes["shuffle"],
        "num_vlm_layers": sizes["layers"],
        "width": text["hidden_size"],
        "mlp_dim": text["intermediate_size"],
        "num_heads": text["num_attention_heads"],
        "num_kv_heads": text["num_key_value_heads"],
        "head_dim": text["head_dim"],
        "expert_width_multiplier": sizes["multiplier"],
        "action_dim": sizes["padded_dim"],
        "action_horizon": sizes["horizon"],
        "max_token_len": sizes["tokens"],
        "vocab_size": sizes["vocab"],
    }
    return SmolVlaConfig(**{**fields, **changes})


def batch() -> ActionBatch:
    """The recorded rows: one lacks a camera; they end after 5, 3 and 1 steps; their prompts have 8, 3 and 5 tokens."""
    io, width = RECORDED.arrays, RECORDED.facts["sizes"]["padded_dim"]
    rows, dims = len(io["in/state"]), io["in/actions"].shape[-1]

    def padded(values: np.ndarray) -> jnp.ndarray:
        return jnp.asarray(np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])]))

    return ActionBatch(
        observation=Observation(
            images={slot: jnp.asarray(io[f"in/image/{slot}"]) for slot in RECORDED.facts["seen"]},
            image_masks={slot: jnp.asarray(io[f"in/image_mask/{slot}"]) for slot in RECORDED.facts["seen"]},
            state=padded(io["in/state"]),
            prompt_tokens=jnp.asarray(io["in/tokens"], jnp.int32),
            prompt_mask=jnp.asarray(io["in/token_mask"]),
        ),
        actions=padded(io["in/actions"]),
        action_mask=jnp.asarray(io["in/action_mask"]),
        dim_mask=jnp.broadcast_to(jnp.arange(width) < dims, (rows, width)),
        row=jnp.arange(rows, dtype=jnp.int32),
    )
