"""pi0-FAST, and pi0.5 with knowledge insulation, on BridgeData V2; and small versions on the embedded dataset.

A FAST processor turns action chunks into tokens: the published one comes from the Hugging Face hub, or from a copy of
its directory with --model.fast-tokenizer; that of the small runs is fitted by `data fit-fast`
(docs/understand/robot_policies.md).
"""

import dataclasses

from openpi_train.data.core import cache_folders
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.insulated_flow import InsulatedFlow
from openpi_train.objectives.next_token import NextToken
from openpi_train.optim import LRSchedule
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.tabletop import Tabletop

_BRIDGE = Rlds(path="~/tensorflow_datasets/bridge_dataset", split="train")
_DATA = DataConfig(datasets=(Dataset(source=_BRIDGE, robot=Bridge(), asset_id="bridge"),))

pi0_fast_bridge = Experiment(
    model=Pi0FastConfig(action_dim=7, action_horizon=10, max_token_len=180),
    objective=NextToken(),
    data=_DATA,
    lr_schedule=LRSchedule(warmup_steps=1_000, peak_lr=2.5e-5, decay_steps=30_000, decay_lr=2.5e-6),
    batch_size=256,
    num_train_steps=30_000,
)
"""pi0-FAST (2.9 B parameters) on BridgeData V2's own pose deltas, in chunks of 10, at openpi's sizes for LIBERO.

Command: python -m openpi_train pi0_fast_bridge --exp-name x --fsdp-devices 8
Start weights: --weight-loader.params-path <pi0_fast_base>/params.
Hardware: 60 GiB for state, gradients and bfloat16 copy. Time and result: not yet measured.
"""

pi0_fast_bridge_lora = dataclasses.replace(
    pi0_fast_bridge,
    model=dataclasses.replace(pi0_fast_bridge.model, paligemma_variant="gemma_2b_lora"),
    ema_decay=None,
    batch_size=32,
)
"""pi0-FAST with low-rank adapters in the language model (443 M of 2.95 B parameters train) on BridgeData V2.

Command: python -m openpi_train pi0_fast_bridge_lora --exp-name x --weight-loader.params-path pi0_fast_base/params
Hardware: one large GPU. Time and result: not yet measured.
"""

pi05_bridge_insulated = Experiment(
    model=Pi0Config(pi05=True, knowledge_insulation=True),
    objective=InsulatedFlow(),
    data=_DATA,
    lr_schedule=LRSchedule(warmup_steps=10_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5),
    ema_decay=0.999,
    batch_size=256,
    num_train_steps=30_000,
)
"""pi0.5 with knowledge insulation on BridgeData V2: the actions' gradient stays out of the language model.

Command: python -m openpi_train pi05_bridge_insulated --exp-name x --fsdp-devices 8
Hardware: as pi05_bridge. Time and result: not yet measured.
"""

_HOME = cache_folders.datasets() / "tabletop"
_FAST = cache_folders.datasets() / "tabletop_fast"
_LANGUAGE = GemmaOverrides(width=128, depth=4, mlp_dim=256)
_TOWER = SiglipConfig(width=128, depth=2, mlp_dim=256, num_heads=4, patch_size=16)

pi0_fast_tiny = Experiment(
    model=Pi0FastConfig(
        paligemma_variant="dummy",
        language=_LANGUAGE,
        siglip=_TOWER,
        image_size=64,
        action_dim=7,
        action_horizon=10,
        max_token_len=140,
        max_decoding_steps=80,
        camera_slots=("base_0_rgb", "left_wrist_0_rgb"),
        vocab_size=1024,
        fast_tokenizer=str(_FAST),
        dtype="float32",
        remat="dots",
    ),
    objective=NextToken(augment=False),
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
    eval=EvalConfig(interval=250, num_rows=64),
)
"""A small pi0-FAST on the embedded tabletop dataset.

Command: python -m openpi_train pi0_fast_tiny --exp-name x
Before: python -m openpi_train data fit-fast pi0_fast_tiny --vocab-size 384
Hardware: 2 CPU cores. Time and result: not yet measured.
"""

pi05_insulated_tiny = dataclasses.replace(
    pi0_fast_tiny,
    model=Pi0Config(
        pi05=True,
        knowledge_insulation=True,
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        language=_LANGUAGE,
        action_expert=_LANGUAGE,
        siglip=_TOWER,
        image_size=64,
        action_dim=7,
        action_horizon=10,
        max_token_len=140,
        vocab_size=1024,
        fast_tokenizer=str(_FAST),
        dtype="float32",
        remat="dots",
    ),
    objective=InsulatedFlow(flow=FlowMatching(num_flow_draws=4, augment=False)),
)
"""A small pi0.5 with knowledge insulation on the embedded tabletop dataset.

Command: python -m openpi_train pi05_insulated_tiny --exp-name x  (first fit the tokenizer as for pi0_fast_tiny)
Hardware: 2 CPU cores. Time and result: not yet measured.
"""
