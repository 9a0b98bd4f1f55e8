"""`eval` of a language model: the measures that a run makes while it trains, on any checkpoint and any texts.

All devices of all processes compute together, as in training. Read next: `evaluation/text_evaluations.py`.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from flax import nnx

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.command_line import EnvFlags, changed_flags
from openpi_train.data.core.files import write_json
from openpi_train.data.text.answer_scores import score_named
from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.evaluation.held_out_loss import HeldOutLoss
from openpi_train.evaluation.measure import Evaluated, EvaluationContext
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.interop.checkpoint_tokenizer import on_disk
from openpi_train.interop.stored_leaves import Stored
from openpi_train.models.language import huggingface
from openpi_train.models.language.accompanied import policy_of
from openpi_train.models.language.reward import SCORE, RewardConfig
from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.objective import Objective
from openpi_train.objectives.reward_pairs import RewardPairs
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.strategy import Plan
from openpi_train.policy.restore import open_run, restored
from openpi_train.policy.text_model import MAX_LENGTH, stored_dtype
from openpi_train.rl.text_rl import TextRL
from openpi_train.runtime.exits import DataError, UsageError
from openpi_train.tools.requests import EvaluateRequest, EvaluateTextRequest, given_fields
from openpi_train.training.metrics import json_number
from openpi_train.training.settling import open_in_turn

logger = logging.getLogger(__name__)

# Prompts to complete, if neither the run nor the flags say how many.
_NUM_PROMPTS = 64
# Flags of `eval` that language models have no use for.
_OF_POLICIES = (
    *(
        "dataset",
        "only",
        *(field.name for field in dataclasses.fields(EnvFlags)),
        "episodes",
        "held_out",
        "execute",
        "ensemble",
        "real_time_delay",
        "real_time_method",
        "real_time_guidance",
        "max_steps",
        "videos",
    ),
    *("num_sample_steps", "guidance"),
)
RESULTS = "texts.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint's model, as measures see a run's (`evaluation.measure.TrainerView`)."""

    graphdef: nnx.GraphDef
    model: ModelConfig
    objective: Objective
    plan: Plan
    seed: int

    @property
    def devices(self) -> Devices:
        """The computation over devices."""
        return Devices(self.plan, self.model.compute.dtype, self.graphdef)


def open_model(where: str, experiment: str | None) -> tuple[Stored, Experiment]:
    """A checkpoint and its run; of a folder in Hugging Face's form, a run without datasets (of pairs if it has scores).

    Raises CheckpointError or UsageError as `load_policy` does.
    """
    place = checkpoint_formats.open_place(where)
    if experiment is not None or not huggingface.recognises(place):
        return open_run(where, experiment)
    stored = checkpoint_formats.open_checkpoint(where)
    language = huggingface.read_model(place, dtype=stored_dtype(stored))
    is_reward = SCORE in stored.params
    data = TextData(
        datasets=(),
        tokenizer=str(place),
        kind="preferences" if is_reward else "texts",
        max_length=min(language.context_length, MAX_LENGTH),
        on_no_targets="drop",
        text_lengths=1,
    )
    model = RewardConfig(language=language) if is_reward else language
    objective = RewardPairs() if is_reward else SupervisedText()
    return stored, Experiment(model=model, objective=objective, data=data, eval=TextEvaluations())


def run(
    request: EvaluateRequest, texts: EvaluateTextRequest, stored: Stored, experiment: Experiment, folder: Path
) -> Path:
    """Evaluate the checkpoint of a language model; returns `folder`, with the results. Every process must call it.

    Raises UsageError or DataError for what cannot be evaluated.
    """
    if given := changed_flags(request, _OF_POLICIES):
        raise UsageError(f"{', '.join(given)}: for robots' policies, and {stored.where} is a language model")
    about_data = [f"--{name}" for name in ("split", "columns") if getattr(texts, name)]
    if about_data and request.data is None:
        raise UsageError(f"{' and '.join(about_data)}: there is no --data that it is about")
    assert isinstance(experiment.data, TextData)
    config = evaluations_of(request, texts, experiment)
    experiment = dataclasses.replace(
        experiment,
        data=data_of(request.data, texts, experiment.data, stored),
        # Rounded up to whole rows on every device.
        batch_size=-(-request.batch_size * jax.process_count() // jax.device_count()) * jax.device_count(),
    )
    try:
        data = open_in_turn(experiment)
    except DataError as error:
        raise DataError(in_flags_of_eval(str(error))) from error
    assert isinstance(data, OpenedText)
    if data.validation is None:
        raise DataError("the run holds no text out (--data.validation-fraction): give texts with --data")
    absent = _no_completions(texts, config, experiment.model, data)
    if absent is not None:
        config = dataclasses.replace(config, num_prompts=0)
    model, params, plan = restored(
        experiment.model,
        stored,
        request.checkpoint,
        average=request.average,
        dtype=None,
        merge_lora=False,
        devices=jax.devices(),
    )
    trainer = LoadedModel(
        graphdef=nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0],
        model=model,
        objective=experiment.objective,
        plan=plan,
        seed=experiment.seed,
    )
    with jax.set_mesh(plan.real_mesh):
        running = EvaluationContext(
            trainer=trainer,
            data=data,
            held_out=data.held_out(config.num_rows, experiment.batch_size, plan.batch),
            batch_size=experiment.batch_size,
            num_train_steps=experiment.num_train_steps,
            directory=folder,
            results=folder,
        )
        values = _measured(running, config, Evaluated(step=0, weights={"": params}, frozen={}))
    if jax.process_index() == 0:
        settings = {**as_json(dataclasses.replace(request, out=None)), "texts": as_json(texts), "eval": as_json(config)}
        told = {name: json_number(value) for name, value in values.items()}
        write_json(folder / RESULTS, {"checkpoint": stored.where, "values": told, "settings": settings})
        _say(values, {"perplexity": _no_perplexity(data), "completions": absent}, folder)
    return folder


def _measured(running: EvaluationContext, config: TextEvaluations, evaluated: Evaluated) -> dict[str, float]:
    values = {}
    # An objective of own rollouts has no loss on held-out texts; their perplexity is measured in any case.
    losses = [] if running.trainer.objective.learns_from_rollouts else [HeldOutLoss(running)]
    for measure in (*losses, *config.measures(running)):
        if measure.is_due(evaluated.step):
            found = measure(evaluated)
            logger.info("%s: %s", measure.name, measure.line(found))
            values |= {name.removeprefix("val/"): value for name, value in found.items()}
    return values


def _say(values: dict[str, float], absent: Mapping[str, str | None], folder: Path) -> None:
    width = max(map(len, values), default=0)
    for name, value in values.items():
        print(f"{name:<{width}}  {value:.4f}")
    for what, why in absent.items():
        if why is not None:
            print(f"{what}: {why}")
    print(f"written to {folder}")


def evaluations_of(request: EvaluateRequest, texts: EvaluateTextRequest, experiment: Experiment) -> TextEvaluations:
    """The run's evaluations with what the flags change. Raises UsageError for invalid ones."""
    own = experiment.eval if isinstance(experiment.eval, TextEvaluations) else TextEvaluations()
    num_prompts = texts.num_prompts if texts.num_prompts is not None else own.num_prompts or _NUM_PROMPTS
    sampled = given_fields(texts, "temperature", "top_k", "top_p", "max_new_tokens", "stop")
    if texts.scores is None and isinstance(experiment.rl, TextRL):
        own = dataclasses.replace(own, scores=(*own.scores, *_rewards_of(experiment.rl, own.scores)))
    config = dataclasses.replace(
        own,
        **given_fields(texts, "num_rows", "samples", "scores"),
        num_prompts=num_prompts,
        sampling=dataclasses.replace(own.sampling, **sampled, **given_fields(request, "seed")),
        num_written=num_prompts,
        completions_per_device=request.batch_size,
    )
    if problems := config.check():
        flags = [problem.replace("--eval.sampling.", "--").replace("--eval.", "--") for problem in problems]
        raise UsageError("\n".join(flags))
    if isinstance(experiment.rl, TextRL) and config.sampling.max_new_tokens != experiment.rl.max_new_tokens:
        logger.info(
            "completions have at most %d tokens here (--max-new-tokens), as in the run's evaluations, and %d in its "
            "rollouts",
            *(config.sampling.max_new_tokens, experiment.rl.max_new_tokens),
        )
    return config


def _rewards_of(rl: TextRL, known: Sequence[str]) -> list[str]:
    """The rewards of a run that scores can be, besides those `known`; the others are told."""
    found, names = [], {score_named(name).name for name in known}
    for name in dict.fromkeys(reward.name for reward in rl.rewards):
        try:
            score = score_named(name)
        except (ValueError, OSError, UsageError) as error:
            logger.warning("the run's reward %s is not measured here: %s", name, error)
            continue
        if score.name not in names:
            found.append(name)
            names.add(score.name)
    return found


def in_flags_of_eval(told: str) -> str:
    """A message about texts with the flags of `eval` in place of those of runs."""
    told = re.sub(r"train \S[^:;]*? on it, or name", "name", told)  # the model says the kind
    told = re.sub(r"--data\.datasets\.(?:N|\d+)\.(columns|split)", r"--\1", told)
    told = re.sub(r"--data\.datasets(?:\.(?:N|\d+)\.(?:path|validation))?(?![.\w-])", "--data", told)
    return told.replace("--data.targets", "--targets")


def _no_perplexity(data: OpenedText) -> str | None:
    """Why there is no perplexity; None if there is nothing to say of it."""
    return "the texts are prompts, without a completion to predict" if data.has_only_prompts else None


def _no_completions(
    texts: EvaluateTextRequest, config: TextEvaluations, model: ModelConfig, data: OpenedText
) -> str | None:
    """Why nothing is completed; None if something is. What was asked for by a flag is tried in any case."""
    if not config.num_prompts:
        return "left out by --num-prompts 0"
    if texts.num_prompts is not None:
        return None
    if policy_of(model) is None:
        return f"{type(model).__name__} gives no texts"
    if next(data.held_out_prompts(), None) is None:
        return "the texts have no prompts; --targets assistant makes some of conversations"
    return None


def data_of(data: str | None, texts: EvaluateTextRequest, own: TextData, stored: Stored) -> TextData:
    """The run's data, or those at `data`, with the tokenizer of the checkpoint. Raises UsageError without any."""
    if texts.targets is not None:
        own = dataclasses.replace(own, targets=texts.targets)
    if stored.token_files is not None:
        # The checkpoint has the run's chat template, too.
        own = dataclasses.replace(own, tokenizer=str(on_disk(stored.token_files)), chat_template=None)
    if data is None:
        if not own.datasets:
            raise UsageError(f"{stored.where} is no run's checkpoint, so it has no data: give texts with --data")
        return own
    # All its texts are held out.
    where = data if "://" in data or data.startswith("hub:") else str(Path(data).absolute())
    split = None if Path(where).is_file() else texts.split  # a single file has none
    dataset = TextDataset(path=where, split=split, validation=split or where, columns=texts.columns)
    return dataclasses.replace(own, datasets=(dataset,))
