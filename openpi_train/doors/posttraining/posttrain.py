"""The `posttrain` verb: an experiment on a language model from a YAML config of the PyTorch post-training tool.

Values for absent keys are those of the tool's own example: 3 epochs, 4 rows per device, AdamW at 5e-5 falling linearly
to 0, float32. Read next: `training_flags.py`, `posttrain_rl.py` for ppo and grpo.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.core.hub import SCHEME, hub_folder
from openpi_train.data.text.text_data import RowKind, TextData
from openpi_train.doors.config_file import not_replaced
from openpi_train.doors.door_requests import PosttrainRequest
from openpi_train.doors.own_checkpoint import going_on
from openpi_train.doors.posttraining.posttrain_rl import with_rl
from openpi_train.doors.posttraining.prompt_files import PROMPTS, prompt_datasets
from openpi_train.doors.posttraining.reward_keys import NoRewardError
from openpi_train.doors.posttraining.text_sources import NoSourcesError, shares
from openpi_train.doors.posttraining.training_flags import (
    DEFAULT_OUTPUT,
    DEFAULT_ROWS,
    DEFAULT_SAVE,
    KEYS,
    TranslatedConfig,
    translate_config,
)
from openpi_train.doors.posttraining.yaml_config import RL_ALGORITHMS, Algorithm
from openpi_train.doors.yaml_file import read_yaml
from openpi_train.evaluation.measure import Evaluations
from openpi_train.experiment import Experiment
from openpi_train.interop import native_format
from openpi_train.interop.checkpoint_tokenizer import on_disk
from openpi_train.interop.openpi import parameter_shapes
from openpi_train.interop.place import Place
from openpi_train.json_object import JsonObject
from openpi_train.models.language import LanguageConfig, huggingface
from openpi_train.models.language.accompanied import policy_of
from openpi_train.models.language.actor_critic import ActorCriticConfig
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.objective import Objective
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.objectives.preference_pairs import PreferencePairs
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.policy.experiment_json import experiment_of_run
from openpi_train.policy.text_model import MAX_LENGTH
from openpi_train.runtime.exits import CheckpointError, DataError, UsageError, reported_as
from openpi_train.tools.requests import given_fields
from openpi_train.training.documented_links import documented

logger = logging.getLogger(__name__)

_OBJECTIVES: Mapping[Algorithm, type[Objective]] = {
    "sft": SupervisedText,
    "rm": RewardPairs,
    "dpo": PreferencePairs,
    **dict.fromkeys(RL_ALGORITHMS, PolicyGradient),
}
# The parameters that decay: all but norms and biases, as in transformers' `Trainer.get_decay_parameter_names`.
DECAYING = r"^(?!.*(norm/|bias))"
# Columns of which an algorithm needs one.
_COLUMNS: Mapping[Algorithm, tuple[str, ...]] = {
    "sft": ("text", "messages", "conversations", "completion", "response"),
    "rm": ("chosen",),
    "dpo": ("chosen",),
    **dict.fromkeys(RL_ALGORITHMS, PROMPTS),
}
# Values of --algorithm.
_NAMES: Mapping[str, Algorithm] = {"sft": "sft", "rm": "rm", "reward": "rm", "dpo": "dpo", "ppo": "ppo", "grpo": "grpo"}
# Where the tool's guide says that they are.
_LINKS = {
    "{base}/{name}/logs/training.log": "logs/process_0.log",
    "{base}/{name}/checkpoints/latest": "latest",
}
# Flags of the config that one on the command line replaces, besides that of its own name.
_REPLACED = {
    "--num-train-steps": ("--num-epochs",),
    "--num-epochs": ("--num-train-steps",),
    "--batch-size": ("--no-keep-effective-batch-size",),
}


def experiment_of(request: PosttrainRequest, given: Sequence[str]) -> tuple[Experiment, list[str]]:
    """The experiment of a config, and flags that are still to be applied to it: the config's, then the `given` ones.

    Logs what became of every key. Reads the model's sizes and a record of each dataset. Raises RunError, saying what to
    do.
    """
    config = read_yaml(request.config)
    translated = translate_config(
        config, _algorithm(request, config), _replaced(request), name=Path(request.config).stem
    )
    translated = _by_rule(translated)
    translated.tell(request.config, KEYS)
    if translated.algorithm in RL_ALGORITHMS and not translated.rewards and request.mode == "train":
        raise NoRewardError(translated.algorithm)
    if translated.resumed is not None and not translated.resumed.is_dir() and request.mode == "train":
        raise UsageError(
            f"resume_from_checkpoint names this run, and there is no folder {translated.resumed} to continue from: "
            "correct output_dir, experiment_name or the algorithm, or give `true`, which starts a run that is not "
            "there yet"
        )
    documented(_LINKS)
    experiment, prefix = _built(translated)
    kept = not_replaced(translated.flags, given, _REPLACED)
    if "--batch-size" in {word.partition("=")[0].replace("_", "-") for word in (*given, *(flag[0] for flag in kept))}:
        # Rows of all devices, unless a flag says otherwise; the default are those of one.
        experiment = dataclasses.replace(experiment, keep_effective_batch_size=True)
    words = [word.replace("--model.", prefix, 1) for flag in kept for word in flag]
    return experiment, [*going_on(words, given), *given]


def _by_rule(translated: TranslatedConfig) -> TranslatedConfig:
    """With the tool's own choice in place of `distributed_strategy: rule`: below 1B parameters ddp, up to 7B ZeRO-2,
    above ZeRO-3. Reads the model's sizes.
    """
    asked = ("--sharding.strategy", "rule")
    if asked not in translated.flags:
        return translated
    num_parameters = sum(map(math.prod, parameter_shapes(_language_model(translated.model)[0]).values()))
    strategy = "replicated" if num_parameters < 1e9 else "zero2" if num_parameters <= 7e9 else "zero3"
    chosen = (asked[0], strategy)
    lines = (line.replace(" ".join(asked), " ".join(chosen)) for line in translated.lines)
    return dataclasses.replace(
        translated,
        flags=tuple(chosen if flag == asked else flag for flag in translated.flags),
        lines=(*lines, f"distributed_strategy is rule, and the model has {num_parameters:,} parameters"),
    )


def _built(translated: TranslatedConfig) -> tuple[Experiment, str]:
    """The experiment without its flags, and the prefix of the flags of its language model."""
    language, tokenizer = _language_model(translated.model)
    model, prefix = _model_around(language, translated)
    learns_from_rollouts = translated.algorithm in RL_ALGORITHMS
    kind: RowKind = "texts" if translated.algorithm == "sft" else "preferences"
    with reported_as(DataError):
        if learns_from_rollouts:
            kind, datasets = prompt_datasets(translated.sources)
        else:
            datasets = tuple(source.dataset() for source in translated.sources)
    if len(datasets) > 1:
        logger.info("%s", shares(datasets))
    holds_out = any(source.validation is not None for source in translated.sources)
    experiment = Experiment(
        name=translated.algorithm,
        model=model,
        objective=_OBJECTIVES[translated.algorithm](),
        data=TextData(
            datasets=datasets,
            tokenizer=tokenizer,
            kind=kind,
            max_length=min(MAX_LENGTH, language.context_length),
            validation_fraction=0.0,
        ),
        weight_loader=CheckpointWeightLoader(params_path=translated.model),
        lr_schedule=LRSchedule(
            kind="linear", warmup_steps=0, warmup_lr=0.0, peak_lr=5e-5, decay_steps=None, decay_lr=0.0
        ),
        optimizer=AdamW(b2=0.999, weight_decay=0.0, decay_mask=DECAYING),
        ema_decay=None,
        batch_size=DEFAULT_ROWS,
        keep_effective_batch_size=False,
        num_epochs=3,
        log_interval=10,
        save_interval=DEFAULT_SAVE,
        keep_period=None,
        keep_last=3,
        eval=Evaluations(interval=500 if holds_out else 0),
        checkpoint_base_dir=DEFAULT_OUTPUT,
    )
    return with_rl(experiment, translated) if learns_from_rollouts else experiment, prefix


def prepare_data(experiments: Sequence[Experiment]) -> None:
    """Encode the datasets of the experiments into the token cache, which runs read."""
    for experiment in experiments:
        opened = experiment.open_data()
        logger.info("%s: %d training samples are ready", experiment.name, opened.num_samples)


def algorithms_of(request: PosttrainRequest) -> tuple[Algorithm, ...]:
    """The algorithms of --mode data_process: the one that is given, or all whose datasets the config has.

    Several may share files. If these have what some of the algorithms need, it is those.
    """
    if request.algorithm is not None:
        return (_algorithm(request, {}),)
    config = read_yaml(request.config)
    found: dict[Algorithm, bool] = {}
    for algorithm in dict.fromkeys(_NAMES.values()):
        with contextlib.suppress(NoSourcesError), reported_as(DataError):
            translated = translate_config(config, algorithm, _replaced(request))
            found[algorithm] = _can_read(translated)
    if not found:
        raise NoSourcesError("sft")
    if not any(found.values()):
        return tuple(found)  # where it is read, it is said what is wrong
    if others := [algorithm for algorithm, is_read in found.items() if not is_read]:
        logger.info("not prepared for %s: no such columns in the files", ", ".join(others))
    return tuple(algorithm for algorithm, is_read in found.items() if is_read)


def _can_read(translated: TranslatedConfig) -> bool:
    """Whether the first record of every file has what the algorithm needs."""
    needed = _COLUMNS[translated.algorithm]
    records = (source.first(needed) for source in translated.sources)
    return all(any(record.get(name) is not None for name in needed) for record in records)


def _algorithm(request: PosttrainRequest, config: JsonObject) -> Algorithm:
    training = config.get("training", {})
    said = training.get("algorithm") if isinstance(training, Mapping) else None
    name = request.algorithm or said or config.get("algorithm")
    allowed = f"allowed: {', '.join(_NAMES)}"
    if name is None:
        logger.info("no algorithm is given: sft, as in the tool's guide; %s", allowed)
        return "sft"
    if name not in _NAMES:
        raise UsageError(f"--algorithm {name}: {allowed}")
    return _NAMES[name]


def _replaced(request: PosttrainRequest) -> dict[str, Any]:
    """The options that replace keys of the config."""
    found = given_fields(request, "output_dir", "experiment_name", "resume_from_checkpoint")
    if request.deepspeed_config is not None:
        found |= dict.fromkeys(("deepspeed.config_path", "deepspeed_config"), request.deepspeed_config)
    return found


def _language_model(where: str) -> tuple[LanguageConfig, str]:
    """The language model of a folder, a run or an address on the hub, and the place of its tokenizer. Reads no weights.

    Raises CheckpointError, UsageError.
    """
    if where.startswith(SCHEME):
        config = hub_folder(where, repo_type="model", patterns=[huggingface.CONFIG], raised=CheckpointError)
        return huggingface.read_model(Place.of(config)), where
    place = checkpoint_formats.open_place(where)
    if not native_format.recognises(place):
        return huggingface.read_model(place), where
    recorded, tokens = native_format.recorded_experiment(place)
    run = experiment_of_run(recorded, str(place)) if recorded else None
    found = policy_of(run.model) if run else None
    if found is None or tokens is None:
        raise UsageError(f"{where} is no language model of ours: name a run of sft or dpo")
    return found[0], str(on_disk(tokens))


def _model_around(language: LanguageConfig, translated: TranslatedConfig) -> tuple[ModelConfig, str]:
    """The model that the algorithm trains, and the prefix of the language model's flags in it. Raises UsageError."""
    language = dataclasses.replace(language, dtype="float32", remat="auto")
    algorithm, has_adapter = translated.algorithm, language.adapter.enabled
    if algorithm == "rm":
        return RewardConfig(language=language), "--model.language."
    if algorithm == "ppo":
        if has_adapter:
            raise UsageError(
                f"{translated.model} has an adapter, which a policy beside a critic cannot have: merge it (`convert "
                "--merge-lora`), or train with grpo"
            )
        return ActorCriticConfig(policy=language, with_reference=translated.with_reference), "--model.policy."
    # A policy with an adapter is its own reference, without it.
    if (algorithm == "dpo" or translated.with_reference) and not has_adapter:
        return ReferencedConfig(policy=language), "--model.policy."
    return language, "--model."
