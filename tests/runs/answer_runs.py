"""Tiny runs of language models that are evaluated while they train: on texts, and on preferences.

The files of their data are given by flags.
"""

from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.experiment import Experiment
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import LRSchedule

_model = LanguageConfig(
    sizes=DecoderSizes(
        vocab_size=400, width=32, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, tied=True
    ),
    context_length=64,
    dtype="float32",
    remat="none",
)
_data = {"datasets": (TextDataset(path="texts.jsonl"),), "tokenizer": "tokenizer", "max_length": 48}
_run = {
    "batch_size": 8, "num_train_steps": 4, "save_interval": 2, "log_interval": 1, "num_workers": 0,
    "lr_schedule": LRSchedule(warmup_steps=1, peak_lr=0.01, decay_steps=4, decay_lr=0.001),
}  # fmt: skip

answers = Experiment(
    model=_model,
    objective=SupervisedText(mean_over="sequences"),
    data=TextData(**_data, text_lengths=1, validation_fraction=0.2),
    eval=TextEvaluations(
        interval=2, num_rows=20, num_prompts=6, samples=4, scores=("number_match", "exact_match"), num_written=3,
        sampling=SamplingSettings(temperature=1.0, max_new_tokens=12), completions_per_device=4,
    ),
    ema_decay=0.5, **_run,
)  # fmt: skip
"""Sums and their results."""

pairs = Experiment(
    model=ReferencedConfig(policy=_model),
    objective=PreferencePairs(),
    data=TextData(**_data, kind="preferences", text_lengths=1, validation_fraction=0.2),
    eval=TextEvaluations(interval=0, num_rows=20, num_prompts=3, sampling=SamplingSettings(max_new_tokens=4)),
    ema_decay=None, **_run,
)  # fmt: skip
"""Right and wrong results."""
