"""Runs that need no dataset and no download, and take seconds."""

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.robots.bridge import Bridge

debug = Experiment(
    model=Pi0Config(
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        siglip=SiglipConfig(width=32, depth=2, mlp_dim=64, num_heads=2, patch_size=16),
        image_size=32,
        action_horizon=8,
        vocab_size=512,
        dtype="float32",
        remat="full",
    ),
    objective=FlowMatching(),
    data=DataConfig(
        datasets=(Dataset(source=FakeData(image_height=32, image_width=32), robot=Bridge(), asset_id="fake"),),
        tokenizer="bytes",
        text_lengths=1,  # one program to compile
    ),
    batch_size=8,
    num_train_steps=10,
    num_workers=0,
    log_interval=1,
    save_interval=5,
    eval=EvalConfig(interval=0, num_rows=8, num_sample_steps=2),
)
"""A tiny pi0 on synthetic data, to check that everything starts, saves and resumes.

Command: python -m openpi_train debug --exp-name x
Hardware: anything. Time: under a minute. Result: none; the data are noise.
"""
