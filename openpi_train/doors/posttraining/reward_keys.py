"""What ppo and grpo are rewarded for, in a YAML config. Read next: `rl/rewards/text_reward.py`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openpi_train.doors.posttraining.model_keys import address_of
from openpi_train.doors.posttraining.yaml_config import Algorithm, YamlConfig
from openpi_train.runtime.exits import UsageError

_MODELS = ("reward_model_path", "reward_model_name_or_path", "reward_model", "reward_pretrain")
_FUNCTIONS = ("reward_functions", "reward_funcs", "reward_function")
_WEIGHTS = ("reward_weights",)


class NoRewardError(UsageError):
    """The config says of no reward."""

    def __init__(self, algorithm: Algorithm):
        super().__init__(
            f"no reward for {algorithm}: give {algorithm}.reward_model_path, a run of --algorithm rm or a reward model "
            f"in Hugging Face's form, or {algorithm}.reward_functions, such as [exact_match] or [rewards.py:function]"
        )


def rewards_of(file: YamlConfig) -> tuple[tuple[str, float], ...]:
    """The name and the weight of each reward, that of a model last; empty if there is none.

    Raises UsageError. A model is not looked for: data may be prepared before it is trained.
    """
    models = (*file.own(*_MODELS), *(f"model.{name}" for name in _MODELS))
    functions, weights = file.own(*_FUNCTIONS), file.own(*_WEIGHTS)
    names = file.agreed(_names, *functions) or []
    given = file.agreed(YamlConfig.entries, *weights)
    factors = _factors(given, len(names), weights[0])
    found = [(_reward(name), factor) for name, factor in zip(names, factors, strict=True)]
    file.note(", ".join(f"--rl.rewards.{n}.name {name}" for n, (name, _) in enumerate(found)), *functions)
    file.note(", ".join(f"--rl.rewards.{n}.weight {factor:g}" for n, factor in enumerate(factors)), *weights)
    model = file.agreed(YamlConfig.text, *models)
    if model is not None:
        file.note(f"--rl.rewards.{len(found)}.name model:{address_of(model)}", *models)
        found.append((f"model:{address_of(model)}", 1.0))
    return tuple(found)


def _names(file: YamlConfig, key: str) -> list[str] | None:
    """A list of words, of which a single one may stand alone."""
    value: Any = file.values.get(key)
    names = [file.text(key)] if isinstance(value, str) else file.entries(key)
    for name in names or ():
        if not isinstance(name, str):
            raise UsageError(
                f"{key} has {json.dumps(name)}; needed are names, such as exact_match or rewards.py:function"
            )
    return names


def _reward(name: str) -> str:
    """The name of a reward; a folder is a reward model's."""
    return f"model:{name}" if Path(name).expanduser().is_dir() else name


def _factors(given: list[Any] | None, count: int, key: str) -> list[float]:
    if given is None:
        return [1.0] * count
    if len(given) != count or any(isinstance(one, bool | Mapping | str) for one in given):
        raise UsageError(f"{key} is {json.dumps(given)}; needed is a number for each of the {count} reward_functions")
    return [float(one) for one in given]
