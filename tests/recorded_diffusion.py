"""A recorded diffusion policy of another project's, computed by ours: its sizes, rows, loss and chunk."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from openpi_train.checkpoints.checkpoint_formats import model_params
from openpi_train.interop.stored_leaves import Stored
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig
from openpi_train.models.diffusion_policy.denoisers import UnetSizes
from openpi_train.nn.augment import RandomCrop
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.parallel.params import merge_module
from openpi_train.types import ActionBatch, Observation


def config_of(sizes: Mapping[str, Any], **fields: Any) -> DiffusionPolicyConfig:
    """The model of these recorded sizes, with what the project's policies have otherwise."""
    return DiffusionPolicyConfig(
        action_dim=sizes["action_dim"],
        state_dim=sizes["state_dim"],
        action_horizon=sizes["horizon"],
        n_obs_steps=sizes["n_obs_steps"],
        n_action_steps=sizes["n_action_steps"],
        encoder_widths=tuple(sizes["widths"]),
        unet=UnetSizes(
            widths=tuple(sizes["down_dims"]), kernel_size=sizes["kernel_size"], num_groups=sizes["n_groups"]
        ),
        diffusion_step_embed_dim=sizes["diffusion_step_embed_dim"],
        **fields,
    )


def objective_of(sizes: Mapping[str, Any]) -> Diffusion:
    """The objective with the recorded crop and sampler."""
    height, width = sizes["crop"]
    return Diffusion(sampler="ddim", augmentation=RandomCrop(height=height, width=width))


def batch_of(images: Mapping[str, np.ndarray], state: np.ndarray, actions: np.ndarray) -> ActionBatch:
    """Normalised rows that all count, without prompts."""
    rows = len(state)
    return ActionBatch(
        observation=Observation(
            images={slot: jnp.asarray(image) for slot, image in images.items()},
            image_masks={slot: jnp.ones(rows, bool) for slot in images},
            state=jnp.asarray(state),
            prompt_tokens=jnp.zeros((rows, 0), jnp.int32),
            prompt_mask=jnp.zeros((rows, 0), bool),
        ),
        actions=jnp.asarray(actions),
        action_mask=jnp.ones(actions.shape[:2], bool),
        dim_mask=jnp.ones((rows, actions.shape[2]), bool),
        row=jnp.arange(rows, dtype=jnp.int32),
    )


def computed(
    stored: Stored, config: DiffusionPolicyConfig, sizes: Mapping[str, Any], batch: ActionBatch, io: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Loss and chunk from the recorded noise, by the weights that were read. The evaluation's crop is in the centre."""
    params = {path: jnp.asarray(leaf.whole(), jnp.float32) for path, leaf in model_params(stored, config).items()}
    graphdef = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0]
    objective = objective_of(sizes)

    @jax.jit
    def compute(params, batch, noise, step, start):
        model = merge_module(graphdef, params)
        seen = dataclasses.replace(batch, observation=objective.augmentation(batch.observation, None))
        loss, _ = objective.loss_at(model, seen, objective.norms(batch), noise, step)
        return loss, objective.action_sampler.sample(model, batch.observation, start, None, sizes["num_steps"])

    noise, step = io["in/noise"][:, None], io["in/step"].astype(np.int32)[:, None]
    loss, chunk = compute(params, batch, noise, step, io["in/start"])
    return np.asarray(loss), np.asarray(chunk)
