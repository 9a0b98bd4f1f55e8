"""ACT as LeRobot recorded it (`interop/recorded/lerobot_act`): our config of the same sizes, its weights and inputs."""

import jax.numpy as jnp
from lerobot_recorded import Recorded

from openpi_train.models.act import ActConfig
from openpi_train.types import ActionBatch, Observation

RECORDED = Recorded("lerobot_act")
_SAME = ("dim_model", "n_heads", "dim_feedforward", "n_encoder_layers", "n_decoder_layers", "n_vae_encoder_layers")


def config(**changes) -> ActConfig:
    """The model of the recorded sizes."""
    sizes = RECORDED.facts["sizes"]
    fields = {
        "dtype": "float32",
        "remat": "none",
        "cameras": tuple(sizes["cameras"]),
        "image_height": sizes["height"],
        "image_width": sizes["width"],
        "backbone_widths": tuple(sizes["widths"]),
        "action_dim": sizes["action_dim"],
        "state_dim": sizes["state_dim"],
        "action_horizon": sizes["horizon"],
        "latent_dim": sizes["latent_dim"],
        **{name: sizes[name] for name in _SAME},
    }
    return ActConfig(**{**fields, **changes})


def batch() -> ActionBatch:
    """The recorded rows, which end after 6, 4 and 1 steps."""
    io, slots = RECORDED.arrays, RECORDED.facts["sizes"]["cameras"]
    rows = len(io["in/state"])
    return ActionBatch(
        observation=Observation(
            images={slot: jnp.asarray(io[f"in/image/{slot}"]) for slot in slots},
            image_masks={slot: jnp.ones(rows, bool) for slot in slots},
            state=jnp.asarray(io["in/state"]),
            prompt_tokens=jnp.zeros((rows, 0), jnp.int32),
            prompt_mask=jnp.zeros((rows, 0), bool),
        ),
        actions=jnp.asarray(io["in/actions"]),
        action_mask=jnp.asarray(io["in/action_mask"]),
        dim_mask=jnp.ones((rows, io["in/actions"].shape[-1]), bool),
        row=jnp.arange(rows, dtype=jnp.int32),
    )
