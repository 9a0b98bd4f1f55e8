"""Evaluation of language models: perplexity of held-out texts, and scores of completions of held-out prompts.

Read next: `perplexity.py`, `completion_scores.py`.
"""

import collections
import dataclasses

from openpi_train.data.text.answer_scores import score_named
from openpi_train.evaluation.completion_scores import CompletionScores
from openpi_train.evaluation.measure import Evaluations, Measure, Running
from openpi_train.evaluation.perplexity import Perplexity
from openpi_train.fields import at_least
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.types import TextBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEvaluations(Evaluations):
    """Evaluation of a language model."""

    # Held-out prompts that are completed at every evaluation; 0: none.
    num_prompts: int = at_least(0, 0)
    # Completions of each prompt: the largest k of pass@k.
    samples: int = at_least(1, 1)
    # How completions are sampled, and where they end.
    sampling: SamplingSettings = dataclasses.field(default_factory=lambda: SamplingSettings(temperature=0.0))
    # What completions are scored by: exact_match, number_match, or a function file.py:function(prompt, completion,
    # reference). Of several completions the first score says which are right.
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

    def measures(self, running: Running) -> list[Measure]:
        found: list[Measure] = []
        has_scores = "token_scores" in running.trainer.model.provides
        if has_scores and any(isinstance(batch, TextBatch) for batch in running.held_out):
            found.append(Perplexity(running))
        if self.num_prompts:
            found.append(
                CompletionScores(
                    running,
                    [score_named(name) for name in self.scores],
                    self.sampling,
                    num_prompts=self.num_prompts,
                    samples=self.samples,
                    num_written=self.num_written,
                    rows_per_device=self.completions_per_device,
                )
            )
        return found
