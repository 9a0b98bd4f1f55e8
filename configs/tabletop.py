"""Small runs on the embedded tabletop dataset, which `data prepare` writes: no download, no GPU."""

from openpi_train.data import places
from openpi_train.data.config import DataConfig, Dataset
from openpi_train.data.rlds import Rlds
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import LRSchedule
from openpi_train.robots.tabletop import Tabletop

_HOME = places.datasets() / "tabletop"
_EXPERT = GemmaOverrides(width=128, depth=4, mlp_dim=256)

pi0_bridge_traj_tiny = Experiment(
    model=Pi0Config(
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        language=_EXPERT,
        action_expert=_EXPERT,
        siglip=SiglipConfig(width=128, depth=2, mlp_dim=256, num_heads=4, patch_size=16),
        image_size=64,
        action_dim=7,
        action_horizon=10,
        max_token_len=16,
        vocab_size=512,
        dtype="float32",
        remat="dots",  # also the fastest on a CPU (docs/benchmarks.md)
    ),
    objective=FlowMatching(num_flow_draws=4, augment=False),
    data=DataConfig(
        datasets=(Dataset(source=Rlds(path=str(_HOME)), robot=Tabletop(), asset_id="tabletop"),),
        tokenizer=str(_HOME / "tokenizer.model"),
    ),
    lr_schedule=LRSchedule(warmup_steps=20, peak_lr=3e-3, decay_steps=500, decay_lr=3e-4),
    ema_decay=0.98,
    batch_size=32,
    num_train_steps=500,
    num_workers=0,
    log_interval=25,
    save_interval=250,
    keep_period=None,
    eval=EvalConfig(interval=250, num_rows=256),
)
"""A small pi0 (about 1 M parameters, two cameras) on the embedded tabletop dataset; what `make train` runs.

Command: python -m openpi_train pi0_bridge_traj_tiny --exp-name x  (after: python -m openpi_train data prepare)
Hardware: 2 CPU cores. Time: 4 minutes on 2 processes. Result: held-out loss 2.70 to 0.445, open-loop action error
0.708 against 0.875 for the best constant (averaged weights; 2026-11-21, 2 cores, commit 9d6ca32, `make train`).
"""
