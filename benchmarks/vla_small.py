"""The VLA experiments of `configs/` in tiny sizes on synthetic data.

Read next: `vla_runs.py`, which trains them.
"""

import dataclasses
from typing import Any

from openpi_train import registry
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import Experiment
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.optim import LRSchedule
from openpi_train.robots.bridge import Bridge

_LAYERS = GemmaOverrides(width=32, depth=2, mlp_dim=64, num_heads=2, head_dim=8)
_SIZES = {
    "language": _LAYERS,
    "action_expert": _LAYERS,
    "head": _LAYERS,
    "siglip": SiglipConfig(width=16, depth=1, mlp_dim=32, num_heads=2, patch_size=16),
    "image_size": 32,
    "action_dim": 7,
    "action_horizon": 4,
    "max_token_len": 136,
    "max_decoding_steps": 16,
    "vocab_size": 800,
    "dtype": "float32",
    "remat": "none",
}


def _small(name: str, **changes: Any) -> Experiment:
    experiment = registry.load(name)
    fields = {field.name for field in dataclasses.fields(experiment.model)}
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, **{key: size for key, size in _SIZES.items() if key in fields}),
        data=DataConfig(
            datasets=(Dataset(source=FakeData(image_height=32, image_width=32), robot=Bridge(), asset_id="fake"),),
            tokenizer="bytes",
            validation_fraction=0,
        ),
        lr_schedule=LRSchedule(warmup_steps=5, peak_lr=3e-3, decay_steps=500, decay_lr=3e-4),
        batch_size=8,
        num_workers=0,
        log_interval=1,
        keep_period=None,
        **changes,
    )


pi0_bridge_traj = _small("pi0_bridge_traj")
pi0_bridge_traj_lora = _small("pi0_bridge_traj_lora")
pi0_expert_only = _small("pi0_bridge_traj", freeze="backbone")
pi05_bridge = _small("pi05_bridge")
pi05_bridge_lora = _small("pi05_bridge_lora")
pi05_bridge_insulated = _small("pi05_bridge_insulated")
pi0_fast_bridge = _small("pi0_fast_bridge")
pi0_fast_bridge_lora = _small("pi0_fast_bridge_lora")
paligemma_flow = _small("paligemma_flow")
paligemma_flow_lora = _small("paligemma_flow_lora")
paligemma_flow_head = _small("paligemma_flow_head")
paligemma_flow_frozen_tower = _small("paligemma_flow_frozen_tower")
paligemma_tokens = _small("paligemma_tokens")
paligemma_tokens_lora = _small("paligemma_tokens_lora")
