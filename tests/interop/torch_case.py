"""A policy that LeRobot or openpi's PyTorch recorded (`recorded/`), as our config and inputs."""

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from openpi_train.checkpoints.checkpoint_formats import model_params, open_checkpoint
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.types import Observation

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
RECORDED = Path(__file__).resolve().parent / "recorded"


@dataclasses.dataclass(frozen=True)
class TorchCase:
    """`io` holds inputs and outputs of the original; `params` its parameters under our paths, as numpy arrays."""

    folder: Path
    config: Pi0Config | Pi0FastConfig
    params: dict[str, np.ndarray]
    observation: Observation
    io: dict[str, np.ndarray]

    def arrays(self) -> dict[str, jnp.ndarray]:
        return {path: jnp.asarray(value) for path, value in self.params.items()}


@functools.cache
def load_case(name: str) -> TorchCase:
    folder = RECORDED / name
    config = recorded_config(folder)
    with np.load(folder / "io.npz") as file:
        io = dict(file)
    cameras = [key.removeprefix("in/image/") for key in io if key.startswith("in/image/")]
    observation = Observation(
        images={camera: jnp.asarray(io[f"in/image/{camera}"]) for camera in cameras},
        image_masks={camera: jnp.asarray(io[f"in/image_mask/{camera}"]) for camera in cameras},
        state=jnp.asarray(io["in/state"]),
        prompt_tokens=jnp.asarray(io["in/tokens"]),
        prompt_mask=jnp.asarray(io["in/token_mask"]),
    )
    leaves = model_params(open_checkpoint(folder, config), config)
    return TorchCase(folder, config, {path: leaf.whole() for path, leaf in leaves.items()}, observation, io)


def recorded_config(folder: Path) -> Pi0Config | Pi0FastConfig:
    recorded = json.loads((folder / "recorded.json").read_text())
    sizes, tower = recorded["sizes"], recorded["sizes"]["tower"]
    fields = {
        "dtype": "float32",
        "remat": "none",
        "action_dim": sizes["action_dim"],
        "action_horizon": sizes["horizon"],
        "max_token_len": sizes["prompt"],
        "vocab_size": sizes["vocab"],
        "image_size": sizes["image"],
        "paligemma_variant": "gemma_2b",
        "language": GemmaOverrides(**sizes["language"]),
        "siglip": SiglipConfig(
            width=tower["hidden_size"],
            depth=tower["num_hidden_layers"],
            mlp_dim=tower["intermediate_size"],
            num_heads=tower["num_attention_heads"],
            patch_size=sizes["patch"],
        ),
    }
    if recorded["type"] == "pi0_fast":
        return Pi0FastConfig(**{**fields, "max_token_len": sizes["prompt"] + 6, "camera_slots": CAMERAS})
    return Pi0Config(
        **fields,
        pi05=recorded["type"] == "pi05",
        action_expert_variant="gemma_300m",
        action_expert=GemmaOverrides(**sizes["action"]),
    )
