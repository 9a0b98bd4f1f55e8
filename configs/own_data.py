"""Your own data: robot policies on any LeRobot dataset, language models on any file of texts, with --dataset alone.

Policies take cameras, dims, state and rate from the dataset, and its actions as recorded (relative to the state:
--data.robot relative). Texts are JSON lines, parquet, a folder of them, or hub:USER/NAME, in the forms of TRL and
ShareGPT (docs/howto/text_data.md). Another language model: --model.path FOLDER or hub:USER/NAME.
Learning rates fall until the end of the run, however long that is, or are constant.
"""

import dataclasses

from openpi_train_configs import act_runs, gsm8k_runs, openpi_arms, published_rl, robot_dp, smolvla_runs

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.objectives.preference_pairs import PreferencePairs

act = dataclasses.replace(
    act_runs.act_aloha_sim,
    data=dataclasses.replace(act_runs.act_aloha_sim.data, datasets=(), validation_fraction=0.05),
)
"""ACT on your LeRobot dataset, or zarr store: any robot, any cameras; 52 M parameters, chunks of 100 actions.

Command: python -m openpi_train act --exp-name x --dataset FOLDER
Start weights of the backbone (ResNet-18): --weight-loader.params-path resnet18-f37072fd.pth; without, it trains, too.
Hardware: one GPU. Time and result: not yet measured.
"""

diffusion = dataclasses.replace(
    robot_dp.robot_dp_14,
    data=dataclasses.replace(robot_dp.robot_dp_14.data, datasets=(), validation_fraction=0.05),
    batch_size=64,
    num_epochs=None,
    num_train_steps=100_000,
)
"""A diffusion policy on your LeRobot dataset, or zarr store: any robot, any cameras; chunks of 8 actions.

Command: python -m openpi_train diffusion --exp-name x --dataset FOLDER
Hardware: one GPU. Time and result: not yet measured.
"""

pi0 = dataclasses.replace(
    openpi_arms.pi0_aloha_pen_uncap,
    lr_schedule=dataclasses.replace(openpi_arms.pi0_aloha_pen_uncap.lr_schedule, decay_steps=None),
    data=dataclasses.replace(openpi_arms.pi0_aloha_pen_uncap.data, datasets=()),
)
"""pi0 (3.2 B parameters) fine-tuned on your LeRobot dataset from openpi's base model.

Command: python -m openpi_train pi0 --exp-name x --dataset FOLDER
Start weights: openpi's bucket, or a copy with --weight-loader.params-path FOLDER. A trial without weights and GPU:
pi0_bridge_traj_tiny --dataset FOLDER --data.robot recorded --data.tokenizer bytes --model.max-token-len 64.
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""

pi05 = dataclasses.replace(
    openpi_arms.pi05_aloha_pen_uncap,
    lr_schedule=dataclasses.replace(openpi_arms.pi05_aloha_pen_uncap.lr_schedule, decay_steps=None),
    data=dataclasses.replace(openpi_arms.pi05_aloha_pen_uncap.data, datasets=()),
)
"""pi0.5 (3.4 B parameters) fine-tuned on your LeRobot dataset from openpi's base model.

Command: python -m openpi_train pi05 --exp-name x --dataset FOLDER
Start weights and a trial: as pi0. Hardware: as pi05_bridge. Time and result: not yet measured.
"""

_ADAPTERS = {"paligemma_variant": "gemma_2b_lora", "action_expert_variant": "gemma_300m_lora"}

pi0_lora = dataclasses.replace(pi0, model=dataclasses.replace(pi0.model, **_ADAPTERS), ema_decay=None, batch_size=32)
"""pi0 with low-rank adapters (0.5 B of 3.3 B parameters train) on your LeRobot dataset, for one GPU of 24 GB.

Command: python -m openpi_train pi0_lora --exp-name x --dataset FOLDER --grad-accum 16
Start weights and a trial: as pi0. Hardware: one GPU of 24 GB (larger ones: a smaller --grad-accum, as `plan` says).
Time and result: not yet measured.
"""

pi05_lora = dataclasses.replace(pi05, model=dataclasses.replace(pi05.model, **_ADAPTERS), ema_decay=None, batch_size=32)
"""pi0.5 with low-rank adapters (0.5 B of 3.4 B parameters train) on your LeRobot dataset, for one GPU of 24 GB.

Command: python -m openpi_train pi05_lora --exp-name x --dataset FOLDER --grad-accum 16
Start weights and a trial: as pi0. Hardware: one GPU of 24 GB (larger ones: a smaller --grad-accum, as `plan` says).
Time and result: not yet measured.
"""

smolvla = dataclasses.replace(
    smolvla_runs.smolvla_bridge,
    lr_schedule=dataclasses.replace(smolvla_runs.smolvla_bridge.lr_schedule, decay_steps=None),
    data=dataclasses.replace(smolvla_runs.smolvla_bridge.data, datasets=()),
    weight_loader=CheckpointWeightLoader(params_path="hub:lerobot/smolvla_base"),
)
"""SmolVLA (450 M parameters, of which 100 M train) fine-tuned on your LeRobot dataset from LeRobot's base model.

Command: python -m openpi_train smolvla --exp-name x --dataset FOLDER
Start weights: the hub, or a copy with --weight-loader.params-path FOLDER --data.tokenizer FOLDER.
Hardware: one GPU. Time and result: not yet measured.
"""

_SFT, _DPO = gsm8k_runs.gsm8k_sft_smollm2_135m, gsm8k_runs.gsm8k_dpo_smollm2_135m
_GRPO = published_rl.gsm8k_grpo_smollm2_135m
# Texts that do not fit are left out, with a warning.
_OWN = dataclasses.replace(_SFT.data, datasets=(), max_length=1024, on_no_targets="drop")

lm_sft = dataclasses.replace(_SFT, data=_OWN, eval=TextEvaluations(interval=250, num_rows=512))
"""Supervised fine-tuning of a language model, SmolLM2-135M, on your chats, prompts with completions, or plain texts.

Command: python -m openpi_train lm_sft --exp-name x --dataset chat.jsonl
Hardware: one GPU. Time and result: not yet measured.
"""

lm_dpo = dataclasses.replace(
    _DPO,
    objective=PreferencePairs(),
    data=dataclasses.replace(_OWN, kind="preferences"),
    eval=TextEvaluations(interval=50, num_rows=256),
)
"""DPO of a language model, SmolLM2-135M, on your pairs of a chosen and a rejected completion.

Command: python -m openpi_train lm_dpo --exp-name x --dataset pairs.jsonl
Start weights: the published ones, or a run's of lm_sft with --weight-loader.params-path.
Hardware: one GPU. Time and result: not yet measured.
"""

lm_grpo = dataclasses.replace(
    _GRPO,
    data=dataclasses.replace(_OWN, kind="prompts"),
    rl=dataclasses.replace(_GRPO.rl, rewards=()),
    lr_schedule=dataclasses.replace(_GRPO.lr_schedule, kind="constant", decay_steps=None),
    eval=TextEvaluations(interval=0),
)
"""GRPO of a language model, SmolLM2-135M, on your prompts, with a reward of yours (also one written for TRL).

Command: python -m openpi_train lm_grpo --exp-name x --dataset prompts.jsonl --reward rewards.py:FUNCTION
Start weights: the published ones, or a run's of lm_sft with --weight-loader.params-path.
Hardware: one GPU. Time and result: not yet measured.
"""
