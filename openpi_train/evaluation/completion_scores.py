"""Scores of completions of held-out prompts: how many are right, how long they are, how many end.

Read next: `completer.py`, `data/text/answer_scores.py`, `sample_rates.py`.
"""

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from openpi_train.data.files import write_text
from openpi_train.data.text.answer_scores import AnswerScore
from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.data.text.text_prompts import TextPrompt
from openpi_train.evaluation.completer import Completer
from openpi_train.evaluation.measure import Evaluated, Measure, Running
from openpi_train.evaluation.sample_rates import majority_rate, pass_at_k
from openpi_train.generation.completion_text import NewText
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.runtime import agree
from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)

# The file of an evaluation with prompts and completions, one JSON object per prompt.
SAMPLES = "samples.jsonl"


class CompletionScores(Measure):
    """`val/<score>`, `val/mean_length`, `val/fraction_ended`; of several completions `val/pass@<k>` and `val/maj@<k>`.

    pass@k and maj@k are those of the first score: a completion whose score is at least 1 is right. Lengths are in
    tokens, without the token that ends a completion. Each is also measured of the averaged weights (`_ema`), whose
    completions are written to `samples.jsonl`, or without an average those of the weights.

    Every process has all completions and scores a share of them.

    Raises UsageError if there are no prompts, or the model gives no texts.
    """

    name = "completions"

    def __init__(
        self,
        running: Running,
        scores: Sequence[AnswerScore],
        settings: SamplingSettings,
        *,
        num_prompts: int,
        samples: int,
        num_written: int,
        rows_per_device: int,
    ):
        self._running, self._scores, self._samples, self._num_written = running, scores, samples, num_written
        tokenizer, prompts = _held_out_prompts(running, num_prompts)
        how: Any = {"samples": samples, "rows_per_device": rows_per_device}
        self._completer = Completer(running, tokenizer, prompts, settings, **how)

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

    def _prompt(self, number: int) -> TextPrompt:
        """The prompt of a completion."""
        return self._completer.prompts[number // self._samples]

    def _scored(self, found: Sequence[NewText]) -> np.ndarray:
        """The scores of all completions, float64 [completions, scores]."""
        index, count = jax.process_index(), jax.process_count()
        mine, problem = [], None
        try:
            for number in range(index, len(found), count):
                prompt = self._prompt(number)
                mine.append([score(prompt.text, found[number].text, prompt.reference) for score in self._scores])
        except UsageError as error:
            logger.warning("scoring has failed", exc_info=error)
            problem = str(error)
        parts = agree.gather("scores of completions", {"scores": mine, "problem": problem})
        if problems := [part["problem"] for part in parts if part["problem"]]:
            raise UsageError(problems[0])
        scores = np.zeros((len(found), len(self._scores)))
        for number, part in enumerate(parts):
            scores[number::count] = np.reshape(part["scores"], (len(part["scores"]), len(self._scores)))
        return scores

    def _metrics(self, found: Sequence[NewText], scores: np.ndarray) -> dict[str, float]:
        values = {score.name: float(mean) for score, mean in zip(self._scores, scores.mean(axis=0), strict=True)}
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
                    "scores": dict(zip(names, scores[row].tolist(), strict=True)),
                }
                for row in range(number * self._samples, (number + 1) * self._samples)
            ]
            line = {"place": prompt.place, "prompt": prompt.text, "reference": prompt.reference}
            lines.append(json.dumps({**line, "completions": completions}, ensure_ascii=False))
        # One file per evaluation: what a resumed run repeats replaces it.
        write_text(path, "".join(f"{line}\n" for line in lines))


def _held_out_prompts(running: Running, num_prompts: int) -> tuple[Any, list[TextPrompt]]:
    """The tokenizer, and the first held-out prompts that leave room for a completion."""
    data = running.data
    if not isinstance(data, OpenedText):
        raise UsageError(f"{type(data).__name__} has no prompts to complete: set --eval.num-prompts 0")
    longest = int(getattr(running.trainer.model, "context_length", 0)) - 1
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
            "tokens that are no targets: a prompt column, or --data.targets assistant; or set --eval.num-prompts 0"
        )
    if len(prompts) < num_prompts:
        logger.info("there are %d held-out prompts, fewer than the %d asked for", len(prompts), num_prompts)
    return data.words, prompts
