"""Evaluation of language models: perplexity of held-out texts, and scores of completions of held-out prompts.

Scores say how many completions are right, how long they are, how many end; of several completions of a prompt there are
pass@k and the vote of the majority. Read next: `completer.py`, `data/text/answer_scores.py`, `held_out_loss.py`.
"""

import collections
import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from openpi_train.data.core.files import write_text
from openpi_train.data.core.interface import OpenedData
from openpi_train.data.text.answer_scores import AnswerScore, score_named
from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.data.text.prompt_records import PromptRecord, trl_arguments
from openpi_train.data.text.text_data import TextData
from openpi_train.data.text.text_prompts import TextPrompt
from openpi_train.evaluation.completer import Completer
from openpi_train.evaluation.held_out_loss import Perplexity
from openpi_train.evaluation.measure import Evaluated, EvaluationContext, Evaluations, Measure
from openpi_train.fields import at_least
from openpi_train.generation.completion_text import NewText
from openpi_train.generation.generation_size import GenerationSize
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.models.language.accompanied import policy_of
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime import agree
from openpi_train.runtime.exits import UsageError
from openpi_train.types import TextBatch

logger = logging.getLogger(__name__)

# The file of an evaluation with prompts and completions, one JSON object per prompt.
SAMPLES = "samples.jsonl"


class CompletionScores(Measure):
    """`val/<score>`, `val/mean_length`, `val/fraction_ended`; of several completions `val/pass@<k>` and `val/maj@<k>`.

    pass@k and maj@k are those of the first score: a completion whose score is at least 1 is right. Lengths are in
    tokens, without the token that ends a completion. Scores that compare with a reference are left out if no prompt has
    one. Each is also measured of the averaged weights (`_ema`), whose
    completions are written to `samples.jsonl`, or without an average those of the weights.

    Every process has all completions and scores a share of them.

    Raises UsageError if there are no prompts, or the model gives no texts.
    """

    name = "completions"

    def __init__(self, running: EvaluationContext, config: "TextEvaluations"):
        self._running, self._samples, self._num_written = running, config.samples, config.num_written
        tokenizer, prompts = _held_out_prompts(running, config.num_prompts)
        self._scores = _usable([score_named(name) for name in config.scores], prompts)
        self._records = _records(running.data, prompts, self._scores)
        how: Any = {"samples": config.samples, "rows_per_device": config.completions_per_device}
        self._completer = Completer(running, tokenizer, prompts, config.sampling, **how)

    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        values = {}
        for suffix, params in evaluated.weights.items():
            found = self._completer({**evaluated.frozen, **params})
            scores = self._scored(found)
            values |= {f"val/{name}{suffix}": value for name, value in self._metrics(found, scores).items()}
            if suffix == "_ema" or "_ema" not in evaluated.weights:
                self._write(self._running.folder(evaluated.step) / SAMPLES, found, scores)
        return values

    def change(self, first: Mapping[str, float], last: Mapping[str, float]) -> str | None:
        suffix, weights = ("_ema", ", averaged weights") if "val/mean_length_ema" in last else ("", "")
        told = [
            f"{score.name} {first[name]:.3f} before, {last[name]:.3f} after"
            for score in self._scores
            if (name := f"val/{score.name}{suffix}") in first and name in last
        ]
        return f"completions of held-out prompts{weights}: {'; '.join(told)}" if told else None

    def _scored(self, found: Sequence[NewText]) -> np.ndarray:
        """The scores of all completions, float64 [completions, scores]; NaN for none."""
        index, count, prompts = jax.process_index(), jax.process_count(), self._completer.prompts
        mine, problem = [], None
        try:
            for number in range(index, len(prompts), count):
                prompt, own = prompts[number], found[number * self._samples : (number + 1) * self._samples]
                texts, arguments = [one.text for one in own], {}
                if self._records is not None:
                    arguments = trl_arguments(self._records[number], texts, [_ids(one) for one in own])
                mine.append(
                    [score.of_prompt(prompt.text, prompt.reference, texts, arguments) for score in self._scores]
                )
        except UsageError as error:
            logger.warning("scoring has failed", exc_info=error.__cause__ or error)
            problem = str(error)
        parts = agree.gather("scores of completions", {"scores": mine, "problem": problem})
        if problems := [part["problem"] for part in parts if part["problem"]]:
            raise UsageError(problems[0])
        scores = np.full((len(prompts), len(self._scores), self._samples), np.nan)
        for number, part in enumerate(parts):
            scores[number::count] = np.array(part["scores"], np.float64).reshape(scores[number::count].shape)
        for score, values in zip(self._scores, scores.transpose(1, 0, 2), strict=True):
            if np.isnan(values).all():
                raise UsageError(f"the score {score.name} returned None for every completion; needed are numbers")
        return scores.transpose(0, 2, 1).reshape(len(found), len(self._scores))

    def _metrics(self, found: Sequence[NewText], scores: np.ndarray) -> dict[str, float]:
        means = np.nanmean(scores, axis=0)
        values = {score.name: float(mean) for score, mean in zip(self._scores, means, strict=True)}
        if self._samples > 1 and self._scores:
            values |= self._rates(found, scores[:, 0] >= 1)
        return {
            **values,
            "mean_length": float(np.mean([len(one.tokens.tokens) for one in found])),
            "fraction_ended": float(np.mean([one.tokens.finish_reason == "stop" for one in found])),
        }

    def _rates(self, found: Sequence[NewText], is_right: np.ndarray) -> dict[str, float]:
        """pass@k for powers of two and for all completions of a prompt, and the majority of these."""
        n, of_prompts = self._samples, is_right.reshape(-1, self._samples)
        counts = of_prompts.sum(axis=1).tolist()
        powers = itertools.takewhile(lambda k: k < n, (2**power for power in itertools.count(1)))
        values = {f"pass@{k}": float(np.mean([pass_at_k(n, count, k) for count in counts])) for k in (*powers, n)}
        if (answer := self._scores[0].answer) is not None:
            answers = [answer(one.text) for one in found]
            rates = [
                majority_rate(answers[number * n : (number + 1) * n], right.tolist())
                for number, right in enumerate(of_prompts)
            ]
            values[f"maj@{n}"] = float(np.mean(rates))
        return values

    def _write(self, path: Path, found: Sequence[NewText], scores: np.ndarray) -> None:
        if jax.process_index() != 0:
            return
        lines, names = [], [score.name for score in self._scores]
        for number, prompt in enumerate(self._completer.prompts[: self._num_written]):
            completions = [
                {
                    "text": found[row].text,
                    "finish_reason": found[row].tokens.finish_reason,
                    "tokens": len(found[row].tokens.tokens),
                    "scores": {
                        name: None if math.isnan(value) else value
                        for name, value in zip(names, scores[row].tolist(), strict=True)
                    },
                }
                for row in range(number * self._samples, (number + 1) * self._samples)
            ]
            line = {"place": prompt.place, "prompt": prompt.text, "reference": prompt.reference}
            lines.append(json.dumps({**line, "completions": completions}, ensure_ascii=False))
        # One file per evaluation: what a resumed run repeats replaces it.
        write_text(path, "".join(f"{line}\n" for line in lines))


def _usable(scores: Sequence[AnswerScore], prompts: Sequence[TextPrompt]) -> list[AnswerScore]:
    """The scores that say something of completions of these prompts."""
    has_references = any(prompt.reference for prompt in prompts)
    found = [score for score in scores if has_references or not score.compares]
    if left_out := [score.name for score in scores if score not in found]:
        logger.info(
            "completions: no %s, since the held-out prompts have no reference (a completion column) to compare with",
            " and no ".join(left_out),
        )
    return found


def _records(
    data: OpenedData, prompts: Sequence[TextPrompt], scores: Sequence[AnswerScore]
) -> list[PromptRecord] | None:
    """The records of the prompts if a score of TRL's form is given them, else None. Raises UsageError if none has what
    it takes.
    """
    forms = [(score.name, score.form) for score in scores if score.form is not None]
    if not forms:
        return None
    assert isinstance(data, OpenedText)
    try:
        records = data.held_out_records(prompts)
    except ValueError as error:
        raise UsageError(f"the score {forms[0][0]} is of TRL's form, which is given prompts: {error}") from error
    for name, form in forms:
        if problem := form.problem(records[0].columns):
            raise UsageError(f"the score {name}: {problem}")
    return records


def _ids(new: NewText) -> list[int]:
    """The tokens of a completion, with the one that ended it."""
    return [*new.tokens.tokens, *([new.tokens.ending[0]] if new.tokens.ending else [])]


def _held_out_prompts(running: EvaluationContext, num_prompts: int) -> tuple[Any, list[TextPrompt]]:
    """The tokenizer, and the first held-out prompts that leave room for a completion."""
    data = running.data
    if not isinstance(data, OpenedText):
        raise UsageError(f"{type(data).__name__} has no prompts to complete: set --eval.num-prompts 0")
    found = policy_of(running.trainer.model)
    longest = (found[0].context_length if found else 0) - 1
    prompts, too_long = [], 0
    for prompt in data.held_out_prompts():
        if len(prompt.tokens) > longest:
            too_long += 1
            continue
        prompts.append(prompt)
        if len(prompts) == num_prompts:
            break
    if too_long:
        logger.warning(
            "%d held-out prompts have more than %d tokens, which leaves no room for a completion: they are left out",
            *(too_long, longest),
        )
    if not prompts:
        raise UsageError(
            f"the held-out texts have no prompts to complete{' that are short enough' if too_long else ''}. They need "
            "tokens that are no targets: a prompt column, or --data.targets assistant; and of labelled completions one "
            "that is desirable. Or set --eval.num-prompts 0"
        )
    if len(prompts) < num_prompts:
        logger.info("there are %d held-out prompts, fewer than the %d asked for", len(prompts), num_prompts)
    return data.words, prompts


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """The probability that at least one of `k` completions is right, from `num` of which `num_right` are.

    The unbiased estimate of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: the share
    of the subsets of `k` that hold a right one. `k` is at most `num`.
    """
    assert 0 <= num_right <= num and 1 <= k <= num
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def majority_rate(answers: Sequence[Hashable | None], is_right: Sequence[bool]) -> float:
    """The probability that the most frequent answer is right, if one of equally frequent ones is drawn.

    Completions without an answer (None) have no vote; without any vote it is 0 (maj@k, Wang et al. 2022).
    """
    votes = collections.Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = {answer for answer, right in zip(answers, is_right, strict=True) if right}
    chosen = [answer for answer, count in votes.items() if count == most]
    return sum(answer in right for answer in chosen) / len(chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEvaluations(Evaluations):
    """Evaluation of a language model."""

    # Held-out prompts that are completed at every evaluation; 0: none.
    num_prompts: int = at_least(0, 0)
    # Completions of each prompt: the largest k of pass@k.
    samples: int = at_least(1, 1)
    # How completions are sampled, and where they end.
    sampling: SamplingSettings = dataclasses.field(default_factory=lambda: SamplingSettings(temperature=0.0))
    # What completions are scored by: exact_match, number_match, regex:PATTERN, or a function file.py:function(prompt,
    # completion, reference), or one written for TRL. Of several completions the first score says which are right.
    scores: tuple[str, ...] = ("exact_match",)
    # Prompts whose completions are written to eval/<step>/samples.jsonl.
    num_written: int = at_least(0, 16)
    # Completions that a device makes at a time.
    completions_per_device: int = at_least(1, 16)

    def check(self) -> list[str]:
        problems = [f"--eval.sampling: {problem}" for problem in self.sampling.check()]
        if self.samples > 1 and self.sampling.temperature == 0:
            problems.append(
                f"--eval.samples {self.samples} with --eval.sampling.temperature 0: all completions of a prompt would "
                "be equal; set a temperature above 0, such as 0.8"
            )
        names = []
        for given in self.scores:
            try:
                names.append(score_named(given).name)
            except (ValueError, OSError) as error:
                problems.append(f"--eval.scores: {error}")
        if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
            problems.append(f"--eval.scores names {', '.join(twice)} twice: their metrics would have the same name")
        return problems

    def generation_size(self, model: ModelConfig, data: object) -> GenerationSize | None:
        found = policy_of(model)
        if not self.num_prompts or found is None or not isinstance(data, TextData):
            return None
        return GenerationSize(
            language=found[0],
            rows=min(self.completions_per_device, self.num_prompts * self.samples),
            length=min(data.max_length + self.sampling.max_new_tokens, found[0].context_length),
            flag="--eval.completions-per-device",
        )

    def measures(self, running: EvaluationContext) -> list[Measure]:
        found: list[Measure] = []
        has_scores = "token_scores" in running.trainer.model.provides
        has_targets = not (isinstance(running.data, OpenedText) and running.data.has_only_prompts)
        if has_scores and has_targets and any(isinstance(batch, TextBatch) for batch in running.held_out):
            found.append(Perplexity(running))
        if self.num_prompts:
            found.append(CompletionScores(running, self))
        return found
