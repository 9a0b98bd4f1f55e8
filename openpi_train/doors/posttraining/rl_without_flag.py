"""Keys of ppo and grpo that have no flag: those with one value, those that are refused, those without effect.

Read next: `rl_flags.py`.
"""

import json
from collections.abc import Mapping
from typing import Any

from openpi_train.doors.posttraining.yaml_config import YamlConfig
from openpi_train.runtime.exits import UsageError

_SAMPLED = "completions are sampled and scored by one distribution, --objective.distribution"
_OWN_REWARD = "a reward of your own is a function file.py:function (reward_functions)"
# Keys that have one value here, and why.
ONLY: Mapping[str, tuple[Any, str]] = {
    "use_score_scaling": (False, _OWN_REWARD),
    "use_score_norm": (False, _OWN_REWARD),
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
INSTEAD: Mapping[str, str] = {
    "rollout_batch_size": _OF_ALL,
    "generation_batch_size": _OF_ALL,
    "total_episodes": "give num_epochs, passes over the prompts, or max_steps, optimizer steps",
    "num_episodes": "give num_epochs, passes over the prompts, or max_steps, optimizer steps",
    "missing_eos_penalty": "give the reward overlong:TOKENS (reward_functions), or mask_truncated_completions of grpo",
    "score_clip": _OWN_REWARD,
    "cliprange_reward": _OWN_REWARD,
    "reward_clip_range": _OWN_REWARD,
}
WITHOUT: Mapping[str, str] = {
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


def check_values(file: YamlConfig) -> None:
    """Note keys without a flag. Raises UsageError for values that cannot be."""
    for name, (only, why) in ONLY.items():
        for key in (*file.own(name), f"generation.{name}"):
            file.only(key, only, why, note="no flag: always so")
    for name, instead in INSTEAD.items():
        for key in file.own(name):
            if key in file.values:
                raise UsageError(f"{key} is {json.dumps(file.values[key])}, which there is no flag for: {instead}")
    for text, names in WITHOUT.items():
        file.note(text, *file.own(*names.split()))
