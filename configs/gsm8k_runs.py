"""Published language models on GSM8K: supervised training, reward models, DPO (also with adapters) and KTO.

Each experiment exists for the four models of `published_models.py`; --model.path names another. Another dataset of
TRL's types: --data.datasets.0.path PATH, with --data.datasets.0.columns for other names of columns, and --data.kind.
Learning rates are usual ones for these sizes, not tuned. docs/howto/language_models.md has the commands in order.
"""

import dataclasses

from openpi_train_configs.published_models import MODELS

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.experiment import Experiment
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.lora import AdapterConfig
from openpi_train.objectives.judged_completions import JudgedCompletions
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule

_PROBLEMS = (
    # The repository also has the same problems in another form, in the folder `socratic`.
    TextDataset(path="hub:openai/gsm8k/main", columns=("prompt=question", "completion=answer"), validation="test"),
)
# 7,043 pairs of a right and a wrong solution of training problems.
_PAIRS = (
    TextDataset(
        path="hub:reciprocate/gsm8k_train_pairwise", columns=("prompt=prompt", "chosen=selected", "rejected=rejected")
    ),
)
_ADAPTER = AdapterConfig(rank=16, alpha=32.0)
_EVALUATIONS = TextEvaluations(
    interval=250,
    num_rows=512,
    num_prompts=256,
    scores=("number_match",),
    sampling=SamplingSettings(temperature=0.0, max_new_tokens=320),
    completions_per_device=64,
)

gsm8k_sft_smollm2_135m, gsm8k_sft_qwen25_05b, gsm8k_sft_llama32_1b, gsm8k_sft_gemma3_1b = (
    Experiment(
        model=model,
        objective=SupervisedText(),
        data=TextData(datasets=_PROBLEMS, tokenizer=address, max_length=768),
        weight_loader=CheckpointWeightLoader(params_path=address),
        lr_schedule=LRSchedule(warmup_ratio=0.1, peak_lr=2e-5, decay_steps=None, decay_lr=0.0),
        optimizer=AdamW(b2=0.999, weight_decay=0.0),
        ema_decay=None,
        batch_size=32,
        num_epochs=3,
        log_interval=10,
        save_interval=250,
        keep_period=None,
        eval=_EVALUATIONS,
    )
    for model, address in MODELS
)
"""Supervised training on GSM8K's 7,473 problems and answers.

Command: python -m openpi_train NAME --exp-name x
Hardware: one GPU. Time and result: not yet measured.
"""

_SFT = (gsm8k_sft_smollm2_135m, gsm8k_sft_qwen25_05b, gsm8k_sft_llama32_1b, gsm8k_sft_gemma3_1b)

gsm8k_sft_lora_smollm2_135m, gsm8k_sft_lora_qwen25_05b, gsm8k_sft_lora_llama32_1b, gsm8k_sft_lora_gemma3_1b = (
    dataclasses.replace(
        sft,
        model=dataclasses.replace(model, adapter=_ADAPTER),
        lr_schedule=dataclasses.replace(sft.lr_schedule, peak_lr=2e-4),
    )
    for sft, (model, _) in zip(_SFT, MODELS, strict=True)
)
"""The same with low-rank adapters: only these train.

Command: python -m openpi_train NAME --exp-name x
Hardware: one GPU. Time and result: not yet measured.
"""

gsm8k_reward_smollm2_135m, gsm8k_reward_qwen25_05b, gsm8k_reward_llama32_1b, gsm8k_reward_gemma3_1b = (
    dataclasses.replace(
        sft,
        model=RewardConfig(language=model),
        objective=RewardPairs(centering=0.01),
        data=dataclasses.replace(sft.data, datasets=_PAIRS, kind="preferences"),
        lr_schedule=dataclasses.replace(sft.lr_schedule, peak_lr=1e-5),
        num_epochs=1,
        eval=TextEvaluations(interval=50, num_rows=256),
    )
    for sft, (model, _) in zip(_SFT, MODELS, strict=True)
)
"""A reward model on 7,043 pairs of a right and a wrong solution of GSM8K's training problems.

Command: python -m openpi_train NAME --exp-name x
Start weights: the published ones, or a run's with --weight-loader.params-path.
Hardware: one GPU. Time and result: not yet measured.
"""

gsm8k_dpo_smollm2_135m, gsm8k_dpo_qwen25_05b, gsm8k_dpo_llama32_1b, gsm8k_dpo_gemma3_1b = (
    dataclasses.replace(
        sft,
        model=ReferencedConfig(policy=model),
        # Without the likelihood of the chosen solutions, DPO can lower that of both.
        objective=PreferencePairs(nll_weight=1.0),
        data=dataclasses.replace(sft.data, datasets=_PAIRS, kind="preferences"),
        lr_schedule=dataclasses.replace(sft.lr_schedule, peak_lr=1e-6),
        num_epochs=1,
        eval=dataclasses.replace(_EVALUATIONS, interval=50, num_rows=256),
    )
    for sft, (model, _) in zip(_SFT, MODELS, strict=True)
)
"""DPO with a likelihood term on the same pairs; the reference is a frozen copy of the start weights.

Command: python -m openpi_train NAME --exp-name x --weight-loader.params-path <a run of gsm8k_sft>
Hardware: one GPU. Time and result: not yet measured.
"""

_DPO = (gsm8k_dpo_smollm2_135m, gsm8k_dpo_qwen25_05b, gsm8k_dpo_llama32_1b, gsm8k_dpo_gemma3_1b)

gsm8k_dpo_lora_smollm2_135m, gsm8k_dpo_lora_qwen25_05b, gsm8k_dpo_lora_llama32_1b, gsm8k_dpo_lora_gemma3_1b = (
    dataclasses.replace(
        dpo,
        model=dataclasses.replace(model, adapter=_ADAPTER),
        lr_schedule=dataclasses.replace(dpo.lr_schedule, peak_lr=2e-5),
    )
    for dpo, (model, _) in zip(_DPO, MODELS, strict=True)
)
"""The same with low-rank adapters: only these train, and the reference is the model without them.

Command: python -m openpi_train NAME --exp-name x --weight-loader.params-path <a run of gsm8k_sft>
Hardware: one GPU. Time and result: not yet measured.
"""

gsm8k_kto_smollm2_135m, gsm8k_kto_qwen25_05b, gsm8k_kto_llama32_1b, gsm8k_kto_gemma3_1b = (
    dataclasses.replace(dpo, objective=JudgedCompletions()) for dpo in _DPO
)
"""KTO on the same solutions, each judged by itself: the right ones are desirable, the wrong ones are not.

Labelled completions without a partner: --data.kind unpaired --data.datasets.0.path FILE --data.datasets.0.columns
Command: python -m openpi_train NAME --exp-name x --weight-loader.params-path <a run of gsm8k_sft>
Hardware: one GPU. Time and result: not yet measured.
"""
