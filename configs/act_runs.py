"""ACT: action chunking with transformers on ALOHA's simulated tasks as LeRobot trains it, and on the embedded tabletop.

docs/understand/robot_policies.md compares fields and numbers.
"""

from openpi_train.data.core import cache_folders
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.tabletop_scene import Kind, Task
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.models.act import ActConfig
from openpi_train.objectives.conditional_vae import ConditionalVae
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.robots.aloha import Aloha
from openpi_train.robots.tabletop import Tabletop

_ALOHA = Aloha(cameras={"top": "observation/images/top"}, adapt_to_pi=False, relative=False)

act_aloha_sim = Experiment(
    model=ActConfig(),
    objective=ConditionalVae(),
    data=DataConfig(
        datasets=(Dataset(source=LeRobot(path="data/aloha_sim_transfer_cube_human"), robot=_ALOHA),),
        validation_fraction=0.04,
    ),
    # LeRobot's preset. Slower backbone: --optimizer.rate-mask ^backbone/ --optimizer.rate-factor 0.1
    lr_schedule=LRSchedule(kind="constant", warmup_steps=0, peak_lr=1e-5, decay_steps=None, decay_lr=1e-5),
    optimizer=AdamW(b1=0.9, b2=0.999, weight_decay=1e-4, clip_gradient_norm=10.0),
    ema_decay=None,
    batch_size=8,
    num_train_steps=100_000,
    save_interval=10_000,
    keep_period=None,
    eval=EvalConfig(interval=5_000, num_rows=64),
)
"""ACT as LeRobot trains it on ALOHA's simulated cube transfer: one camera of 480 x 640, 52 M parameters, chunks of 100.

Command: python -m openpi_train act_aloha_sim --exp-name x --weight-loader.params-path resnet18-f37072fd.pth
Hardware: one GPU. Time and result: not yet measured.
"""

_REACH_RED_HOME = cache_folders.datasets() / "tabletop_reach_red"

tabletop_act = Experiment(
    model=ActConfig(
        action_dim=7,
        action_horizon=8,
        cameras=("base_0_rgb", "left_wrist_0_rgb"),
        image_height=64,
        image_width=64,
        backbone_widths=(16, 32),
        dim_model=64,
        n_heads=4,
        dim_feedforward=128,
        n_encoder_layers=2,
        n_decoder_layers=1,
        n_vae_encoder_layers=1,
        latent_dim=8,
        dropout=0.0,
        dtype="float32",
    ),
    objective=ConditionalVae(),
    data=DataConfig(
        datasets=(Dataset(source=Rlds(path=str(_REACH_RED_HOME)), robot=Tabletop(), asset_id="tabletop_reach_red"),),
    ),
    lr_schedule=LRSchedule(warmup_steps=50, peak_lr=1e-3, decay_steps=2000, decay_lr=5e-5),
    ema_decay=0.99,
    batch_size=32,
    num_train_steps=2000,
    num_workers=0,
    log_interval=50,
    save_interval=500,
    keep_period=None,
    eval=EvalConfig(
        interval=500,
        num_rows=256,
        closed_loop=ClosedLoop(
            env=TabletopEnv(task_list=(Task(Kind.REACH, "red"),)), interval=500, episodes_per_task=100, execute=4
        ),
    ),
)
"""A small ACT on one tabletop task, to move to the red block; without start weights.

Command: python -m openpi_train tabletop_act --exp-name x
Hardware: 2 CPU cores. Time and result: not yet measured.
"""
