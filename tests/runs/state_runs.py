"""A tiny diffusion policy from states, on made-up data, which acts in a world without cameras."""

import dataclasses

from acting_runs import Drift

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import Dataset
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.experiment import EvalConfig
from openpi_train.models.diffusion_policy.diffusion_policy import MlpSizes
from openpi_train.registry import load
from openpi_train.robots.bridge import Bridge

_full = load("metaworld_mt5_dp")
_data, _world = FakeData(), Drift()
states = dataclasses.replace(
    _full,
    model=dataclasses.replace(
        _full.model,
        action_dim=7,
        state_dim=7,
        mlp=MlpSizes(width=32, depth=1),
        diffusion_step_embed_dim=8,
        instructions=(*_data.prompts, *map(_world.instruction, range(2))),
    ),
    data=dataclasses.replace(
        _full.data,
        datasets=(Dataset(source=_data, robot=Bridge(cameras={}), asset_id="fake"),),
        validation_fraction=0.0,
    ),
    lr_schedule=dataclasses.replace(_full.lr_schedule, warmup_steps=10),
    batch_size=32,
    num_train_steps=400,
    save_interval=100,
    log_interval=30,
    eval=EvalConfig(interval=0, num_sample_steps=2, closed_loop=ClosedLoop(env=_world, episodes_per_task=2)),
)
"""Trains in seconds."""
