"""openpi's experiments on ALOHA and UR5, by their names and with their values (openpi at 15a9616).

Those without data of their own serve openpi's published checkpoints, and train on --data.repo-id (docs/from/openpi.md).
Norm stats `trossen` and `ur5e` are those of the base models, where openpi downloads them to. The UR5's is in openpi's
`examples/ur5`.
"""

import dataclasses

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.core import cache_folders
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import Experiment
from openpi_train.models.pi0 import Pi0Config
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.robots.aloha import Aloha
from openpi_train.robots.ur5 import UR5

_PEN = LeRobot(path=cache_folders.lerobot("physical-intelligence/aloha_pen_uncap_diverse"))
_SIM = LeRobot(path=cache_folders.lerobot("lerobot/aloha_sim_transfer_cube_human"))
_ANY = Dataset(source=LeRobot(path=cache_folders.lerobot("YOU/YOUR_DATASET")), robot=Aloha(), asset_id="trossen")
_UNCAP = dataclasses.replace(
    _ANY, source=_PEN, norm_stats=cache_folders.openpi_assets("pi0_base", "trossen"), prompt="uncap the pen"
)

pi0_aloha = Experiment(model=Pi0Config(), objective=FlowMatching(), data=DataConfig(datasets=(_ANY,)))
"""pi0 on ALOHA, for serving: openpi's `pi0_aloha`.

Command: python -m openpi_train pi0_aloha --exp-name x --data.repo-id YOU/YOUR_DATASET
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""

pi05_aloha = dataclasses.replace(pi0_aloha, model=Pi0Config(pi05=True))
"""pi0.5 on ALOHA, for serving: openpi's `pi05_aloha`.

Command: python -m openpi_train pi05_aloha --exp-name x --data.repo-id YOU/YOUR_DATASET
Hardware: as pi05_bridge. Time and result: not yet measured.
"""

pi0_aloha_towel = dataclasses.replace(
    pi0_aloha, data=DataConfig(datasets=(dataclasses.replace(_ANY, prompt="fold the towel"),))
)
"""pi0 that folds towels, for serving: openpi's `pi0_aloha_towel`.

Command: python -m openpi_train pi0_aloha_towel --exp-name x --data.repo-id YOU/YOUR_DATASET
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""

pi0_aloha_tupperware = dataclasses.replace(
    pi0_aloha,
    data=DataConfig(datasets=(dataclasses.replace(_ANY, prompt="open the tupperware and put the food on the plate"),)),
)
"""pi0 that opens food boxes, for serving: openpi's `pi0_aloha_tupperware`.

Command: python -m openpi_train pi0_aloha_tupperware --exp-name x --data.repo-id YOU/YOUR_DATASET
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""

pi0_aloha_pen_uncap = Experiment(
    model=Pi0Config(),
    objective=FlowMatching(),
    data=DataConfig(datasets=(_UNCAP,)),
    weight_loader=CheckpointWeightLoader(params_path="gs://openpi-assets/checkpoints/pi0_base/params"),
    num_train_steps=20_000,
)
"""pi0 on demonstrations of uncapping pens, with the base model's norm stats: openpi's `pi0_aloha_pen_uncap`.

Command: python -m openpi_train pi0_aloha_pen_uncap --exp-name x
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""

pi05_aloha_pen_uncap = dataclasses.replace(
    pi0_aloha_pen_uncap,
    model=Pi0Config(pi05=True),
    data=DataConfig(
        datasets=(dataclasses.replace(_UNCAP, norm_stats=cache_folders.openpi_assets("pi05_base", "trossen")),)
    ),
    weight_loader=CheckpointWeightLoader(params_path="gs://openpi-assets/checkpoints/pi05_base/params"),
    batch_size=64,
)
"""pi0.5 on demonstrations of uncapping pens: openpi's `pi05_aloha_pen_uncap`.

Command: python -m openpi_train pi05_aloha_pen_uncap --exp-name x
Hardware: as pi05_bridge. Time and result: not yet measured.
"""

_TOP = Aloha(cameras={"base_0_rgb": "observation/images/top"}, relative=False)
_TRANSFER = Dataset(source=_SIM, robot=_TOP, asset_id="lerobot/aloha_sim_transfer_cube_human", prompt="Transfer cube")

pi0_aloha_sim = dataclasses.replace(pi0_aloha_pen_uncap, data=DataConfig(datasets=(_TRANSFER,)))
"""pi0 on the simulated ALOHA's cube transfer: openpi's `pi0_aloha_sim`.

Command: python -m openpi_train pi0_aloha_sim --exp-name x
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""

_UR5 = Dataset(
    source=_ANY.source,
    robot=UR5(cameras={"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"}),
    asset_id="ur5e",
    norm_stats=cache_folders.openpi_assets("pi0_base", "ur5e"),
)

pi0_ur5 = dataclasses.replace(pi0_aloha_pen_uncap, data=DataConfig(datasets=(_UR5,)), num_train_steps=30_000)
"""pi0 on a UR5's demonstrations: `pi0_ur5` of openpi's example.

Command: python -m openpi_train pi0_ur5 --exp-name x --data.repo-id YOU/YOUR_DATASET
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""
