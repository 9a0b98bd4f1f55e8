"""An actor that follows a script: the reward of a rollout is a given function of prompt and number."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from openpi_train.rl.rollouts import Actor, RLConfig, Rollouts
from openpi_train.types import TextBatch, TokenTraces, tree_of

UNITS = 5


class ScriptedActor(Actor):
    """Rollouts whose tokens say which they are: the draw, the number in the group, the sum of the parameters."""

    def __init__(self, reward: Callable[[int, int], float], num_prompts: int = 1000):
        self._reward, self._num_contexts = reward, num_prompts
        self.identity = {"prompt_ids": num_prompts}
        self.acted: list[int] = []

    def prompt_id(self, draw: int) -> int:
        return draw % self._num_contexts

    def act(self, params: Any, draws: Any, group_size: int) -> Rollouts:
        self.acted += draws
        numbers = [(draw, number) for draw in draws for number in range(group_size)]
        rewards = np.array([self._reward(self.prompt_id(draw), number) for draw, number in numbers], float)
        tokens = np.zeros((len(numbers), UNITS + 1), np.int32)
        tokens[:, :2] = numbers
        lengths = np.array([2 + (draw + number) % (UNITS - 1) for draw, number in numbers])
        mask = np.arange(UNITS) < lengths[:, None]
        texts = {"tokens": tokens, "segments": np.ones_like(tokens), "positions": np.zeros_like(tokens)}
        return Rollouts(
            prompt_ids=np.array([self.prompt_id(draw) for draw, _ in numbers]),
            rewards=rewards,
            outcomes=rewards,
            is_cut=lengths == UNITS,
            mask=mask,
            columns={
                **texts,
                "weights": np.pad(mask, ((0, 0), (1, 0))).astype(np.float32),
                # As of a parameter of 1 in `WeightLaw` of the tests.
                "sampling_log_probs": np.tile(-np.array(numbers)[:, 1:] - 1.0, UNITS).astype(np.float32),
            },
        )

    def traces(self, columns: Any) -> TokenTraces:
        names = ("tokens", "segments", "positions", "weights", "row")
        texts = tree_of(TextBatch, **{name: columns[name] for name in names})
        return tree_of(TokenTraces, texts=texts, num_tokens=columns["row"] * 0 + 1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedRL(RLConfig):
    """RL with a `ScriptedActor`."""

    def batch_spec(self, **parts: Any) -> Any:
        raise NotImplementedError

    def actor(self, running: Any, data: Any) -> Actor:
        raise NotImplementedError
