"""`TextActor`: completes prompts with the parameters of the moment, and has the completions rewarded.

Read next: `rewards/judge.py`, `generation/generator.py`.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.data.text.text_batches import batch_of, one_text_per_row
from openpi_train.data.text.text_data import TextData
from openpi_train.data.tokenizers.text_tokenizer import end_tokens
from openpi_train.evaluation.completer import generator_of, part_of
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.generation.completion_text import NewText
from openpi_train.generation.sampling_settings import SamplingSettings
from openpi_train.generation.text_generator import TextGenerator
from openpi_train.models.language.accompanied import policy_of
from openpi_train.parallel.params import Params
from openpi_train.rl.prompt_source import PromptSource
from openpi_train.rl.rewards.judge import RewardComputer
from openpi_train.rl.rewards.text_reward import Completed
from openpi_train.rl.rollouts import Actor, Rollouts
from openpi_train.rl.text_rl import TextRL
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.preempt import StoppedError
from openpi_train.sampling.token_distribution import TokenDistribution
from openpi_train.types import TextBatch, TokenTraces, tree_of


class TextActor(Actor):
    """Completes prompts by the distribution of the run's objective.

    Completion i at the n-th draw has the row number n * group_size + i: with the run's seed it determines its random
    numbers, on any devices and beside any others.

    Raises UsageError if the model gives no texts.
    """

    def __init__(self, rl: TextRL, running: EvaluationContext, prompts: PromptSource, data: TextData):
        trainer: Any = running.trainer
        found = policy_of(trainer.model)
        if found is None:
            raise UsageError(
                f"{type(trainer.model).__name__} gives no texts: there is nothing to learn from rollouts with"
            )
        assert isinstance(running.data, OpenedText)
        self._language, self._prefix = dataclasses.replace(found[0], remat="none"), found[1]
        self._stop_requested = running.stop_requested
        self._rl, self._prompts, self._tokenizer = rl, prompts, running.data.words
        # No other can be chosen.
        self._num_tokens = min(self._tokenizer.num_tokens, self._language.sizes.vocab_size)
        self._devices, groups = trainer.devices, trainer.plan.num_row_groups
        self._num_rows = min(rl.completions_per_device * groups, rl.num_rollouts)
        distribution: TokenDistribution = trainer.objective.distribution
        self._settings = SamplingSettings(
            temperature=distribution.temperature,
            top_k=distribution.top_k,
            top_p=distribution.top_p,
            min_p=distribution.min_p,
            max_new_tokens=rl.max_new_tokens,
            stop_ids=rl.stop_ids,
            # Other numbers than those of evaluations, whose rows have the same numbers.
            seed=int.from_bytes(hashlib.sha256(f"practice {trainer.seed}".encode()).digest()[:4], "little"),
        )
        self._length = prompts.longest + rl.max_new_tokens
        self._judge = RewardComputer(
            rl.rewards,
            running,
            timeout_s=rl.reward_timeout_s,
            on_timeout=rl.on_reward_timeout,
            memory_gib=rl.reward_memory_gib,
            environment=rl.reward_environment,
        )
        if self._judge.reads_records:
            self._judge.check_columns(prompts.read_records(data))
        self._judge.try_functions(self._trial())
        self._texts: TextGenerator | None = None
        self.identity: Mapping[str, Any] = prompts.identity

    def prompt_id(self, draw: int) -> int:
        return self._prompts.prompt_id(draw)

    def act(self, params: Params, draws: Sequence[int], group_size: int) -> Rollouts:
        texts = self._with(params)
        ids = [self.prompt_id(draw) for draw in draws]
        prompts = [prompt for one in ids for prompt in [self._prompts.prompt(one)] * group_size]
        groups = [
            group
            for draw, one in zip(draws, ids, strict=True)
            for group in [(draw, self._prompts.record(one))] * group_size
        ]
        rows = [draw * group_size + number for draw in draws for number in range(group_size)]
        found = texts.complete([prompt.tokens for prompt in prompts], self._settings, rows=rows, after_step=self._look)
        texts.generator.release()
        completed = [
            Completed(
                prompt=prompt.text,
                text=new.text,
                reference=prompt.reference,
                tokens=(*prompt.tokens, *_chosen(new)),
                num_new_tokens=len(_chosen(new)),
                most_new_tokens=self._rl.max_new_tokens,
                group=draw,
                record=record,
            )
            for prompt, new, (draw, record) in zip(prompts, found, groups, strict=True)
        ]
        rewards = self._judge(completed)
        columns = self._columns(completed, [_log_probs(new) for new in found])
        return Rollouts(
            prompt_ids=np.repeat(ids, group_size),
            rewards=rewards.total,
            outcomes=rewards.outcomes,
            is_cut=np.array([new.tokens.finish_reason == "length" for new in found]),
            mask=columns["weights"][:, 1:] > 0,
            columns=columns,
            parts=rewards.parts,
        )

    def traces(self, columns: Mapping[str, jax.Array]) -> TokenTraces:
        texts = batch_of(columns)
        assert isinstance(texts, TextBatch)
        return tree_of(TokenTraces, texts=texts, num_tokens=columns["num_tokens"])

    def describe(self, rollouts: Rollouts, number: int) -> str:
        tokens = rollouts.columns["tokens"][number, rollouts.columns["segments"][number] > 0]
        return f"{self._tokenizer.decode(tokens)!r}, reward {rollouts.rewards[number]:g}"

    def shown(self, rollouts: Rollouts, number: int) -> Mapping[str, Any]:
        """Prompt and completion as rewards see them, the reference or the columns of the record, and each reward."""
        prompt_id = int(rollouts.prompt_ids[number])
        prompt, record = self._prompts.prompt(prompt_id), self._prompts.record(prompt_id)
        row = rollouts.columns["tokens"][number, rollouts.columns["segments"][number] > 0].tolist()
        own = len(row) - int(rollouts.mask[number].sum())
        # The last token is that which ended it, if no limit did. A decoder may need what is before the completion.
        ended = row if rollouts.is_cut[number] else row[:-1]
        before, whole = (self._tokenizer.decode(part, skip_special_tokens=True) for part in (row[:own], ended))
        told: dict[str, Any] = {"prompt": prompt.text, "completion": whole[len(before) :], "tokens": len(row) - own}
        if len(rollouts.parts) > 1:
            parts = {name.removeprefix("reward/"): float(values[number]) for name, values in rollouts.parts.items()}
            told["rewards"] = {name: None if math.isnan(value) else value for name, value in parts.items()}
        if record is not None:
            told["columns"] = {name: value for name, value in record.columns.items() if value != record.prompt}
        elif prompt.reference:
            told["reference"] = prompt.reference
        return told

    def close(self) -> None:
        self._judge.close()

    def _trial(self) -> list[Completed]:
        """Two completions of the first prompt: its reference, or where there is none the prompt again."""
        prompt, record = self._prompts.prompt(0), self._prompts.record(0)
        one = Completed(
            prompt=prompt.text,
            text=prompt.reference or prompt.text,
            reference=prompt.reference,
            tokens=prompt.tokens * 2,
            num_new_tokens=len(prompt.tokens),
            most_new_tokens=self._rl.max_new_tokens,
            record=record,
        )
        return [one, one]

    def _look(self) -> None:
        """Raise StoppedError if all processes stop here."""
        if self._stop_requested():
            raise StoppedError

    def _columns(self, completed: Sequence[Completed], log_probs: Sequence[list[float]]) -> dict[str, np.ndarray]:
        weights, drawn = np.zeros((2, len(completed), self._length), np.float32)
        for row, one in enumerate(completed):
            chosen = slice(len(one.tokens) - one.num_new_tokens, len(one.tokens))
            weights[row, chosen], drawn[row, chosen] = 1, log_probs[row]
        return {
            **one_text_per_row([one.tokens for one in completed], len(completed), self._length),
            "weights": weights,
            # A unit is a token but the first.
            "sampling_log_probs": drawn[:, 1:],
            "num_tokens": np.full(len(completed), self._num_tokens, np.int32),
        }

    def _with(self, params: Params) -> TextGenerator:
        """The generator with these parameters."""
        own = part_of(params, self._prefix)
        if self._texts is not None:
            self._texts.generator.use(own)
            return self._texts
        generator = generator_of(
            self._language,
            own,
            self._devices,
            num_rows=self._num_rows,
            max_length=self._length,
            end_ids=[*end_tokens(self._tokenizer), *self._prompts.ends()],
            vocab_size=self._tokenizer.num_tokens,
            after_limits=True,
        )
        self._texts = TextGenerator(generator, self._tokenizer, {})
        return self._texts


def _chosen(new: NewText) -> list[int]:
    """The tokens that the policy chose, with the one that ended the completion."""
    return [*new.tokens.tokens, *([new.tokens.ending[0]] if new.tokens.ending else [])]


def _log_probs(new: NewText) -> list[float]:
    """The log-probabilities with which those were drawn."""
    return [*new.tokens.log_probs, *([new.tokens.ending[1]] if new.tokens.ending else [])]
