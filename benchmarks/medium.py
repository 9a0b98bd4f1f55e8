"""The experiment of `--model medium`: the embedded tabletop data, and a model shaped like the full pi0."""

import dataclasses

from openpi_train_configs.tabletop_runs import pi0_bridge_traj_tiny

from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig

medium = dataclasses.replace(
    pi0_bridge_traj_tiny,
    model=Pi0Config(
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        language=GemmaOverrides(width=640, depth=12, mlp_dim=2560, num_heads=10, head_dim=64),
        action_expert=GemmaOverrides(width=256, depth=12, mlp_dim=1024, num_heads=10, head_dim=64),
        siglip=SiglipConfig(width=384, depth=12, mlp_dim=1536, num_heads=6, patch_size=16),
        vocab_size=4096,
        remat="dots",
    ),
)
"""About 100 M parameters: a wide language stack and a narrow action expert, as in the full pi0.

Command: python -m benchmarks step_time --model medium
Hardware: a GPU, or 2 CPU cores with --model.dtype float32 --batch-size 1. Time: minutes.
Result: docs/understand/benchmarks.md
"""
