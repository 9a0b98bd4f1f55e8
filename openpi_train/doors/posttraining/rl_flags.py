"""The keys of reinforcement learning (ppo, grpo) as flags of RL and of its objective.

Names are those of the tool, and what TRL, OpenRLHF and LLaMA-Factory call the same.
Read next: `iteration_flags.py`, `reward_keys.py`, `rl_without_flag.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from openpi_train.doors.posttraining.iteration_flags import iteration_flags
from openpi_train.doors.posttraining.rl_without_flag import check_values
from openpi_train.doors.posttraining.yaml_config import Algorithm, YamlConfig
from openpi_train.runtime.exits import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLDefaults:
    """Values of absent keys, which are TRL's (`PPOConfig`, `GRPOConfig` at f2cd577)."""

    group_size: int
    epochs: int
    kl_weight: float
    temperature: float
    learning_rate: float


DEFAULTS: Mapping[Algorithm, RLDefaults] = {
    "ppo": RLDefaults(group_size=1, epochs=4, kl_weight=0.05, temperature=0.7, learning_rate=3e-6),
    "grpo": RLDefaults(group_size=8, epochs=1, kl_weight=0.0, temperature=1.0, learning_rate=1e-6),
}
# The most tokens of a completion, if no key says how many.
_NEW_TOKENS = 256

# Flags that are one value each: how it is read, and the names of its key.
_CRITIC = {
    "objective.value-weight": "number vf_coef value_loss_coef value_coef vf_coeff",
    "objective.value-clip": "number value_clip_range cliprange_value clip_range_value clip_range_vf value_clip",
    "rl.advantages.gamma": "number gamma",
    "rl.advantages.lam": "number lam gae_lambda lambd lambda",
}
_PLAIN: Mapping[Algorithm, Mapping[str, str]] = {
    "ppo": {
        "objective.entropy-weight": "number entropy_coef ent_coef entropy_coeff",
        "objective.clip-most": "number clip_ratio_c",
        **_CRITIC,
        "rl.advantages.whiten": "boolean whiten_advantages normalize_advantages normalize_advantage",
        "rl.advantages.whiten-rewards": "boolean whiten_rewards",
    },
    "grpo": {
        "objective.entropy-weight": "number entropy_coef ent_coef entropy_coeff",
        "objective.clip-most": "number delta clip_ratio_c",
        "rl.mixed-only": "boolean dynamic_sampling dynamic_filtering",
        "rl.mask-cut": "boolean mask_truncated_completions",
    },
}
_KL = "kl_coef init_kl_coef kl_coeff kl_penalty_coef beta".split()
# TRL's name of the switch of an adapted weight, and its target; OpenRLHF's `kl_target` is a switch, too.
_ADAPTS, _TARGET = "adap_kl_ctrl", 6.0
_TARGETS, _HORIZONS = ("kl_target", "target"), ("kl_horizon", "horizon")
_CLIP = "clip_range cliprange clip_epsilon clip_eps clip_ratio eps_clip epsilon".split()
_CLIP_HIGH = "epsilon_high clip_ratio_high clip_range_high".split()
_NEW_TOKENS_KEYS = "max_new_tokens response_length max_completion_length max_response_length generate_max_len".split()
_CRITIC_RATE = "critic_learning_rate value_learning_rate".split()
# Names of what is averaged and of estimators, and ours.
_AVERAGES = {"grpo": "rollouts", "dapo": "units", "bnpo": "units", "dr_grpo": "constant"}
_ESTIMATORS = {
    "ppo": {"gae": "gae"},
    "grpo": {"grpo": "grpo", "group_norm": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_plus_plus"},
}


def rl_flags(file: YamlConfig, *, rows: int, accum: int, of_all: bool, rate: float | None) -> bool:
    """Translate the keys of ppo or grpo, and set the steps of an iteration. Returns whether there is a reference.

    Args:
        rows: of an optimizer step; of all devices (`of_all`) or of one.
        accum: micro-batches of a step.
        rate: the learning rate, if a file has one.

    Raises UsageError.
    """
    defaults, is_ppo = DEFAULTS[file.algorithm], file.algorithm == "ppo"
    check_values(file)
    file.plain_own(_PLAIN[file.algorithm])
    _clip(file)
    _sampling(file)
    new_tokens = _lengths(file)
    if is_ppo:
        _critic_rate(file, rate or defaults.learning_rate)
    else:
        _group_relative(file, new_tokens)
        without_critic = [name for row in _CRITIC.values() for name in row.split()[1:]]
        file.note("no flag: grpo has no critic", *file.own(*without_critic, *_CRITIC_RATE))
    _estimator(file)
    of_step: Any = {"rows": rows, "accum": accum, "of_all": of_all}
    iteration_flags(file, **of_step, group_size=defaults.group_size, epochs=defaults.epochs)
    return _divergence(file, is_ppo, defaults.kl_weight)


def _clip(file: YamlConfig) -> None:
    both, above = file.own(*_CLIP), file.own(*_CLIP_HIGH)
    low, high = file.agreed(YamlConfig.number, *both), file.agreed(YamlConfig.number, *above)
    file.flag("objective.clip-low", low, *both)
    file.flag("objective.clip-high", low if high is None else high, *(both if high is None else above))


def _sampling(file: YamlConfig) -> None:
    for name in ("temperature", "top_p", "min_p"):
        _generated(file, f"objective.distribution.{name.replace('_', '-')}", YamlConfig.number, name)
    _generated(file, "objective.distribution.top-k", _top_k, "top_k")


def _top_k(file: YamlConfig, key: str) -> int | None:
    return 0 if file.number(key) == -1 else file.whole(key)  # other tools have -1 for all tokens


def _generated(file: YamlConfig, flag: str, read: Callable[..., object], *names: str) -> Any:
    """Record a setting of completions, which the section `generation` has for all that are made."""
    own, general = file.own(*names), tuple(f"generation.{name}" for name in names)
    value = file.agreed(read, *own)
    if value is None:
        return file.spelled(flag, read, *general)
    file.flag(flag, value, *own)
    file.note(f"for the command `generate`: {file.algorithm} has its own", *general)
    return value


def _lengths(file: YamlConfig) -> int:
    """The most tokens of prompts and completions. Returns the latter."""
    whole_keys, prompt_keys = ("data.max_length", *file.own("max_length")), ("data.max_prompt_length",)
    prompt_keys += file.own("max_prompt_length")
    whole, prompt = file.agreed(YamlConfig.count, *whole_keys), file.agreed(YamlConfig.count, *prompt_keys)
    new = _generated(file, "rl.max-new-tokens", YamlConfig.count, *_NEW_TOKENS_KEYS)
    if new is None:
        new = _NEW_TOKENS if prompt or not whole else min(_NEW_TOKENS, max(whole // 2, 1))
        file.flag("rl.max-new-tokens", new)
    file.flag("eval.sampling.max-new-tokens", new)
    if prompt is None:
        file.flag("data.max-length", whole, *whole_keys)
    else:
        file.flag("data.max-length", prompt + new, *prompt_keys)
        file.note("no flag: a prompt has at most max_prompt_length tokens, a completion max_new_tokens", *whole_keys)
    file.note("no flag: a prompt is never cut, longer ones are left out", *file.own("truncation_side"))
    return new


def _critic_rate(file: YamlConfig, rate: float) -> None:
    keys = file.own(*_CRITIC_RATE)
    own = file.agreed(YamlConfig.number, *keys)
    if own == rate:
        file.note("no flag: it is the policy's rate", *keys)
    elif own is not None:
        file.flag("optimizer.rate-mask", "critic/", *keys)
        file.flag("optimizer.rate-factor", own / rate, *keys)


def _group_relative(file: YamlConfig, new_tokens: int) -> None:
    """The keys that grpo has alone."""
    losses, levels, scales = (file.own(name) for name in ("loss_type", "importance_sampling_level", "scale_rewards"))
    loss = file.agreed(YamlConfig.word, *losses, allowed=tuple(_AVERAGES))
    file.flag("objective.average", None if loss is None else _AVERAGES[loss], *losses)
    if loss == "dr_grpo":
        file.flag("objective.max-units", new_tokens, *losses)
    level = file.agreed(YamlConfig.word, *levels, allowed=("token", "sequence"))
    file.flag("objective.ratio", {None: None, "token": "unit", "sequence": "mean"}[level], *levels)
    file.spelled("rl.advantages.scale", _scale, *scales)


def _scale(file: YamlConfig, key: str) -> str | None:
    if isinstance(file.values.get(key), bool):
        return "group" if file.boolean(key) else "none"
    return file.word(key, ("group", "batch", "none"))


def _estimator(file: YamlConfig) -> None:
    estimators, names = _ESTIMATORS[file.algorithm], file.own("advantage_estimator", "adv_estimator")
    kind = file.agreed(YamlConfig.word, *names, allowed=tuple(estimators))
    file.flag("rl.advantages.kind", None if kind is None else estimators[kind], *names)


def _divergence(file: YamlConfig, is_ppo: bool, default: float) -> bool:
    """The weight of the divergence from a reference. Returns whether there is one."""
    if is_ppo:
        _adapted(file)
    else:
        _only_without(file, _ADAPTS, "the weight of the divergence in the loss is constant")
        _only_without(file, "whiten_rewards", "grpo scales rewards by scale_rewards")
        file.note("no flag: the weight of the divergence in the loss is constant", *file.own(*_TARGETS, *_HORIZONS))
    flag = "rl.advantages.kl-weight" if is_ppo else "objective.kl-weight"
    weight = file.spelled(flag, YamlConfig.number, *file.own(*_KL))
    kinds = file.own("kl_estimator")
    kind = file.agreed(YamlConfig.word, *kinds, allowed=("k1",) if is_ppo else ("k1", "k2", "k3"))
    if is_ppo:
        file.note("no flag: always so in rewards", *kinds)
    else:
        file.flag("objective.kl-kind", kind, *kinds)
    return (default if weight is None else weight) > 0


def _adapted(file: YamlConfig) -> None:
    """How the weight of the divergence is adapted, if it is."""
    adapts = file.agreed(YamlConfig.boolean, *file.own(_ADAPTS))
    targets, horizons = file.own(*_TARGETS), file.own(*_HORIZONS)
    is_switch = any(key in file.values for key in file.own("kl_target"))
    if adapts or (adapts is None and is_switch):
        target = file.agreed(YamlConfig.number, *targets)
        file.flag("rl.advantages.kl-target", _TARGET if target is None else target, *targets, *file.own(_ADAPTS))
        file.spelled("rl.advantages.kl-horizon", YamlConfig.count, *horizons)
        return
    file.note("no flag: the weight of the divergence is constant", *file.own(_ADAPTS))
    file.note(
        "no flag: without adap_kl_ctrl or kl_target the weight of the divergence is constant", *targets, *horizons
    )


def _only_without(file: YamlConfig, name: str, why: str) -> None:
    """Note a switch that must be off. Raises UsageError if it is on."""
    for key in file.own(name):
        if file.boolean(key):
            raise UsageError(f"{key} is true; allowed: false ({why})")
        file.note(f"no flag: always so, {why}", key)
