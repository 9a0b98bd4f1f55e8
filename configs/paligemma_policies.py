"""PaliGemma policies (docs/understand/robot_policies.md) on BridgeData V2: with a flow-matching head, and with actions
as tokens.

Start weights: --weight-loader.params-path <pt_224.npz, or a directory of google/paligemma-3b-pt-224> (none: random).
"""

import dataclasses

from openpi_train.data.core import cache_folders
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.models.paligemma import PaliGemmaFlowConfig
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.next_token import NextToken
from openpi_train.optim import LRSchedule
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.tabletop import Tabletop

_BRIDGE = Rlds(path="~/tensorflow_datasets/bridge_dataset", split="train")
_TABLETOP = cache_folders.datasets() / "tabletop"

paligemma_flow = Experiment(
    model=PaliGemmaFlowConfig(),
    objective=FlowMatching(num_flow_draws=4),
    data=DataConfig(datasets=(Dataset(source=_BRIDGE, robot=Bridge(), asset_id="bridge"),)),
    lr_schedule=LRSchedule(warmup_steps=1_000, peak_lr=2.5e-5, decay_steps=30_000, decay_lr=2.5e-6),
    batch_size=256,
    num_train_steps=30_000,
)
"""PaliGemma 3B at 224 pixels with a flow-matching head (3.4 B parameters, all of them trained) on BridgeData V2.

Command: python -m openpi_train paligemma_flow --exp-name x --weight-loader.params-path pt_224.npz
For 448 or 896 pixels: --model.image-size 448 and the checkpoint of that size.
Hardware: 69 GiB for state, gradients and bfloat16 copy. Time and result: not yet measured.
"""

paligemma_flow_lora = dataclasses.replace(
    paligemma_flow, model=PaliGemmaFlowConfig(paligemma_variant="gemma_2b_lora"), ema_decay=None, batch_size=32
)
"""The same with low-rank adapters in the language model: the backbone is frozen in bfloat16, adapters and head train.

Command: python -m openpi_train paligemma_flow_lora --exp-name x --weight-loader.params-path pt_224.npz
Hardware: 13 GiB for state, gradients and bfloat16 copy. Time and result: not yet measured.
"""

paligemma_flow_head = dataclasses.replace(paligemma_flow, freeze="backbone", ema_decay=None)
"""The head alone on a frozen PaliGemma: no backward pass in the backbone.

Command: python -m openpi_train paligemma_flow_head --exp-name x --weight-loader.params-path pt_224.npz
Hardware: 13 GiB for state, gradients and bfloat16 copy. Time and result: not yet measured.
"""

paligemma_flow_frozen_tower = dataclasses.replace(paligemma_flow, freeze="vision")
"""Language model and head on a frozen image tower.

Command: python -m openpi_train paligemma_flow_frozen_tower --exp-name x --weight-loader.params-path pt_224.npz
Hardware: one 141 GB GPU, or several with --fsdp-devices. Time and result: not yet measured.
"""

paligemma_tiny = Experiment(
    model=PaliGemmaFlowConfig(
        paligemma_variant="dummy",
        language=GemmaOverrides(width=64, depth=2, mlp_dim=128, num_heads=4),
        head_variant="dummy",
        head=GemmaOverrides(width=48, depth=2, mlp_dim=96, num_heads=4),
        siglip=SiglipConfig(width=32, depth=2, mlp_dim=64, num_heads=2, patch_size=16),
        image_size=64,
        action_dim=7,
        action_horizon=10,
        max_token_len=16,
        vocab_size=512,
        dtype="float32",
        remat="dots",
    ),
    objective=FlowMatching(num_flow_draws=4, augment=False),
    data=DataConfig(
        datasets=(Dataset(source=Rlds(path=str(_TABLETOP)), robot=Tabletop(), asset_id="tabletop"),),
        tokenizer=str(_TABLETOP / "tokenizer.model"),
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
"""A small PaliGemma with a flow head (0.3 M parameters) on the embedded tabletop dataset.

Command: python -m openpi_train paligemma_tiny --exp-name x
Hardware: 2 CPU cores. Time: 4 minutes beside other work. Result: held-out loss 3.24 to 0.577, open-loop action error
0.759 against 0.925 for the best constant (averaged weights; 2026-11-22, commit 850d35b).
"""

paligemma_tokens = dataclasses.replace(
    paligemma_flow,
    model=Pi0FastConfig(action_dim=7, action_horizon=10, max_token_len=180, camera_slots=("base_0_rgb",)),
    objective=NextToken(),
)
"""PaliGemma 3B (2.9 B parameters, all of them trained) that predicts actions as FAST tokens, on BridgeData V2.

Command: python -m openpi_train paligemma_tokens --exp-name x --weight-loader.params-path pt_224.npz
Hardware: 60 GiB for state, gradients and bfloat16 copy. Time and result: not yet measured.
"""

paligemma_tokens_lora = dataclasses.replace(
    paligemma_tokens,
    model=dataclasses.replace(paligemma_tokens.model, paligemma_variant="gemma_2b_lora"),
    freeze="vision",
    ema_decay=None,
    batch_size=32,
)
"""The same with low-rank adapters in the language model; only the adapters train.

Command: python -m openpi_train paligemma_tokens_lora --exp-name x --weight-loader.params-path pt_224.npz
Hardware: 6 GiB for state, gradients and bfloat16 copy. Time and result: not yet measured.
"""

paligemma_tokens_tiny = dataclasses.replace(
    paligemma_tiny,
    model=Pi0FastConfig(
        paligemma_variant="dummy",
        language=GemmaOverrides(width=64, depth=2, mlp_dim=128, num_heads=4),
        siglip=paligemma_tiny.model.siglip,
        image_size=64,
        action_dim=7,
        action_horizon=4,
        max_token_len=128,
        max_decoding_steps=64,
        camera_slots=("base_0_rgb", "left_wrist_0_rgb"),
        fast_tokenizer=str(cache_folders.datasets() / "tabletop_fast"),
        vocab_size=1280,
        dtype="float32",
        remat="dots",
    ),
    objective=NextToken(augment=False),
)
"""A small PaliGemma that predicts actions as FAST tokens, on the embedded tabletop dataset.

Command: python -m openpi_train paligemma_tokens_tiny --exp-name x
Before: data fit-fast paligemma_tokens_tiny --vocab-size 384
Hardware: 2 CPU cores. Time and result: not yet measured.
"""
