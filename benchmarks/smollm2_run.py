"""The experiment of `smollm2.py`, which gives the start weights, the tokenizer and the texts by flags."""

from benchmarks.language_speed import MODELS
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.experiment import Experiment
from openpi_train.models.language import LanguageConfig
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule

smollm2 = Experiment(
    model=LanguageConfig(sizes=MODELS["SmolLM2-135M"], context_length=8192, dtype="float32"),
    objective=SupervisedText(),
    data=TextData(datasets=(TextDataset(path="sums.jsonl"),), tokenizer="published", max_length=96),
    lr_schedule=LRSchedule(warmup_steps=2, peak_lr=1e-4, decay_steps=20, decay_lr=1e-5),
    optimizer=AdamW(),
    ema_decay=None,
    batch_size=4,
    num_train_steps=20,
    num_workers=0,
    log_interval=1,
    save_interval=20,
    keep_period=None,
)
"""SmolLM2-135M learns to answer sums in a fixed form.

Command: python -m benchmarks smollm2 --install-peer
Hardware: 2 CPU cores. Time and result: docs/understand/benchmarks.md
"""
