"""Scores of completions: what is counted, over which completions, and what is written. The completions are given."""

import dataclasses
import itertools
import json

import chats
import jax.numpy as jnp
import pytest
from trainers import NoData, make_trainer, running_of

from openpi_train.data.core.interface import OpeningRequest
from openpi_train.data.text.text_data import TextData, TextDataset
from openpi_train.evaluation import text_evaluations
from openpi_train.evaluation.measure import Evaluated
from openpi_train.evaluation.text_evaluations import TextEvaluations
from openpi_train.generation.completion_text import NewText
from openpi_train.generation.generator import NewTokens
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.objectives.supervised_text import SupervisedText
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime.exits import UsageError

SIZES = DecoderSizes(vocab_size=400, width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8)
MODEL = LanguageConfig(sizes=SIZES, dtype="float32", context_length=64)
SAMPLED = SamplingSettings(temperature=1.0, max_new_tokens=8)
TEXTS = TextEvaluations(num_prompts=2, samples=4, sampling=SAMPLED, scores=("number_match", "exact_match"))
# Of the first prompt, whose reference is 4, and of the second, whose reference is 5.
ANSWERS = {
    "": [[" #### 4", " It is 4.", " 3", " 3"], ["none", " 5", " 6", "7"]],
    "_ema": [[" #### 4"] * 4, [" 5", " 5", " <b>5</b>", "6"]],
}


# Answers by the number that stands for parameters.
GIVEN = []


class Given:
    """A completer that gives these answers, a token for each word; a number of one word ends by itself."""

    def __init__(self, running, tokenizer, prompts, settings, *, samples, rows_per_device):
        self.prompts = sorted(prompts, key=lambda prompt: prompt.reference)
        assert samples == 4 and rows_per_device == 16 and settings == SAMPLED

    def __call__(self, params):
        answers = GIVEN[int(params["number"])]
        return [given(number, text) for number, text in enumerate(itertools.chain.from_iterable(answers))]


def given(number, text):
    words = text.split()
    reason = "stop" if len(words) == 1 else "length"
    tokens = NewTokens(id=number, tokens=[0] * len(words), log_probs=[], top=[], finish_reason=reason)
    return NewText(text=text, tokens=tokens, num_made=len(words))


def run_on(folder, records, kind="texts"):
    """A run with these records held out."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = TextData(
        datasets=(TextDataset(path=str(path), validation=str(path)),),
        tokenizer=str(chats.write(folder / "tokenizer")),
        cache_dir=str(folder / "index"),
        max_length=64,
        kind=kind,
    ).open(OpeningRequest(model=MODEL, seed=0, batch_size=4))
    plan = Plan(mesh=make_mesh(1), strategy="replicated")
    trainer, _ = make_trainer(MODEL, plan, AdamW(), LRSchedule(), objective=SupervisedText(), ema=None)
    return dataclasses.replace(running_of(trainer, ()), data=data, directory=folder)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A run with two held-out prompts."""
    records = [{"prompt": f"What is two plus {n}?", "completion": f" It is four.\n#### {n + 2}"} for n in (2, 3)]
    return run_on(tmp_path_factory.mktemp("texts"), records)


@pytest.fixture
def measure(running, monkeypatch):
    """The measure of these evaluations."""
    monkeypatch.setattr(text_evaluations, "Completer", Given)

    def make(config=TEXTS, **changes):
        (found,) = config.measures(dataclasses.replace(running, **changes))
        return found

    return make


def evaluated(answers):
    """Weights with which the completer gives these answers."""
    weights = {}
    for suffix, texts in answers.items():
        weights[suffix] = {"number": jnp.int32(len(GIVEN))}
        GIVEN.append(texts)
    return Evaluated(step=7, weights=weights, frozen={})


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_metric_counts_what_it_says(measure, running):
    values = measure()(evaluated(ANSWERS))
    assert values == pytest.approx(
        {
            "val/number_match": 3 / 8,
            "val/exact_match": 0,
            # Of pairs of completions without a right one there are 1 of 6 and 3 of 6.
            "val/pass@2": (5 / 6 + 3 / 6) / 2,
            "val/pass@4": 1,
            # As many say 4 as 3; 5, 6 and 7 are said once each.
            "val/maj@4": (1 / 2 + 1 / 3) / 2,
            "val/mean_length": (2 + 3 + 1 + 1 + 1 + 1 + 1 + 1) / 8,
            "val/fraction_ended": 6 / 8,
            "val/number_match_ema": 7 / 8,
            "val/exact_match_ema": 0,
            "val/pass@2_ema": 1,
            "val/pass@4_ema": 1,
            "val/maj@4_ema": 1,
            "val/mean_length_ema": 12 / 8,
            "val/fraction_ended_ema": 4 / 8,
        }
    )
    line = measure().change(values, {**values, "val/number_match_ema": 1.0})
    assert line.startswith("completions of held-out prompts, averaged weights: number_match 0.875 before, 1.000 after")


def test_nothing_is_compared_with_a_reference_that_is_not_there(measure, tmp_path, caplog):
    """An empty completion is no exact match of a missing reference, and no loss is one of prompts without targets."""
    (tmp_path / "own.py").write_text("def longer(prompt, completion, reference):\n    return len(completion) > 2\n")
    run = run_on(tmp_path, [{"prompt": f"What is two plus {n}?"} for n in (2, 3)], kind="prompts")
    assert run.data.has_only_prompts
    rows = run.data.held_out(8, 8, run.trainer.plan.batch)
    config = dataclasses.replace(TEXTS, scores=("exact_match", f"{tmp_path}/own.py:longer"))
    with caplog.at_level("INFO"):
        found = measure(config, data=run.data, held_out=rows, directory=tmp_path)
    values = found(evaluated({"": [["", "", " 3", " 3 4"], ["", "", "", ""]]}))
    assert "completions: no exact_match, since the held-out prompts have no reference" in caplog.text
    assert values["val/longer"] == 1 / 8 and values["val/pass@4"] == 1 / 2 and "val/exact_match" not in values
    assert "val/maj@4" not in values  # nothing is known of what the answers of a function have in common


def test_completions_of_the_averaged_weights_are_written_and_replaced(measure, running):
    path = running.directory / "eval" / "7" / "samples.jsonl"
    for _ in range(2):
        measure()(evaluated(ANSWERS))
        first, second = lines(path)
    assert (first["prompt"], first["reference"]) == ("<s>What is two plus 2?", " It is four.\n#### 4")
    assert first["place"] == "texts: texts.jsonl:1"
    scores = {"number_match": 1.0, "exact_match": 0.0}
    right = {"text": " #### 4", "finish_reason": "length", "tokens": 2, "scores": scores}
    assert first["completions"] == [right] * 4
    assert [one["text"] for one in second["completions"]] == ANSWERS["_ema"][1]
    assert [one["scores"]["number_match"] for one in second["completions"]] == [1, 1, 1, 0]
    few = dataclasses.replace(TEXTS, num_written=1)
    measure(few, results=running.directory / "other")(evaluated({"": ANSWERS[""]}))
    assert [one["prompt"] for one in lines(running.directory / "other" / "samples.jsonl")] == [first["prompt"]]


class Gathered(Exception):
    """A process has said what it found."""


def test_processes_score_a_share_each_and_know_all(measure, monkeypatch):
    given = evaluated({"": ANSWERS[""]})
    expected, parts = measure()(given), []

    def say(name, value):
        parts.append(value)
        raise Gathered

    monkeypatch.setattr(text_evaluations.jax, "process_count", lambda: 3)
    monkeypatch.setattr(text_evaluations.agree, "gather", say)
    for index in (0, 1, 2):
        monkeypatch.setattr(text_evaluations.jax, "process_index", lambda index=index: index)
        with pytest.raises(Gathered):
            measure()(given)
    assert [len(part["scores"]) for part in parts] == [1, 1, 0]  # of two prompts, each with four completions
    monkeypatch.setattr(text_evaluations.agree, "gather", lambda name, value: parts)
    assert measure()(given) == expected
    parts[1] = {"scores": [], "problem": "the score of process 1 has failed"}
    with pytest.raises(UsageError, match="the score of process 1 has failed"):
        measure()(given)


def test_a_users_function_scores_and_its_failure_ends_the_run(measure, tmp_path):
    file = tmp_path / "own_scores_of_test.py"
    file.write_text(
        "def short(prompt, completion, reference):\n    return 2 - len(completion.split())\n"
        "def failing(prompt, completion, reference):\n    return 1 / (completion != ' 6')\n"
    )
    values = measure(dataclasses.replace(TEXTS, scores=(f"{file}:short",)))(evaluated({"": ANSWERS[""]}))
    assert values["val/short"] == (0 - 1 + 6) / 8 and "val/maj@4" not in values
    assert values["val/pass@4"] == 1 and values["val/pass@2"] == (5 / 6 + 1) / 2
    with pytest.raises(UsageError, match=r"the score failing of a completion of '<s>What is two plus 3\?': ZeroDiv"):
        measure(dataclasses.replace(TEXTS, scores=(f"{file}:failing",)))(evaluated({"": ANSWERS[""]}))


def test_one_completion_has_no_rates(measure, monkeypatch):
    class One(Given):
        def __init__(self, *given, **how):
            super().__init__(*given, **{**how, "samples": 4})

    monkeypatch.setattr(text_evaluations, "Completer", One)
    config = dataclasses.replace(TEXTS, samples=1, scores=())
    values = measure(config)(evaluated({"": [[" 4"], ["5 6"]]}))
    assert values == {"val/mean_length": 1.5, "val/fraction_ended": 0.5}


def test_what_cannot_be_completed_is_refused(running, tmp_path):
    with pytest.raises(UsageError, match=r"NoData has no prompts to complete: set --eval\.num-prompts 0"):
        TEXTS.measures(dataclasses.replace(running, data=NoData(num_samples=0)))
    short = dataclasses.replace(running.trainer, model=dataclasses.replace(MODEL, context_length=4))
    with pytest.raises(UsageError, match="no prompts to complete that are short enough"):
        TEXTS.measures(dataclasses.replace(running, trainer=short))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples": 2, "sampling": SamplingSettings(temperature=0.0)}, "--eval.samples 2 with --eval.sampling.temp"),
        ({"sampling": SamplingSettings(top_p=0.0)}, "--eval.sampling: top_p 0.0 must be above 0"),
        ({"scores": ("exact",)}, "--eval.scores: 'exact' is no score"),
        ({"scores": ("none.py:f",)}, "the file of the score 'none.py' does not exist"),
        ({"scores": ("exact_match", "exact_match")}, "--eval.scores names exact_match twice"),
    ],
)
def test_settings_that_contradict_each_other_are_named(changes, told):
    assert TEXTS.check() == TextEvaluations().check() == []
    (problem,) = dataclasses.replace(TEXTS, **changes).check()
    assert told in problem
