"""`TextRL`: a language model completes prompts and learns from the rewards. Read next: `text_actor.py`."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from openpi_train.data.core.interface import Data, OpenedData
from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.data.text.prompt_records import first_columns
from openpi_train.data.text.text_batches import batch_shapes
from openpi_train.data.text.text_data import TextData
from openpi_train.data.text.text_rows import row_spec_of
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.fields import at_least
from openpi_train.generation.generation_size import GenerationSize
from openpi_train.generation.sampling_settings import LARGEST_INT32, LEAST_TEMPERATURE, MAX_STOP_IDS
from openpi_train.models.language.accompanied import policy_of
from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.objective import Objective
from openpi_train.objectives.policy_objective import distribution_of
from openpi_train.rl.prompt_source import PromptSource
from openpi_train.rl.rewards.text_reward import TextReward
from openpi_train.rl.rollouts import Actor, RLConfig
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.token_distribution import TokenDistribution
from openpi_train.types import RolloutBatch, TokenTraces, tree_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRL(RLConfig):
    """Completions of the data's prompts.

    The prompts are those of prompt/completion texts, whose completions are the references that rewards compare with;
    or prompts alone. `--data.max-length` is the most tokens of a prompt and its completion.
    """

    takes_samples: ClassVar[bool] = True

    # What completions are rewarded for; the weighted sum is the reward. The first one says what a completion achieved.
    rewards: tuple[TextReward, ...] = (TextReward(name="exact_match"),)
    # The most tokens of a completion.
    max_new_tokens: int = at_least(1, 256)
    # Tokens that end a completion, besides the tokenizer's own.
    stop_ids: tuple[int, ...] = ()
    # Completions that a device makes at a time.
    completions_per_device: int = at_least(1, 64)
    # The longest time that a reward function may take for one completion. Only for functions file.py:function.
    reward_timeout_s: float = 30.0
    # What a completion has whose reward function takes longer, or ends its process: the run ends, or the completion has
    # no reward.
    on_reward_timeout: Literal["error", "none"] = "error"
    # The most memory of the process of a reward function, and of each program that it starts.
    reward_memory_gib: float = 64.0
    # Names of variables of the environment that reward functions get, besides those for paths, language and devices.
    reward_environment: tuple[str, ...] = ()

    def check(self, *, objective: Objective, model: ModelConfig, data: Data, batch_size: int) -> list[str]:
        problems = super().check(objective=objective, model=model, data=data, batch_size=batch_size)
        if not isinstance(data, TextData):
            return [
                *problems,
                f"TextRL completes the prompts of TextData; the run's data are {type(data).__name__}",
            ]
        distribution = distribution_of(objective)
        if not isinstance(distribution, TokenDistribution):
            problems.append(
                "TextRL needs an objective whose distribution is a TokenDistribution (--objective.distribution)"
            )
        elif 0 < distribution.temperature < LEAST_TEMPERATURE:
            problems.append(
                f"--objective.distribution.temperature {distribution.temperature} must be at least {LEAST_TEMPERATURE}"
            )
        elif distribution.top_k > LARGEST_INT32:
            problems.append(f"--objective.distribution.top-k {distribution.top_k} must be at most {LARGEST_INT32}")
        if data.kind not in ("texts", "prompts"):
            problems.append(f"--data.kind {data.kind}: prompts are those of texts (prompt/completion) or prompts")
        if data.kind == "prompts" and (comparing := [one.name for one in self.rewards if one.compares]):
            problems.append(
                f"--rl.rewards {', '.join(comparing)}: --data.kind prompts has no references to compare with; "
                "give texts with completions, or another reward"
            )
        if data.packing:
            problems.append("--data.packing is for texts that are learnt: a row of RL is one completion")
        if data.max_length <= self.max_new_tokens:
            problems.append(
                f"--data.max-length {data.max_length} is the most tokens of a prompt and its completion; "
                f"--rl.max-new-tokens {self.max_new_tokens} leave none for the prompt"
            )
        if len(self.stop_ids) > MAX_STOP_IDS:
            problems.append(f"--rl.stop-ids has {len(self.stop_ids)} tokens; the most are {MAX_STOP_IDS}")
        if not all(0 <= token <= LARGEST_INT32 for token in self.stop_ids):
            given = " ".join(map(str, self.stop_ids))
            problems.append(f"--rl.stop-ids {given} must be tokens, which are from 0 to {LARGEST_INT32}")
        for number, reward in enumerate(self.rewards):
            kind, _, margin = reward.name.partition(":")
            if kind == "overlong" and margin.isdecimal() and int(margin) > self.max_new_tokens:
                problems.append(
                    f"--rl.rewards.{number}.name {reward.name}: every completion would lose some, as it has at "
                    f"most --rl.max-new-tokens {self.max_new_tokens}; give fewer tokens"
                )
        if not self.rewards:
            problems.append(
                "completions have no reward: give --reward rewards.py:FUNCTION, or a name of "
                "docs/howto/reinforcement_learning.md, such as --reward 'regex:.*[0-9]'"
            )
        if self.reward_timeout_s <= 0:
            problems.append(f"--rl.reward-timeout-s {self.reward_timeout_s} must be above 0")
        if not 0 < self.reward_memory_gib < float("inf"):
            problems.append(f"--rl.reward-memory-gib {self.reward_memory_gib} must be a finite number above 0")
        if odd := [name for name in self.reward_environment if not name or "=" in name]:
            problems.append(f"--rl.reward-environment {' '.join(odd)}: give names of variables, not values")
        problems += [problem for number, reward in enumerate(self.rewards) for problem in reward.check(number)]
        return problems + self._check_columns(data)

    def _check_columns(self, data: TextData) -> list[str]:
        """Why functions of TRL's form cannot be called with the columns that first records of files here have."""
        forms = {reward.name: form for reward in self.rewards if (form := reward.trl_form) is not None}
        found = [first_columns(dataset) for dataset in data.datasets] if forms else []
        columns = frozenset().union(*(one or () for one in found))
        if not columns or None in found:
            return []
        told = [(name, form.problem(columns)) for name, form in forms.items()]
        return [f"--reward {name}: {problem}" for name, problem in told if problem]

    def generation_size(self, model: ModelConfig, data: Any) -> GenerationSize | None:
        found = policy_of(model)
        if found is None:
            return None
        return GenerationSize(
            language=found[0],
            rows=min(self.completions_per_device, self.num_rollouts),
            length=data.max_length,
            flag="--rl.completions-per-device",
        )

    def most_prompt_tokens(self, data: TextData) -> int:
        """The most tokens of a prompt."""
        return data.max_length - self.max_new_tokens

    def row_length(self, data: TextData, opened: OpenedData | None) -> int:
        """The tokens of a row: those of the longest prompt and the longest completion."""
        if opened is None:
            return data.max_length
        return self.prompts(data, opened).longest + self.max_new_tokens

    def prompts(self, data: TextData, opened: OpenedData) -> PromptSource:
        """The prompts. Raises UsageError if the data are no texts."""
        if not isinstance(opened, OpenedText):
            raise UsageError(f"TextRL completes prompts, and {type(opened).__name__} has none")
        return PromptSource(opened, self.most_prompt_tokens(data))

    def num_prompts(self, data: Any, opened: OpenedData) -> int:
        return self.prompts(data, opened).num_prompts

    def batch_spec(
        self, *, objective: Any, model: ModelConfig, data: Any, opened: OpenedData | None, batch_size: int
    ) -> RolloutBatch:
        del objective, model
        length = self.row_length(data, opened)
        texts = batch_shapes(row_spec_of(length, judged=False, references=False), batch_size)

        def of(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

        units = dict.fromkeys(
            ("advantages", "log_probs", "sampling_log_probs", "reference_log_probs", "values", "returns"),
            of(jnp.float32, length - 1),
        )
        return tree_of(
            RolloutBatch,
            traces=tree_of(TokenTraces, texts=texts, num_tokens=of(jnp.int32)),
            mask=of(jnp.bool_, length - 1),
            is_rollout=of(jnp.bool_),
            is_fresh=of(jnp.bool_),
            **units,
        )

    def actor(self, running: EvaluationContext, data: Any) -> Actor:
        from openpi_train.rl.text_actor import TextActor  # which imports this module

        return TextActor(self, running, self.prompts(data, running.data), data)
