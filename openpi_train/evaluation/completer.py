"""Completes a run's prompts with one set of parameters after the other. Read next: `text_evaluations.py`."""

import dataclasses
import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any

from flax import nnx

from openpi_train.data.text.text_prompts import TextPrompt
from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer, end_tokens
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.generation.completion_text import NewText, whole
from openpi_train.generation.generator import Generator
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.generation.text_generator import TextGenerator
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.accompanied import policy_of
from openpi_train.parallel.devices import Devices
from openpi_train.parallel.mesh import TENSOR
from openpi_train.parallel.params import Params
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.preempt import StoppedError

logger = logging.getLogger(__name__)

_REPORT_S = 30.0


class Completer:
    """Completes the same prompts, each several times, with parameters of a run's model. All processes must call it.

    Completion i of prompt p has the row number p * samples + i, so its random numbers depend on nothing else. Besides
    the tokenizer's end tokens, the one that ends a prompt's reference ends all completions.

    Between calls nothing is kept on the devices but the compiled programs.

    Raises UsageError if the model gives no texts, or no prompt leaves room for a completion.
    """

    def __init__(
        self,
        running: EvaluationContext,
        tokenizer: TextTokenizer,
        prompts: Sequence[TextPrompt],
        settings: SamplingSettings,
        *,
        samples: int,
        rows_per_device: int,
    ):
        model = running.trainer.model
        found = policy_of(model)
        if found is None:
            raise UsageError(f"{type(model).__name__} gives no texts: set --eval.num-prompts 0")
        self._language, self._prefix = dataclasses.replace(found[0], remat="none"), found[1]
        self._running, self._tokenizer, self._settings, self._samples = running, tokenizer, settings, samples
        self.prompts = tuple(prompts)
        groups = running.trainer.plan.mesh.size // running.trainer.plan.mesh.shape[TENSOR]
        self._num_rows = min(rows_per_device * groups, len(self.prompts) * samples)
        longest = max((len(prompt.tokens) for prompt in self.prompts), default=0)
        self._max_length = min(longest + settings.max_new_tokens, self._language.context_length)
        self._texts: TextGenerator | None = None

    def __call__(self, params: Params) -> list[NewText]:
        """The completions of the first prompt, of the second, and so on. Raises StoppedError if a stop is requested."""
        texts = self._with(params)
        parts: dict[Hashable, list[NewText]] = {row: [] for row in range(len(self.prompts) * self._samples)}
        for row in range(len(parts)):
            texts.submit(row, self.prompts[row // self._samples].tokens, self._settings, row=row)
        said = time.monotonic()
        while left := texts.generator.num_running + texts.generator.num_waiting:
            if time.monotonic() - said > _REPORT_S:
                said = time.monotonic()
                logger.info("%d of %d completions are finished", len(parts) - left, len(parts))
            for new in texts.step():
                parts[new.tokens.id].append(new)
            if self._running.stop_requested():
                self._texts = None
                raise StoppedError
        texts.generator.release()
        return [whole(own) for own in parts.values()]

    def _with(self, params: Params) -> TextGenerator:
        """The generator with the parameters of the model that gives texts."""
        own = part_of(params, self._prefix)
        if self._texts is not None:
            self._texts.generator.use(own)
            return self._texts
        ends = [prompt.end for prompt in self.prompts if prompt.end is not None]
        generator = generator_of(
            self._language,
            own,
            self._running.trainer.devices,
            num_rows=self._num_rows,
            max_length=self._max_length,
            end_ids=[*end_tokens(self._tokenizer), *ends],
            vocab_size=self._tokenizer.num_tokens,
        )
        self._texts = TextGenerator(generator, self._tokenizer, {})
        return self._texts


def part_of(params: Params, prefix: str) -> Params:
    """The parameters below a prefix, by their paths after it."""
    return {path.removeprefix(prefix): leaf for path, leaf in params.items() if path.startswith(prefix)}


def generator_of(language: LanguageConfig, params: Params, devices: Devices, **how: Any) -> Generator:
    """A generator of a language model in a run, on its `devices`; `how` are further arguments of `Generator`."""
    graphdef = nnx.split(nnx.eval_shape(lambda: language.build(nnx.Rngs(0))))[0]
    return Generator(graphdef, params, dataclasses.replace(devices, graphdef=graphdef), **how)
