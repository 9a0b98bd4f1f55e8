"""Small runs on the embedded arithmetic task (`data/text/arithmetic.py`), written at first use: no download, no GPU.

Supervised training imitates demonstrations of which most forget the carry; the reward model, DPO and KTO start from its
result and learn from pairs of a right and a wrong answer. docs/howto/language_models.md has the commands in order.
"""

import dataclasses

from openpi_train.data.core import cache_folders
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.experiment import Experiment
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig
from openpi_train.objectives.judged_completions import JudgedCompletions
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule

_TASK = cache_folders.datasets() / "arithmetic"
_MODEL = LanguageConfig(
    # Wavelengths for texts of at most 11 tokens.
    sizes=DecoderSizes(
        vocab_size=16, width=64, depth=2, mlp_dim=256, num_heads=4, num_kv_heads=4, head_dim=16, rope_base=100.0
    ),
    context_length=64,
    dtype="float32",
    remat="none",
)

# All held-out problems, each answered four times: val/exact_match is the share of right answers.
_EVALUATIONS = TextEvaluations(
    interval=200,
    num_rows=1_100,
    num_prompts=1_100,
    samples=4,
    sampling=SamplingSettings(temperature=1.0, max_new_tokens=8),
    completions_per_device=256,
)

arithmetic_sft = Experiment(
    model=_MODEL,
    objective=SupervisedText(),
    data=TextData(
        datasets=(TextDataset(path=str(_TASK / "demonstrations"), validation="test"),),
        tokenizer=str(_TASK),
        max_length=16,
    ),
    lr_schedule=LRSchedule(warmup_steps=30, peak_lr=3e-3, decay_steps=800, decay_lr=1e-4),
    optimizer=AdamW(b2=0.98),
    ema_decay=None,
    batch_size=128,
    num_train_steps=800,
    num_workers=0,
    log_interval=50,
    save_interval=200,
    keep_period=None,
    eval=_EVALUATIONS,
)
"""A language model (0.13 M parameters) imitates the arithmetic task's demonstrations.

Command: python -m openpi_train arithmetic_sft --exp-name x
Hardware: 2 CPU cores. Time: 98 CPU s. Result: 51 % of 1,100 held-out problems, one sampled answer each (one seed;
2026-11-23, commit bff75c7, command `python -m benchmarks language`).
"""

_PAIRS = dataclasses.replace(
    arithmetic_sft.data,
    datasets=(TextDataset(path=str(_TASK / "preferences"), validation="test"),),
    kind="preferences",
)

arithmetic_reward = dataclasses.replace(
    arithmetic_sft,
    model=RewardConfig(language=_MODEL),
    objective=RewardPairs(centering=0.01),
    data=_PAIRS,
    lr_schedule=LRSchedule(warmup_steps=10, peak_lr=1e-3, decay_steps=300, decay_lr=1e-4),
    num_train_steps=300,
    log_interval=25,
    save_interval=100,
    eval=TextEvaluations(interval=100, num_rows=1_100),
)
"""A reward model learns to tell right from wrong answers, from the weights of arithmetic_sft.

Command: python -m openpi_train arithmetic_reward --exp-name x --weight-loader.params-path checkpoints/arithmetic_sft/x
Hardware: 2 CPU cores. Time: 54 CPU s. Result: the right answer has the higher reward in 93 % of 1,100 held-out pairs
(one seed; 2026-11-23, commit bff75c7, command `python -m benchmarks language`).
"""

arithmetic_dpo = dataclasses.replace(
    arithmetic_reward,
    model=ReferencedConfig(policy=_MODEL),
    objective=PreferencePairs(nll_weight=1.0),
    lr_schedule=LRSchedule(warmup_steps=0, peak_lr=2e-4, decay_steps=100, decay_lr=2e-4),
    num_train_steps=100,
    log_interval=10,
    save_interval=50,
    eval=dataclasses.replace(_EVALUATIONS, interval=50),
)
"""DPO with a likelihood term on the arithmetic task's pairs, from the weights of arithmetic_sft.

Command: python -m openpi_train arithmetic_dpo --exp-name x --weight-loader.params-path checkpoints/arithmetic_sft/x
Hardware: 2 CPU cores. Time: 26 CPU s. Result: 88 % of 1,100 held-out problems, from weights with 51 % (one seed;
2026-11-23, commit bff75c7, command `python -m benchmarks language`).
"""

arithmetic_dpo_lora = dataclasses.replace(
    arithmetic_dpo,
    model=dataclasses.replace(_MODEL, adapter=AdapterConfig(rank=8)),
    lr_schedule=LRSchedule(warmup_steps=0, peak_lr=2e-3, decay_steps=100, decay_lr=2e-3),
)
"""The same with low-rank adapters: only these train, and the reference is the model without them.

Command: python -m openpi_train arithmetic_dpo_lora --exp-name x  (start weights as for arithmetic_dpo)
Hardware: 2 CPU cores. Time and result: not yet measured.
"""

arithmetic_kto = dataclasses.replace(arithmetic_dpo, objective=JudgedCompletions())
"""KTO on the same answers, each judged by itself: the right ones are desirable, the wrong ones are not.

Labelled completions without a partner: --data.kind unpaired --data.datasets.0.path FILE.
Command: python -m openpi_train arithmetic_kto --exp-name x --weight-loader.params-path checkpoints/arithmetic_sft/x
Hardware: 2 CPU cores. Time: 40 CPU s. Result: 62 % of 1,100 held-out problems, from weights with 50 % (one seed;
2026-11-25, commit 57c2b36).
"""
