"""pi0 and pi0.5 on BridgeData V2 (RLDS, about 60 000 episodes of a WidowX arm).

The dataset is searched in tensorflow-datasets' default folder; set another with --data.datasets.0.source.path.
Start weights: --weight-loader.params-path <openpi checkpoint>/params (none: all parameters are initialised randomly).
"""

import dataclasses

from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import Experiment
from openpi_train.models.pi0 import Pi0Config
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import LRSchedule
from openpi_train.robots.bridge import Bridge

_BRIDGE = Rlds(path="~/tensorflow_datasets/bridge_dataset", split="train")
# Poses relative to the chunk's start, 7 of 32 dims. Two arms (14 dims): --data.datasets.0.robot.num-arms 2
_TRAJECTORY = Bridge(trajectory=True)

pi0_bridge_traj = Experiment(
    model=Pi0Config(),
    objective=FlowMatching(),
    data=DataConfig(datasets=(Dataset(source=_BRIDGE, robot=_TRAJECTORY, asset_id="bridge_traj"),)),
    lr_schedule=LRSchedule(warmup_steps=1_000, peak_lr=2.5e-5, decay_steps=30_000, decay_lr=2.5e-6),
    batch_size=256,
    num_train_steps=30_000,
)
"""Full pi0 (3.2 B parameters) on BridgeData V2 trajectories: chunks of 50 poses relative to the current one.

Command: python -m openpi_train pi0_bridge_traj --exp-name x --fsdp-devices 8
Hardware: 66 GiB for state, gradients and bfloat16 copy; one 141 GB GPU, or several with --fsdp-devices.
Time: 0.32 s per step of 32 rows on one H200, 42.6 % MFU (2026-11-26, jax 0.11.2, commit 37bccb1,
command python -m benchmarks gpu_steps --sets pi0). Result: not yet measured.
"""

pi0_bridge_traj_lora = dataclasses.replace(
    pi0_bridge_traj,
    model=Pi0Config(paligemma_variant="gemma_2b_lora", action_expert_variant="gemma_300m_lora"),
    ema_decay=None,
    batch_size=32,
)
"""pi0 with low-rank adapters in both experts (468 M of 3.29 B parameters train), on BridgeData V2 trajectories.

Command: python -m openpi_train pi0_bridge_traj_lora --exp-name x --weight-loader.params-path pi0_base/params
Hardware: one GPU of 24 GB with --model.remat full, 48 GB or more without it.
Time: 0.27 s per step on one H200, 37.2 % MFU (2026-11-26, jax 0.11.2, commit 37bccb1,
command python -m benchmarks gpu_steps --sets lora). Result: not yet measured.
"""

pi05_bridge = Experiment(
    model=Pi0Config(pi05=True),
    objective=FlowMatching(),
    data=DataConfig(datasets=(Dataset(source=_BRIDGE, robot=Bridge(), asset_id="bridge"),)),
    lr_schedule=LRSchedule(warmup_steps=10_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5),
    ema_decay=0.999,
    batch_size=256,
    num_train_steps=30_000,
)
"""pi0.5 (3.4 B parameters, state in the prompt, quantile normalisation) on BridgeData V2's own pose deltas.

Command: python -m openpi_train pi05_bridge --exp-name x --fsdp-devices 8
Hardware: 69 GiB for state, gradients and bfloat16 copy. Time and result: not yet measured.
"""

pi05_bridge_lora = dataclasses.replace(
    pi05_bridge,
    model=Pi0Config(pi05=True, paligemma_variant="gemma_2b_lora", action_expert_variant="gemma_300m_lora"),
    ema_decay=None,
    batch_size=32,
)
"""pi0.5 with low-rank adapters in both experts, on BridgeData V2's own pose deltas.

Command: python -m openpi_train pi05_bridge_lora --exp-name x --weight-loader.params-path pi05_base/params
Hardware: one 48 GB GPU at a small batch. Time and result: not yet measured.
"""
