"""The keys of reinforcement learning (ppo, grpo) as flags of practice and of its objective.

Names are those of the tool, and what TRL, OpenRLHF and LLaMA-Factory call the same. An iteration makes as many
completions as one optimizer step takes, times `num_mini_batches`, as TRL's does; more if that is no whole group.
Read next: `reward_keys.py`, `practice/text_practice.py`, `objectives/policy_gradient.py`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from openpi_train.interop.posttraining.yaml_config import Algorithm, YamlConfig, contradiction
from openpi_train.runtime.exits import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PracticeDefaults:
    """Values of absent keys, which are TRL's (`PPOConfig`, `GRPOConfig` at f2cd577)."""

    group_size: int
    epochs: int
    kl_weight: float
    temperature: float
    learning_rate: float


DEFAULTS: Mapping[Algorithm, PracticeDefaults] = {
    "ppo": PracticeDefaults(group_size=1, epochs=4, kl_weight=0.05, temperature=0.7, learning_rate=3e-6),
    "grpo": PracticeDefaults(group_size=8, epochs=1, kl_weight=0.0, temperature=1.0, learning_rate=1e-6),
}
# The most tokens of a completion, if no key says how many.
_NEW_TOKENS = 256

# Flags of numbers, by the names of their keys.
_NUMBERS = {"objective.entropy-weight": "entropy_coef ent_coef entropy_coeff"}
_NUMBERS_OF_PPO = {
    "objective.value-weight": "vf_coef value_loss_coef value_coef vf_coeff",
    "objective.value-clip": "value_clip_range cliprange_value clip_range_value clip_range_vf value_clip",
    "practice.advantages.gamma": "gamma",
    "practice.advantages.lam": "lam gae_lambda lambd lambda",
}
_NUMBERS_OF_GRPO = {"objective.clip-most": "delta"}
_SWITCHES_OF_PPO = {"practice.advantages.whiten": "whiten_advantages normalize_advantages normalize_advantage"}
_SWITCHES_OF_GRPO = {
    "practice.mixed-only": "dynamic_sampling dynamic_filtering",
    "practice.mask-cut": "mask_truncated_completions",
}
_GROUP_SIZE = "num_generations group_size num_return_sequences n_samples_per_prompt".split()
_EPOCHS = {"ppo": "ppo_epochs num_ppo_epochs".split(), "grpo": "num_iterations grpo_epochs num_grpo_epochs".split()}
_KL = "kl_coef init_kl_coef kl_coeff kl_penalty_coef beta".split()
_CLIP = "clip_range cliprange clip_epsilon clip_eps clip_ratio eps_clip epsilon".split()
_CLIP_HIGH = "epsilon_high clip_ratio_high clip_range_high".split()
_MINI_BATCHES = "num_mini_batches ppo_buffer_size".split()
_NEW_TOKENS_KEYS = "max_new_tokens response_length max_completion_length max_response_length generate_max_len".split()
_AT_A_TIME = "local_rollout_forward_batch_size micro_rollout_batch_size".split()
_CRITIC_RATE = "critic_learning_rate value_learning_rate".split()
# Names of what is averaged and of estimators, and ours.
_AVERAGES = {"grpo": "attempts", "dapo": "units", "bnpo": "units", "dr_grpo": "constant"}
_ESTIMATORS = {
    "ppo": {"gae": "gae"},
    "grpo": {"grpo": "grpo", "group_norm": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_plus_plus"},
}

_SAMPLED = "completions are sampled and scored by one law, --objective.law"
_OWN_REWARD = "a reward of your own is a function file.py:function (reward_functions)"
# Keys that have one value here, and why.
_ONLY: Mapping[str, tuple[Any, str]] = {
    "whiten_rewards": (False, "advantages are whitened, rewards are not"),
    "use_score_scaling": (False, _OWN_REWARD),
    "use_score_norm": (False, _OWN_REWARD),
    "adap_kl_ctrl": (False, "the weight of the divergence is constant"),
    "early_stopping": (False, "no step of an iteration is left out"),
    "sync_ref_model": (False, "the reference is the start weights, always"),
    "do_sample": (True, "without chance there is nothing to compare"),
    "num_beams": (1, _SAMPLED),
    "repetition_penalty": (1.0, _SAMPLED),
    "no_repeat_ngram_size": (0, _SAMPLED),
    "min_new_tokens": (0, _SAMPLED),
}
_OF_ALL = "give per_device_train_batch_size, gradient_accumulation_steps and num_mini_batches"
# Keys that no value of could be meant as it would be here, and what to give instead.
_INSTEAD: Mapping[str, str] = {
    "rollout_batch_size": _OF_ALL,
    "generation_batch_size": _OF_ALL,
    "total_episodes": "give num_epochs, passes over the prompts, or max_steps, optimizer steps",
    "num_episodes": "give num_epochs, passes over the prompts, or max_steps, optimizer steps",
    "missing_eos_penalty": "give the reward overlong:TOKENS (reward_functions), or mask_truncated_completions of grpo",
    "score_clip": _OWN_REWARD,
    "cliprange_reward": _OWN_REWARD,
    "reward_clip_range": _OWN_REWARD,
}
_WITHOUT: Mapping[str, str] = {
    "no flag: the weight of the divergence is constant, and no step is left out; watch approx_kl and clip_fraction": """
        target_kl kl_target kl_horizon target horizon
    """,
    "no flag: completions are made on the training devices, with the weights that train": """
        use_vllm vllm_mode vllm_server_host vllm_server_port vllm_gpu_memory_utilization vllm_tensor_parallel_size
        ds3_gather_for_generation
    """,
    "no flag: completions of held-out prompts are in eval/<step>/samples.jsonl": """
        log_completions num_completions_to_print num_sample_generations
    """,
    "no flag: the reference is the start weights, always": "ref_model_sync_steps ref_model_mixup_alpha",
    "no flag: models have no dropout": "disable_dropout",
    "no flag: a completion ends with the tokenizer's end tokens, and with those of the references": "stop_token",
}


def practice_flags(file: YamlConfig, *, rows: int, accum: int, of_all: bool, rate: float | None) -> bool:
    """Translate the keys of ppo or grpo, and set the steps of an iteration. Returns whether there is a reference.

    Args:
        rows: of an optimizer step; of all devices (`of_all`) or of one.
        accum: micro-batches of a step.
        rate: the learning rate, if a file has one.

    Raises UsageError.
    """
    defaults, is_ppo = DEFAULTS[file.algorithm], file.algorithm == "ppo"
    _check_values(file)
    numbers = {**_NUMBERS, **(_NUMBERS_OF_PPO if is_ppo else _NUMBERS_OF_GRPO)}
    for flag, names in numbers.items():
        file.spelled(flag, YamlConfig.number, *file.own(*names.split()))
    for flag, names in (_SWITCHES_OF_PPO if is_ppo else _SWITCHES_OF_GRPO).items():
        file.spelled(flag, YamlConfig.boolean, *file.own(*names.split()))
    _clip(file)
    _sampling(file)
    new_tokens = _lengths(file)
    if is_ppo:
        _critic_rate(file, rate or defaults.learning_rate)
    else:
        _group_relative(file, new_tokens)
        without_critic = [name for names in _NUMBERS_OF_PPO.values() for name in names.split()]
        file.note("no flag: grpo has no critic", *file.own(*without_critic, *_CRITIC_RATE))
    _iteration(file, defaults, rows, accum, of_all)
    return _divergence(file, is_ppo, defaults.kl_weight)


def _check_values(file: YamlConfig) -> None:
    """Note keys without a flag. Raises UsageError for values that cannot be."""
    for name, (only, why) in _ONLY.items():
        for key in (*file.own(name), f"generation.{name}"):
            if file.values.get(key, only) != only:
                raise UsageError(f"{key} is {json.dumps(file.values[key])}; allowed: {json.dumps(only)} ({why})")
            file.note("no flag: always so", key)
    for name, instead in _INSTEAD.items():
        for key in file.own(name):
            if key in file.values:
                raise UsageError(f"{key} is {json.dumps(file.values[key])}, which there is no flag for: {instead}")
    for text, names in _WITHOUT.items():
        file.note(text, *file.own(*names.split()))


def _clip(file: YamlConfig) -> None:
    both, above = file.own(*_CLIP), file.own(*_CLIP_HIGH)
    low, high = file.agreed(YamlConfig.number, *both), file.agreed(YamlConfig.number, *above)
    file.flag("objective.clip-low", low, *both)
    file.flag("objective.clip-high", low if high is None else high, *(both if high is None else above))


def _sampling(file: YamlConfig) -> None:
    for name in ("temperature", "top_p", "min_p"):
        _generated(file, f"objective.law.{name.replace('_', '-')}", YamlConfig.number, name)
    # Other tools have -1 for all tokens.
    _generated(file, "objective.law.top-k", lambda file, key: _least(file.number(key), 0), "top_k")


def _least(value: Any, least: int) -> Any:
    return None if value is None else max(int(value), least)


def _generated(file: YamlConfig, flag: str, read: Callable[..., Any], *names: str) -> Any:
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
    new = _generated(file, "practice.max-new-tokens", YamlConfig.count, *_NEW_TOKENS_KEYS)
    if new is None:
        new = _NEW_TOKENS if prompt or not whole else min(_NEW_TOKENS, max(whole // 2, 1))
        file.flag("practice.max-new-tokens", new)
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
    file.spelled("practice.advantages.scale", _scale, *scales)


def _scale(file: YamlConfig, key: str) -> str | None:
    if isinstance(file.values.get(key), bool):
        return "group" if file.boolean(key) else "none"
    return file.word(key, ("group", "batch", "none"))


def _iteration(file: YamlConfig, defaults: PracticeDefaults, rows: int, accum: int, of_all: bool) -> None:
    """Groups, passes and steps of an iteration."""
    estimators, names = _ESTIMATORS[file.algorithm], file.own("advantage_estimator", "adv_estimator")
    kind = file.agreed(YamlConfig.word, *names, allowed=tuple(estimators))
    file.flag("practice.advantages.kind", None if kind is None else estimators[kind], *names)
    group_size = file.spelled("practice.group-size", YamlConfig.count, *file.own(*_GROUP_SIZE)) or defaults.group_size
    epochs = file.spelled("practice.epochs", YamlConfig.count, *file.own(*_EPOCHS[file.algorithm])) or defaults.epochs
    file.spelled("practice.completions-per-device", YamlConfig.count, *file.own(*_AT_A_TIME))
    attempts = math.lcm(rows * _mini_batches(file, rows, accum, of_all), group_size)
    file.flag("practice.num-groups", attempts // group_size, *_mini_batch_keys(file))
    file.iteration_steps = epochs * attempts // rows


def _mini_batch_keys(file: YamlConfig) -> tuple[str, ...]:
    return (*file.own(*_MINI_BATCHES), *file.in_section("batch_size"), *file.own("steps_per_generation"))


def _mini_batches(file: YamlConfig, rows: int, accum: int, of_all: bool) -> int:
    """The optimizer steps that an iteration's completions are taken in."""
    found = {}
    if (count := file.agreed(YamlConfig.count, *file.own(*_MINI_BATCHES))) is not None:
        found["num_mini_batches"] = count
    completions, micros = file.in_section("batch_size"), file.own("steps_per_generation")
    for keys, of_step, what in ((completions, rows, "rows of a step"), (micros, accum, "micro-batches of a step")):
        value = file.agreed(YamlConfig.count, *keys)
        if value is None:
            continue
        key = next(key for key in keys if key in file.values)
        if keys is completions and of_all:
            raise contradiction(f"{key} counts the completions of one device and the DeepSpeed file the rows of all")
        if value % of_step:
            raise UsageError(f"{key} is {value}, which is no multiple of the {of_step} {what}")
        found[key] = value // of_step
    if len(set(found.values())) > 1:
        raise contradiction(" and ".join(f"{key} gives {value} steps of an iteration" for key, value in found.items()))
    return next(iter(found.values()), 1)


def _divergence(file: YamlConfig, is_ppo: bool, default: float) -> bool:
    """The weight of the divergence from a reference. Returns whether there is one."""
    flag = "practice.advantages.kl-weight" if is_ppo else "objective.kl-weight"
    weight = file.spelled(flag, YamlConfig.number, *file.own(*_KL))
    kinds = file.own("kl_estimator")
    kind = file.agreed(YamlConfig.word, *kinds, allowed=("k1",) if is_ppo else ("k1", "k2", "k3"))
    if is_ppo:
        file.note("no flag: always so in rewards", *kinds)
    else:
        file.flag("objective.kl-kind", kind, *kinds)
    return (default if weight is None else weight) > 0
