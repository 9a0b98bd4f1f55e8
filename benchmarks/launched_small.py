"""A tiny policy from states on synthetic data: what `--quick` runs under `launch local`, where no time is measured.

Its programs compile in a tenth of the time of `debug`'s. Read next: `launched.py`.
"""

import dataclasses

from openpi_train import registry
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.models.diffusion_policy.diffusion_policy import DiffusionPolicyConfig, MlpSizes
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.robots.bridge import Bridge

_DATA = FakeData()

small = dataclasses.replace(
    registry.load("debug"),
    model=DiffusionPolicyConfig(
        action_dim=7,
        n_obs_steps=1,
        cameras=(),
        instructions=_DATA.prompts,
        denoiser="mlp",
        mlp=MlpSizes(width=32, depth=1),
        diffusion_step_embed_dim=8,
    ),
    objective=FlowMatching(augment=False),
    data=DataConfig(datasets=(Dataset(source=_DATA, robot=Bridge(cameras={}), asset_id="fake"),)),
)
