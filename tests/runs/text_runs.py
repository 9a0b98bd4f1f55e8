"""Small runs of language models: supervised, with an adapter, with pairs, of a reward model. Flags name the data."""

import dataclasses

from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.evaluation.measure import Evaluations
from openpi_train.experiment import Experiment
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import LRSchedule

_MODEL = LanguageConfig(
    sizes=DecoderSizes(vocab_size=16, width=8, depth=1, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8),
    dtype="float32", remat="none",
)  # fmt: skip

sft = Experiment(
    model=_MODEL, objective=SupervisedText(),
    data=TextData(datasets=(TextDataset(path="none"),), tokenizer="none", max_length=64, text_lengths=1),
    lr_schedule=LRSchedule(warmup_steps=1, peak_lr=1e-2, decay_steps=8, decay_lr=1e-2),
    eval=Evaluations(interval=8, num_rows=4), batch_size=4, num_train_steps=2, save_interval=2, log_interval=1,
    num_workers=0, ema_decay=None, keep_period=None, tensorboard=False,
)  # fmt: skip
"""Texts."""

lora = dataclasses.replace(sft, model=dataclasses.replace(_MODEL, adapter=AdapterConfig(rank=2, alpha=4.0)))
"""Texts, with an adapter."""

dpo = dataclasses.replace(
    sft, model=ReferencedConfig(policy=_MODEL), objective=PreferencePairs(),
    data=dataclasses.replace(sft.data, kind="preferences"),
)  # fmt: skip
"""Pairs, with a reference."""

reward = dataclasses.replace(dpo, model=RewardConfig(language=_MODEL), objective=RewardPairs())
"""Pairs, for a reward model."""
